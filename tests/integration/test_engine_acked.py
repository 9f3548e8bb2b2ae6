"""`acked` mode over HTTP: a token is shown when the log holds what it was drawn from, or is said to be late."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from kvlog.engines.acked_gate import AckedOptions, Late
from kvlog.engines.synthetic import SyntheticModel
from kvlog.link.messages import EndedReason, UnloggedReason
from tests.integration.fake_daemon import FakeDaemon, Knobs
from tests.integration.served_engine import (
    PROMPT,
    SECONDS,
    complete,
    events,
    ids,
    serving,
    streamed,
    text,
    wait_for,
)

if TYPE_CHECKING:
    from tests.integration.fake_daemon import Running

BODY = {"prompt": PROMPT, "return_token_ids": True, "stream": True, "acked": True, "acked_seconds": SECONDS}


def acked(answer: dict) -> tuple[str, str | None]:
    """What an answer's end says of it."""
    return answer["kvlog"]["acked"], answer["kvlog"]["acked_reason"]


def resume(running: Running) -> None:
    """The daemon reads its rings again."""
    running.daemon.knobs.paused = False
    running.call(running.daemon.drain_all)


@dataclass
class Reading:
    """A streamed answer that is read on a thread of its own."""

    client: httpx.Client
    body: dict
    chunks: list[dict] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        with self.client.stream("POST", "/v1/completions", json={**BODY, **self.body}) as response:
            for chunk in events(response):
                self.chunks.append(chunk)


def test_acked_token_is_shown_only_when_the_log_holds_what_it_was_drawn_from(tmp_path):
    """The token at position n comes after n rows are in the log; the answer is the same."""
    with FakeDaemon.running(tmp_path / "s") as running, serving(tmp_path / "s") as served:
        plain = streamed(served.client, max_tokens=30)
        shown, in_log = [], []
        with served.client.stream(
            "POST", "/v1/completions", json={**BODY, "session": "a", "max_tokens": 30}
        ) as response:
            for chunk in events(response):
                in_log.append(len(running.daemon.sessions["a"].tokens))
                shown.append(chunk)
        assert ids(plain) == ids(shown)
        late = [k for k, rows in enumerate(in_log[:30]) if rows < len(PROMPT) + k]
        assert [] == late
        assert ("held", None) == acked(shown[-1])
        assert "acked" not in plain[-1]["kvlog"]


def test_acked_answer_waits_for_a_log_that_stands_still_and_costs_no_place(tmp_path):
    """Nothing is shown while nothing is acknowledged, to the last token; whoever did not ask for it does not wait."""
    with (
        FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running,
        serving(tmp_path / "s", active_max=1) as served,
    ):
        with Reading(served.client, {"session": "a", "max_tokens": 5}) as reading:
            wait_for(lambda: 1 in running.daemon.turns)
            for k in range(3):
                complete(served.client, max_tokens=3, session=f"plain {k}")
            assert [] == reading.chunks
            assert running.daemon.turns[1].closed_at is None
            resume(running)
        assert (5, ("held", None)) == (len(ids(reading.chunks)), acked(reading.chunks[-1]))
        wait_for(lambda: running.daemon.turns[1].closed_at == len(PROMPT) + 4)


def test_acked_answer_that_is_late_degrades_and_says_so(tmp_path):
    """Past the deadline the answer goes on as any other."""
    knobs = Knobs(paused=True)
    with FakeDaemon.running(tmp_path / "s", knobs) as running, serving(tmp_path / "s") as served:
        began = time.monotonic()
        answer = complete(served.client, max_tokens=200, session="a", acked=True, acked_seconds=0.3)
        assert 0.3 <= time.monotonic() - began < 2
        assert (200, ("degraded", "deadline")) == (answer["usage"]["completion_tokens"], acked(answer))
        wait_for(lambda: running.daemon.turns[1].closed_at is not None)


