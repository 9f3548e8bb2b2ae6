"""The replicator over a real link to a daemon without a log: rows out, rows in, and everything that breaks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import SessionId
from kvlog.link.messages import EndedReason, Rejected, RejectReason, UnloggedReason, unpack_tokens
from tests.integration.fake_daemon import FakeDaemon, Knobs
from tests.integration.one_request import (
    MODEL,
    ROW_BYTES,
    SECONDS,
    Engine,
    S,
    assert_logged,
    linked,
    replicating,
    wait_for,
)
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from kvlog.engines.replicator import Replicator


def test_replicator_without_a_daemon_serves_unlogged_at_once(tmp_path):
    """A dead daemon costs no time and raises nothing."""
    with replicating(tmp_path / "s") as replicator:
        began = time.monotonic()
        engine = Engine(replicator)
        engine.step(5)
        engine.close()
        assert time.monotonic() - began < 0.5
        assert (False, UnloggedReason.NO_LINK, 0) == (
            engine.handle.logged,
            UnloggedReason.NO_LINK,
            engine.loaded,
        )
        wait_for(lambda: "No such file" in replicator.counts.refusal)


def test_replicator_logs_every_row_and_the_next_turn_attaches_them(tmp_path):
    """Rows reach the daemon byte for byte; the next turn gets them back and goes on with the same tokens."""
    with linked(tmp_path / "s") as (running, replicator):
        first = Engine(replicator)
        first.step(40)
        assert_logged(running.daemon, first)
        wait_for(lambda: first.handle.acked_length == first.cache.length)
        first.close()
        wait_for(lambda: running.daemon.turns[1].closed_at == first.cache.length)
        second = Engine(replicator, tokens=list(first.tokens))
        assert first.cache.length == second.loaded == second.handle.attach_length == second.handle.log_from
        first.compute()
        second.step()
        assert first.tokens == second.tokens
        wait_for(lambda: running.daemon.released == [1, 2])
        assert_logged(running.daemon, second)
        second.close()
        assert 0 == replicator.loads.failed


def test_replicator_attach_of_everything_leaves_the_last_token_to_compute(tmp_path):
    """Logits come from computing, so one row is always computed."""
    with linked(tmp_path / "s") as (running, replicator):
        first = Engine(replicator)
        first.step(10)
        assert_logged(running.daemon, first)
        first.close()
        again = Engine(replicator, tokens=first.tokens[: first.cache.length])
        assert first.cache.length - 1 == again.loaded
        assert first.cache.length == again.handle.log_from
        again.step()
        assert first.tokens == again.tokens
        again.close()


def test_replicator_wrong_byte_in_the_pool_shortens_the_attach(tmp_path):
    """A row that does not verify is computed; the answer is the same, the failure is counted."""
    with linked(tmp_path / "s", Knobs(spoil_row=13)) as (running, replicator):
        first = Engine(replicator)
        first.step(10)
        assert_logged(running.daemon, first)
        first.close()
        second = Engine(replicator, tokens=list(first.tokens))
        assert second.loaded == 13  # rows 0 to 12, in the middle of a block
        assert (1, 13) == (replicator.loads.failed, replicator.loads.rows_verified)
        first.compute()
        second.step()
        assert first.tokens == second.tokens
        second.close()


def test_replicator_many_turns_in_one_step_are_kept_apart(tmp_path):
    """A batch is one ring entry, and each session gets its own rows."""
    with linked(tmp_path / "s") as (running, replicator):
        engines = [Engine(replicator, SessionId(f"s{k}"), MODEL.encode(f"prompt {k}")) for k in range(8)]
        for _ in range(20):
            for engine in engines:
                engine.compute()
            replicator.after_step([(engine.handle, engine.cache, engine.tokens) for engine in engines])
        for k, engine in enumerate(engines):
            assert_logged(running.daemon, engine, f"s{k}")
            engine.close()
        assert 0 == running.daemon.refused_entries


def test_replicator_full_ring_skips_and_catches_up(tmp_path):
    """A daemon that does not read costs the engine nothing but lag."""
    with linked(tmp_path / "s", Knobs(ring_bytes=1 << 17, paused=True)) as (running, replicator):
        engine = Engine(replicator)
        engine.step(100)
        assert replicator.counts.ring_full > 0
        assert engine.handle.cursor is not None
        assert engine.handle.cursor < engine.cache.length
        running.daemon.knobs.paused = False
        running.call(running.daemon.drain_all)
        engine.step(30)
        engine.close()
        assert_logged(running.daemon, engine)
        assert 0 == running.daemon.refused_entries


def test_replicator_close_holds_the_cache_for_a_bounded_time(tmp_path):
    """What a finished request could not write in time is a shorter prefix, and the daemon is told its length."""
    with linked(tmp_path / "s", Knobs(ring_bytes=1 << 17, paused=True), close_seconds=0.2) as (
        running,
        replicator,
    ):
        engine = Engine(replicator)
        engine.step(100)
        began = time.monotonic()
        engine.close()
        assert 0.15 < time.monotonic() - began < 2
        running.daemon.knobs.paused = False
        running.call(running.daemon.drain_all)
        wait_for(lambda: running.daemon.turns[1].closed_at is not None)
        length = len(running.daemon.sessions[S].tokens)
        assert length == running.daemon.turns[1].closed_at < engine.cache.length
        assert engine.rows()[:length] == running.daemon.sessions[S].rows


def test_replicator_long_prefill_is_written_in_pieces(tmp_path):
    """No step writes more than its budget; all of it arrives."""
    with linked(tmp_path / "s", step_bytes=8 * ROW_BYTES) as (running, replicator):
        engine = Engine(replicator, tokens=[k % 256 for k in range(100)])
        engine.step()
        assert 8 == engine.handle.cursor
        engine.step(3)
        assert 32 == engine.handle.cursor
        engine.close()
        assert_logged(running.daemon, engine)


def test_replicator_fenced_turn_ends_and_is_never_opened_again(tmp_path):
    """INV-NO-CLAIM-BACK, on the engine's side."""
    with linked(tmp_path / "s") as (running, replicator):
        engine = Engine(replicator)
        engine.step(5)
        assert_logged(running.daemon, engine)
        running.call(lambda: running.daemon.fence(S))
        assert engine.handle.fenced.wait(SECONDS)
        rows = len(running.daemon.sessions[S].tokens)
        engine.step(5)
        time.sleep(0.3)
        assert (False, UnloggedReason.FENCED) == (engine.handle.logged, engine.handle.reason)
        assert rows == len(running.daemon.sessions[S].tokens)
        assert 1 == len(running.daemon.opened)
        assert 1 == replicator.counts.turns_fenced
        engine.close()


