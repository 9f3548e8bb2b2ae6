"""The engine's HTTP server over a real step loop, replicator and link: OpenAI's forms, resumes, fences, limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from kvlog.engines.step_loop import StepLoop
from kvlog.engines.synthetic import SyntheticCache, SyntheticModel
from kvlog.link.messages import UnloggedReason
from tests.integration.fake_daemon import FakeDaemon, Knobs
from tests.integration.served_engine import (
    PROMPT,
    SECONDS,
    complete,
    events,
    ids,
    serving,
    serving_beside_a_daemon,
    streamed,
    text,
    wait_for,
)
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine with a daemon, for tests that disturb neither."""
    with serving_beside_a_daemon(tmp_path_factory.mktemp("link") / "s") as served:
        yield served


def test_http_stream_and_whole_answer_are_the_same(engine):
    """Streaming is a form, not another answer."""
    whole = complete(engine.client, max_tokens=12)
    chunks = streamed(engine.client, max_tokens=12)
    assert (whole["choices"][0]["text"], whole["choices"][0]["token_ids"]) == (text(chunks), ids(chunks))
    assert [None] * 12 + ["length"] == [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    expected = {"prompt_tokens": len(PROMPT), "completion_tokens": 12, "total_tokens": len(PROMPT) + 12}
    assert expected == whole["usage"] == chunks[-1]["usage"]


def test_http_next_turn_of_a_session_attaches_what_is_known(engine):
    """A conversation's second turn computes only what is new, and says so."""
    first = complete(engine.client, max_tokens=10, session="two-turns")
    assert (True, 0, 0) == tuple(first["kvlog"][name] for name in ("logged", "attached", "log_from"))
    tokens = [*PROMPT.encode(), *first["choices"][0]["token_ids"]]
    wait_for(lambda: len(engine.daemon.sessions["two-turns"].tokens) == len(tokens) - 1)
    second = complete(engine.client, prompt=[*tokens, *b" and then"], max_tokens=5, session="two-turns")
    assert (len(tokens) - 1, 10) == (second["kvlog"]["attached"], second["kvlog"]["recomputed"])
    alone = complete(engine.client, prompt=[*tokens, *b" and then"], max_tokens=5)
    assert alone["choices"] == second["choices"]
    assert 0 < second["kvlog"]["first_token_ms"] < 1000 * SECONDS


def test_http_session_may_come_in_a_header(engine):
    """Clients whose library hides the body can still name the session."""
    engine.client.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Session-ID": "by-header"}
    )
    assert "by-header" in engine.daemon.sessions


def test_http_session_named_by_its_request_is_forgotten(engine):
    """Nobody can come back to it, so it ends with the request."""
    answer = complete(engine.client, max_tokens=2)
    wait_for(lambda: answer["id"] in engine.daemon.forgotten)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}])
@pytest.mark.parametrize("cut", [1, 9, 24])
def test_http_answer_begun_elsewhere_goes_on_without_a_seam(engine, sampling, cut):
    """Tokens so far are output: limit, draws and text go on where the other node stopped."""
    body = {"max_tokens": 25, "session": f"resume-{cut}-{len(sampling)}", **sampling}
    whole = streamed(engine.client, **body)
    rest = streamed(engine.client, resume_token_ids=ids(whole)[:cut], **body)
    assert ids(whole)[cut:] == ids(rest)
    assert text(whole) == text(whole[:cut]) + text(rest)
    assert whole[-1]["usage"] == rest[-1]["usage"]
    assert len(PROMPT) + cut - 1 == rest[-1]["kvlog"]["attached"]
    ours = [asked.take_over for asked in engine.daemon.opened if asked.session == body["session"]]
    assert [False, True] == ours[-2:]


def test_http_answer_resumed_at_its_end_is_over(engine):
    """A node that died between the last token and its end has a successor with nothing to compute."""
    whole = streamed(engine.client, max_tokens=4)
    rest = streamed(engine.client, max_tokens=4, resume_token_ids=ids(whole))
    assert ["length"] == [chunk["choices"][0]["finish_reason"] for chunk in rest]


def test_http_stop_string_ends_the_answer_before_it(engine):
    """What stops is not shown."""
    whole = complete(engine.client, max_tokens=10)["choices"][0]["text"]
    stop = whole.split()[3]
    stopped = complete(engine.client, max_tokens=10, stop=stop)["choices"][0]
    assert (whole[: whole.index(stop)], "stop") == (stopped["text"], stopped["finish_reason"])


def test_http_chat_has_openais_forms(engine):
    """An OpenAI client finds what it looks for."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    whole = engine.client.post("/v1/chat/completions", json=body).json()
    message = whole["choices"][0]["message"]
    assert ("chat.completion", "assistant") == (whole["object"], message["role"])
    with engine.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        chunks = list(events(response))
    assert {"chat.completion.chunk"} == {chunk["object"] for chunk in chunks}
    assert message["content"] == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_http_models_and_health_tell_what_runs(engine):
    """The router's two questions."""
    assert ["synthetic"] == [model["id"] for model in engine.client.get("/v1/models").json()["data"]]
    health = engine.client.get("/health").json()
    assert ("ok", True) == (health["status"], health["connected"])


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{}", "prompt: "), (b"not json", "body: "), (b'{"prompt":"x","max_tokens":-1}', "max_tokens: ")],
)
def test_http_bad_input_is_400_with_a_sentence(engine, content, said):
    """Who sends a bad request reads what is wrong with it."""
    response = engine.client.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(said)