def test_acked_answer_that_is_late_fails_where_it_is_set_so(tmp_path):
    """Whoever prefers an error to an answer that may be lost gets one, and no token that the log has not."""
    options = AckedOptions(seconds=0.2, late=Late.FAIL)
    with (
        FakeDaemon.running(tmp_path / "s", Knobs(paused=True)),
        serving(tmp_path / "s", acked=options) as served,
    ):
        chunks = streamed(served.client, max_tokens=5000, session="a", acked=True)
        assert ["not_acked"] == [chunk["error"]["type"] for chunk in chunks]
        assert "deadline" in chunks[0]["error"]["message"]
        body = {"prompt": PROMPT, "max_tokens": 5, "acked": True}
        response = served.client.post("/v1/completions", json=body)
        assert (503, "not_acked") == (response.status_code, response.json()["error"]["type"])
        wait_for(lambda: served.loop.active == 0)


@pytest.mark.parametrize("refuse", [None, UnloggedReason.BUSY, UnloggedReason.CLAIM_TIMEOUT])
def test_acked_answer_that_begins_unlogged_degrades_at_once(tmp_path, refuse):
    """There is nothing to wait for: busy, no daemon, or a claim that takes too long."""
    began = time.monotonic()
    if refuse is None:
        with serving(tmp_path / "s") as served:
            began = time.monotonic()
            answer = complete(served.client, max_tokens=5, acked=True, acked_seconds=SECONDS)
    else:
        with FakeDaemon.running(tmp_path / "s", Knobs(refuse=refuse)), serving(tmp_path / "s") as served:
            began = time.monotonic()
            answer = complete(served.client, max_tokens=5, acked=True, acked_seconds=SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    assert ("degraded", str(refuse or "no_link")) == acked(answer)


def test_acked_answer_whose_session_is_handed_over_degrades_with_that_reason(tmp_path):
    """A turn that will never be logged again is not waited for."""
    with FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running, serving(tmp_path / "s") as served:
        with Reading(served.client, {"session": "a", "max_tokens": 5}) as reading:
            wait_for(lambda: 1 in running.daemon.turns)
            running.call(lambda: running.daemon.end_turns(EndedReason.HANDED_OVER))
        assert ("degraded", "handed_over") == acked(reading.chunks[-1])


@pytest.mark.parametrize("tokens", [5, 5000])
def test_acked_answer_that_is_fenced_shows_nothing_that_was_held(tmp_path, tokens):
    """What the log does not have is the other node's to say, also when this one has computed all of it."""
    with (
        FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running,
        serving(tmp_path / "s", steps_per_second=200) as served,
    ):
        with Reading(served.client, {"session": "a", "max_tokens": tokens}) as reading:
            wait_for(lambda: 1 in running.daemon.turns)
            wait_for(lambda: served.loop.active == (tokens > 5))
            running.call(lambda: running.daemon.fence("a"))
        assert ["fenced"] == [chunk["error"]["type"] for chunk in reading.chunks]


def test_acked_answer_waits_for_a_daemon_that_comes_back(tmp_path):
    """A daemon that restarts within the deadline costs time; its successor gets every row, and the tokens go out."""
    with serving(tmp_path / "s") as served:
        with FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running:
            wait_for(lambda: served.replicator.connected)
            reading = Reading(served.client, {"session": "a", "max_tokens": 5})
            with reading:
                wait_for(lambda: 1 in running.daemon.turns and served.loop.active == 0)
                running.stop()
                with FakeDaemon.running(tmp_path / "s") as successor:
                    wait_for(partial(len, reading.chunks))
                    wait_for(lambda: len(ids(reading.chunks)) == 5)
        assert ("held", None) == acked(reading.chunks[-1])
        assert len(PROMPT) + 4 == len(successor.daemon.sessions["a"].tokens)


def test_acked_answers_that_are_kept_for_the_log_are_bounded(tmp_path):
    """So many caches wait for the log as are computed at once; the next finished answer is not held, and says so."""
    with (
        FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running,
        serving(tmp_path / "s", active_max=1) as served,
    ):
        with Reading(served.client, {"session": "a", "max_tokens": 5}) as reading:
            wait_for(lambda: 1 in running.daemon.turns and served.loop.active == 0)
            answer = complete(served.client, max_tokens=5, session="b", acked=True, acked_seconds=SECONDS)
            assert ("degraded", "overloaded") == acked(answer)
            resume(running)
        assert ("held", None) == acked(reading.chunks[-1])


@pytest.mark.parametrize("stream", [True, False])
def test_acked_answer_whose_client_leaves_is_not_kept_for_the_log(tmp_path, stream):
    """Nobody waits any more: its turn and its cache go at once, long before anything is late."""
    with (
        FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running,
        serving(tmp_path / "s", active_max=1) as served,
    ):
        body = {**BODY, "session": "a", "max_tokens": 5, "stream": stream, "acked_seconds": 600}
        with (
            httpx.Client(
                base_url=served.client.base_url, verify=NO_AUTHORITIES, timeout=httpx.Timeout(0.3)
            ) as leaving,
            pytest.raises(httpx.ReadTimeout),
            leaving.stream("POST", "/v1/completions", json=body) as response,
        ):
            list(events(response))
        wait_for(lambda: 1 in running.daemon.turns and running.daemon.turns[1].closed_at is not None)


def test_acked_answer_that_fails_shows_nothing_that_the_log_has_not(tmp_path, monkeypatch):
    """An error has no place to say that tokens before it were late: who goes on elsewhere has what is in the log."""
    forward = SyntheticModel.forward

    def failing(self, cache, tokens):
        if cache.length > len(PROMPT) + 3:
            raise MemoryError("too much")
        return forward(self, cache, tokens)

    monkeypatch.setattr(SyntheticModel, "forward", failing)
    with FakeDaemon.running(tmp_path / "s", Knobs(paused=True)), serving(tmp_path / "s") as served:
        chunks = streamed(served.client, max_tokens=10, session="a", acked=True, acked_seconds=SECONDS)
        assert ["internal"] == [chunk.get("error", {}).get("type") for chunk in chunks]


def test_acked_answer_whose_daemon_does_not_come_back_degrades_with_that_reason(tmp_path):
    """The lost link has the same seconds; until then nothing is shown."""
    with FakeDaemon.running(tmp_path / "s", Knobs(paused=True)) as running, serving(tmp_path / "s") as served:
        body = {"session": "a", "max_tokens": 20, "acked_seconds": 0.7}
        with Reading(served.client, body) as reading:
            wait_for(lambda: 1 in running.daemon.turns)
            running.stop()
            assert [] == reading.chunks
        assert (20, ("degraded", "no_link")) == (len(ids(reading.chunks)), acked(reading.chunks[-1]))


@pytest.mark.parametrize(
    "more",
    [{"stop": " "}, {"temperature": 1.0, "seed": 5}, {"resume_token_ids": 7}, {"sync": "every:4,20ms"}],
)
def test_acked_answer_is_that_of_any_other_request(tmp_path, more):
    """Stop strings, seeds, answers begun elsewhere: the same text and end, each token held; whole answers as well."""
    with FakeDaemon.running(tmp_path / "s") as running, serving(tmp_path / "s") as served:
        if "resume_token_ids" in more:
            more = {"resume_token_ids": ids(streamed(served.client, max_tokens=more["resume_token_ids"]))}
        begun = len(PROMPT) + len(more.get("resume_token_ids", ()))
        body = {**BODY, "max_tokens": 20, **more}
        plain = complete(served.client, **{**body, "stream": False, "acked": False})
        chunks = []
        with served.client.stream("POST", "/v1/completions", json={**body, "session": "a"}) as response:
            for number, chunk in enumerate(events(response)):
                chunks.append(chunk)
                if "token_ids" in chunk["choices"][0]:
                    assert begun + number <= len(running.daemon.sessions["a"].tokens)
        whole = complete(served.client, **{**body, "stream": False})
        for answer in (text(chunks), whole["choices"][0]["text"]):
            assert plain["choices"][0]["text"] == answer
        assert plain["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"]
        assert [("held", None)] * 2 == [acked(chunks[-1]), acked(whole)]


def test_acked_request_is_logged_with_its_rows_whatever_the_daemons_setting(tmp_path):
    """A daemon may be set to log token ids only; what is acked has its rows in the log."""
    with FakeDaemon.running(tmp_path / "s") as running, serving(tmp_path / "s") as served:
        for body in ({}, {"acked": True}, {"acked": True, "sync": "every:4,20ms"}):
            complete(served.client, max_tokens=2, session="a", **body)
        assert [None, "full", "every:4,20ms"] == [
            asked.mode and str(asked.mode) for asked in running.daemon.opened
        ]