def test_replicator_daemon_restarted_in_mid_turn_gets_everything_again(tmp_path):
    """The turn is opened anew with the tokens so far, and caught up from the engine's own cache."""
    path = tmp_path / "s"
    with replicating(path) as replicator:
        with FakeDaemon.running(path) as running:
            assert replicator.wait_connected(SECONDS)
            engine = Engine(replicator)
            engine.step(10)
            assert_logged(running.daemon, engine)
            epoch = running.daemon.sessions[S].epoch
        wait_for(lambda: not engine.handle.logged)
        engine.step(10)
        assert UnloggedReason.NO_LINK is engine.handle.reason
        with FakeDaemon.running(path) as running:
            wait_for(lambda: engine.handle.logged)
            assert epoch == running.daemon.opened[0].continues
            assert tuple(engine.tokens) == unpack_tokens(running.daemon.opened[0].tokens)
            engine.step(10)
            assert_logged(running.daemon, engine)
            assert (2, 1) == (replicator.counts.connects, replicator.counts.turns_reopened)
            engine.close()


def test_replicator_session_taken_while_it_had_no_link_is_fenced(tmp_path):
    """A request that lost its session behind its back ends, instead of taking it back."""
    path = tmp_path / "s"
    with replicating(path) as replicator:
        with FakeDaemon.running(path) as running:
            assert replicator.wait_connected(SECONDS)
            engine = Engine(replicator)
            engine.step(3)
            sessions = running.daemon.sessions
        second = FakeDaemon.running(path)
        with second as running:
            sessions[S].epoch += 100
            running.daemon.sessions.update(sessions)
            assert engine.handle.fenced.wait(SECONDS)
            assert 0 == len(running.daemon.turns)
            engine.close()