def test_http_body_too_large_is_refused(engine, monkeypatch):
    """Nobody fills the engine's memory with a body."""
    monkeypatch.setattr("kvlog.engines.server.BODY_BYTES_MAX", 1000)
    assert engine.client.post("/v1/completions", content=b" " * 2000).status_code == 413


def test_http_many_sessions_at_once_answer_as_if_alone(engine):
    """Requests share steps, never rows."""
    prompts = [f"{PROMPT} {k}" for k in range(12)]
    alone = [complete(engine.client, prompt=prompt, max_tokens=20)["choices"] for prompt in prompts]
    together: dict[str, object] = {}

    def ask(prompt: str) -> None:
        together[prompt] = complete(engine.client, prompt=prompt, max_tokens=20, session=prompt)["choices"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert alone == [together[prompt] for prompt in prompts]


def test_http_fenced_request_ends_at_once_with_an_error_event(tmp_path):
    """A user never sees a token of a node that has lost the session, beyond those under way."""
    with (
        FakeDaemon.running(tmp_path / "s") as running,
        serving(tmp_path / "s", steps_per_second=50) as served,
    ):
        body = {"prompt": PROMPT, "stream": True, "max_tokens": 5000, "session": "f"}
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            for _ in range(5):
                next(stream)
            running.call(lambda: running.daemon.fence("f"))
            rest = list(stream)
        assert rest[-1]["error"]["type"] == "fenced"
        assert len(rest) < 500
        wait_for(lambda: served.loop.active == 0)
        assert "f" not in running.daemon.forgotten


def test_http_fenced_request_that_is_not_streamed_is_409(tmp_path):
    """The router sees from the status that the answer goes on elsewhere."""
    with (
        FakeDaemon.running(tmp_path / "s") as running,
        serving(tmp_path / "s", steps_per_second=50) as served,
    ):
        answers: list[httpx.Response] = []
        body = {"prompt": PROMPT, "max_tokens": 5000, "session": "f"}
        thread = threading.Thread(
            target=lambda: answers.append(served.client.post("/v1/completions", json=body))
        )
        thread.start()
        wait_for(lambda: "f" in running.daemon.sessions and running.daemon.sessions["f"].tokens)
        running.call(lambda: running.daemon.fence("f"))
        thread.join(SECONDS)
        assert (409, "fenced") == (answers[0].status_code, answers[0].json()["error"]["type"])


@pytest.mark.parametrize("stream", [True, False])
def test_http_client_that_leaves_frees_its_place(tmp_path, stream):
    """Nobody computes for a client that has gone."""
    with (
        FakeDaemon.running(tmp_path / "s") as running,
        serving(tmp_path / "s", steps_per_second=20) as served,
    ):
        body = {"prompt": PROMPT, "stream": stream, "max_tokens": 5000, "session": "gone"}
        with httpx.Client(
            base_url=served.client.base_url, verify=NO_AUTHORITIES, timeout=httpx.Timeout(0.3)
        ) as leaving:
            if stream:
                with leaving.stream("POST", "/v1/completions", json=body) as response:
                    next(events(response))
                    assert served.loop.active == 1
            else:
                with pytest.raises(httpx.ReadTimeout):
                    leaving.post("/v1/completions", json=body)
        wait_for(lambda: served.loop.active == 0)
        wait_for(lambda: running.daemon.turns[1].closed_at is not None)


def test_http_full_queue_is_503_and_says_when_to_come_back(tmp_path):
    """Load is shed at the door, with a bound on what waits inside; what was taken is answered."""
    with serving(tmp_path / "s", active_max=1, queued_max=1, steps_per_second=50) as served:
        answers: list[int] = []
        body = {"prompt": PROMPT, "max_tokens": 30}

        def ask() -> None:
            answers.append(served.client.post("/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: served.loop.active == 1 and served.loop.queued == 1)
        response = served.client.post("/v1/completions", json=body)
        assert (503, "1") == (response.status_code, response.headers["retry-after"])
        for thread in threads:
            thread.join(SECONDS)
        assert [200, 200] == answers


def test_http_without_a_daemon_serves_and_says_that_nothing_is_logged(tmp_path):
    """Generation does not need the daemon."""
    with serving(tmp_path / "s") as served:
        answer = complete(served.client, max_tokens=3)
        assert (False, "no_link") == (answer["kvlog"]["logged"], answer["kvlog"]["reason"])


def test_http_busy_session_is_served_and_says_so(tmp_path):
    """A second request on a session in use gets its answer, unlogged."""
    knobs = Knobs(refuse=UnloggedReason.BUSY)
    with FakeDaemon.running(tmp_path / "s", knobs), serving(tmp_path / "s") as served:
        answer = complete(served.client, max_tokens=3, session="b")
        assert (False, "busy") == (answer["kvlog"]["logged"], answer["kvlog"]["reason"])


def test_http_model_that_fails_costs_its_request_only(tmp_path, monkeypatch):
    """A step that cannot be computed ends one answer with a reason; the engine goes on."""
    forward = SyntheticModel.forward

    def failing(self, cache, tokens):
        if 13 in tokens:
            raise MemoryError("too much")
        return forward(self, cache, tokens)

    monkeypatch.setattr(SyntheticModel, "forward", failing)
    with serving(tmp_path / "s") as served:
        response = served.client.post("/v1/completions", json={"prompt": [13], "max_tokens": 3})
        assert (500, "internal") == (response.status_code, response.json()["error"]["type"])
        assert complete(served.client, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_http_attach_that_fails_leaves_no_turn_open(tmp_path, monkeypatch):
    """Too little memory for an attach ends the request and its turn; the session is free for the next one."""
    with FakeDaemon.running(tmp_path / "s") as running, serving(tmp_path / "s") as served:
        complete(served.client, max_tokens=3, session="m")

        def failing(self, rows):
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(SyntheticCache, "load_rows", failing)
            response = served.client.post("/v1/completions", json={"prompt": PROMPT, "session": "m"})
            assert (500, "internal") == (response.status_code, response.json()["error"]["type"])
        wait_for(lambda: len(running.daemon.turns) == 2 and running.daemon.turns[2].closed_at is not None)
        wait_for(lambda: served.loop.active == 0)


def test_http_engine_whose_loop_has_failed_says_so(tmp_path, monkeypatch):
    """Health fails and requests are refused: nobody is accepted who would never be answered."""
    with serving(tmp_path / "s") as served:
        monkeypatch.setattr(StepLoop, "_keep_pace", None)
        response = served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
        assert (500, "internal") == (response.status_code, response.json()["error"]["type"])
        health = served.client.get("/health")
        assert (503, "failed: ") == (health.status_code, health.json()["status"][:8])
        response = served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
        assert (503, "failed") == (response.status_code, response.json()["error"]["type"])


@contextmanager
def process(path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """An engine process and its address."""
    command = [sys.executable, "-m", "kvlog.engines", "synthetic", "--link", os.fspath(path), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent) as started:
        assert started.stdout is not None
        ready, address = started.stdout.readline().split()
        assert ready == "ready"
        try:
            yield started, address
        finally:
            if started.poll() is None:
                started.kill()


@pytest.mark.e2e
@pytest.mark.slow
def test_http_engine_killed_in_mid_answer_is_continued_by_another(tmp_path):
    """Kill -9 of engine A; engine B attaches what the daemon has and the user's text goes on without a seam."""
    path = tmp_path / "s"
    body = {"prompt": PROMPT, "max_tokens": 60, "session": "story", "stream": True, "return_token_ids": True}
    with FakeDaemon.running(path, Knobs(block_bytes=1 << 16)) as running, process(path) as (_, address):
        reference = streamed(
            httpx.Client(base_url=address, verify=NO_AUTHORITIES), **{**body, "session": "reference"}
        )
        with process(path, "--tokens-per-second", "100") as (victim, doomed):
            seen: list[dict] = []
            with (
                httpx.Client(base_url=doomed, verify=NO_AUTHORITIES) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
                suppress(httpx.RemoteProtocolError),
            ):
                for event in events(response):
                    seen.append(event)
                    if len(seen) == 20:
                        victim.send_signal(signal.SIGKILL)
            assert 20 <= len(seen) < 60
        logged = len(running.daemon.sessions["story"].tokens)
        with httpx.Client(base_url=address, verify=NO_AUTHORITIES) as client:
            rest = streamed(client, **body, resume_token_ids=ids(seen))
    assert ids(reference) == ids(seen) + ids(rest)
    assert text(reference) == text(seen) + text(rest)
    assert logged == rest[-1]["kvlog"]["attached"]
    assert rest[-1]["kvlog"]["recomputed"] <= 2, "the ring had every row but those under way"


@pytest.mark.e2e
@pytest.mark.slow
def test_engine_process_stops_on_sigterm(tmp_path):
    """An orderly stop is exit code 0."""
    with process(tmp_path / "s") as (started, address):
        assert httpx.get(f"{address}/health", verify=NO_AUTHORITIES).json()["connected"] is False
        started.send_signal(signal.SIGTERM)
        assert started.wait(SECONDS) == 0


def test_engine_process_with_a_bad_setting_says_which():
    """A wrong argument is a sentence and exit code 2, not a traceback."""
    command = [sys.executable, "-m", "kvlog.engines", "synthetic", "--row-bytes", "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent)
    assert done.returncode == 2
    assert "--row-bytes" in done.stderr
    assert "Traceback" not in done.stderr