@pytest.mark.parametrize("reason", [UnloggedReason.CLAIM_TIMEOUT, UnloggedReason.LOG_UNAVAILABLE])
def test_replicator_request_that_began_unlogged_is_logged_when_it_can_be(tmp_path, reason):
    """A late claim loses nothing: the rows are still in the engine's cache."""
    with linked(tmp_path / "s", Knobs(refuse=reason)) as (running, replicator):
        engine = Engine(replicator)
        assert reason is engine.handle.reason
        engine.step(10)
        running.daemon.knobs.refuse = None
        wait_for(lambda: engine.handle.logged)
        engine.step(2)
        assert_logged(running.daemon, engine)
        engine.close()


def test_replicator_busy_session_stays_unlogged(tmp_path):
    """A second request on a session is served, and does not ask again."""
    with linked(tmp_path / "s", Knobs(refuse=UnloggedReason.BUSY)) as (running, replicator):
        engine = Engine(replicator)
        engine.step(3)
        time.sleep(0.3)
        assert 1 == len(running.daemon.opened)
        assert UnloggedReason.BUSY is engine.handle.reason
        engine.close()


@pytest.mark.parametrize("reason", [EndedReason.OUTCOME_UNKNOWN, EndedReason.HANDED_OVER])
def test_replicator_turn_given_up_by_the_daemon_is_opened_anew_if_that_helps(tmp_path, reason):
    """Outcome unknown: claim anew. Handed over: never again."""
    with linked(tmp_path / "s") as (running, replicator):
        engine = Engine(replicator)
        engine.step(5)
        assert_logged(running.daemon, engine)
        running.call(lambda: running.daemon.end_turns(reason))
        wait_for(lambda: not engine.handle.logged or len(running.daemon.opened) > 1)
        if reason.passes:
            wait_for(lambda: engine.handle.logged)
            engine.step(5)
            assert_logged(running.daemon, engine)
        else:
            time.sleep(0.3)
            assert (1, reason) == (len(running.daemon.opened), engine.handle.reason)
        engine.close()


def test_replicator_answer_that_comes_too_late_is_undone(tmp_path):
    """A request does not wait for a slow daemon, and leaves no turn open there."""
    with linked(tmp_path / "s", Knobs(answer_after=0.4), answer_seconds=0.1) as (running, replicator):
        handle = replicator.open_turn(TurnRequest(session=S, wait_seconds=0.05), [1, 2, 3])
        assert UnloggedReason.NO_ANSWER is handle.reason
        cache = MODEL.new_cache()
        replicator.close_turn(handle, cache, [1, 2, 3])
        wait_for(
            lambda: (
                running.daemon.turns and all(turn.closed_at == 0 for turn in running.daemon.turns.values())
            )
        )


def test_replicator_rejected_engine_says_why(tmp_path):
    """The operator finds the daemon's hint in the engine's health."""
    knobs = Knobs(reject=Rejected(RejectReason.IDENTITY, "Serve the same weights."))
    with FakeDaemon.running(tmp_path / "s", knobs), replicating(tmp_path / "s") as replicator:
        wait_for(lambda: "Serve the same weights." in replicator.counts.refusal)
        assert not replicator.connected


def test_replicator_memory_that_is_not_as_the_welcome_says_is_refused(tmp_path):
    """Shared memory is checked before it is touched; descriptors of refused links do not pile up."""
    with (
        FakeDaemon.running(tmp_path / "s", Knobs(pool_bytes_said=1 << 40)),
        replicating(tmp_path / "s") as replicator,
    ):
        wait_for(lambda: "memory is refused" in replicator.counts.refusal)
        before = len(list(Path("/proc/self/fd").iterdir()))
        time.sleep(0.5)
        assert not replicator.connected
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 10


def test_replicator_ring_that_is_spoilt_closes_the_link_and_gets_a_new_one(tmp_path):
    """A ring whose other side holds nonsense is given up, and the turn goes on over the next one."""
    with linked(tmp_path / "s") as (running, replicator):
        engine = Engine(replicator)
        engine.step(5)
        assert_logged(running.daemon, engine)
        running.call(running.daemon.spoil_rings)
        engine.step(1)
        wait_for(lambda: replicator.counts.connects == 2 and engine.handle.logged)
        engine.step(5)
        assert_logged(running.daemon, engine)
        engine.close()


def test_replicator_tokens_beyond_a_session_stay_unlogged(tmp_path):
    """A sequence longer than a session may be is served without the log."""
    with linked(tmp_path / "s") as (_, replicator):
        handle = replicator.open_turn(TurnRequest(session=S), [0] * (3 << 20))
        assert UnloggedReason.NOT_SUPPORTED is handle.reason
        assert replicator.connected


def start_daemon(path: Path, **knobs) -> subprocess.Popen[bytes]:
    """A daemon process that listens."""
    command = [sys.executable, "-m", "tests.integration.fake_daemon", str(path), json.dumps(knobs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    return process


def has_connected_again(replicator: Replicator, connects: int) -> bool:
    """Since it had connected so often."""
    return replicator.counts.connects > connects


def end(process: subprocess.Popen[bytes], how: int) -> None:
    """End a process of ours."""
    process.send_signal(how)
    process.wait(SECONDS)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.e2e
def test_replicator_daemon_killed_again_and_again_under_load_costs_no_request(tmp_path):
    """Kill -9 of the daemon at any moment: every answer is right, every hook is short, and replication comes back."""
    path = tmp_path / "s"
    daemon = start_daemon(path)
    hooks: list[float] = []
    answers, killed = [], 0
    with replicating(path, close_seconds=0.1) as replicator:
        assert replicator.wait_connected(SECONDS)
        for round_ in range(30):
            engines = [
                Engine(replicator, SessionId(f"r{round_}-{k}"), MODEL.encode(f"{round_} {k}"))
                for k in range(4)
            ]
            for step in range(30):
                if round_ % 5 == 2 and step == 3 * (round_ // 5):
                    end(daemon, signal.SIGKILL)
                    killed += 1
                if round_ % 5 == 4 and step == 0 and daemon.returncode is not None:
                    connects = replicator.counts.connects
                    daemon = start_daemon(path)
                    wait_for(partial(has_connected_again, replicator, connects))
                for engine in engines:
                    engine.compute()
                began = time.perf_counter()
                replicator.after_step([(engine.handle, engine.cache, engine.tokens) for engine in engines])
                hooks.append(time.perf_counter() - began)
            for engine in engines:
                engine.close()
                answers.append(engine.tokens)
        wait_for(lambda: replicator.connected)
        assert killed + 1 <= replicator.counts.connects
    end(daemon, signal.SIGTERM)
    for tokens in answers:
        alone, cache = tokens[:-30], MODEL.new_cache()
        for _ in range(30):
            alone.append(int(MODEL.forward(cache, alone[cache.length :]).argmax()))
        assert alone == tokens
    assert sorted(hooks)[len(hooks) // 2] < 0.005
    assert max(hooks) < 0.25, "a hook waited for something"


@pytest.mark.e2e
def test_replicator_paused_daemon_is_given_up_and_found_again(tmp_path):
    """SIGSTOP looks alive to the kernel; silence gives it away, and SIGCONT brings it back."""
    path = tmp_path / "s"
    daemon = start_daemon(path)
    with replicating(path) as replicator:
        assert replicator.wait_connected(SECONDS)
        engine = Engine(replicator)
        engine.step(5)
        daemon.send_signal(signal.SIGSTOP)
        wait_for(lambda: not replicator.connected)
        began = time.monotonic()
        other = Engine(replicator, SessionId("other"))
        assert time.monotonic() - began < 0.5
        assert not other.handle.logged
        daemon.send_signal(signal.SIGCONT)
        wait_for(lambda: engine.handle.logged)
        engine.step(5)
        engine.close()
        other.close()
    end(daemon, signal.SIGTERM)
