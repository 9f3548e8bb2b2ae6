"""The daemon's small pure parts: progress, backlog, pace, notify, and the one place that feeds the core."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, cast

from daemon.backlog import BacklogMeter
from daemon.node import NodeShell
from daemon.notify import Notifier
from daemon.pace import Pacer
from daemon.progress import Progress, Sample
from kvlog.core.effects import SessionEnded, SessionHealed
from kvlog.core.inputs import Stop
from kvlog.ids import Offset, SessionId

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.core.node import NodeCore

MIB = 1 << 20


def test_progress_with_work_and_no_movement_is_stuck() -> None:
    """A loop that has had work all the time and did none is stuck once its time is over, and not before."""
    progress = Progress(10)
    assert progress.stuck(0, {"publish": Sample(5, waiting=True)}) == ()
    assert progress.stuck(10, {"publish": Sample(5, waiting=True)}) == ()
    assert progress.stuck(11, {"publish": Sample(5, waiting=True)}) == ("publish",)
    assert progress.stuck(12, {"publish": Sample(6, waiting=True)}) == ()


def test_progress_of_an_idle_loop_is_never_stuck() -> None:
    """Idle time does not count, however long it is."""
    progress = Progress(10)
    for now in (0, 100, 200):
        assert progress.stuck(now, {"fetch": Sample(5, waiting=False)}) == ()
    assert progress.stuck(205, {"fetch": Sample(5, waiting=True)}) == ()
    assert progress.stuck(215.5, {"fetch": Sample(5, waiting=True)}) == ("fetch",)


def test_backlog_without_a_backlog_knows_nothing() -> None:
    """Records that became durable one by one say nothing of what the log could take."""
    meter = BacklogMeter()
    for second in range(100):
        meter.completed(float(second), MIB, 0)
    assert meter.bytes_per_second is None


def test_backlog_counts_only_what_came_while_more_waited() -> None:
    """Intervals that begin or end without a backlog are left out."""
    meter = BacklogMeter()
    meter.completed(0.0, MIB, 4 * MIB)
    meter.completed(1.0, 2 * MIB, 4 * MIB)
    meter.completed(2.0, 2 * MIB, 0)
    meter.completed(50.0, MIB, 4 * MIB)
    assert meter.bytes_per_second == 2 * MIB


async def test_pacer_without_a_cap_never_waits() -> None:
    """No cap, no pause."""
    began = time.monotonic()
    for _ in range(1000):
        await Pacer(None).spend(1 << 30)
    assert time.monotonic() - began < 1


async def test_pacer_holds_the_average_to_the_cap() -> None:
    """Past a quarter of a second's burst, bytes wait for their time."""
    pacer = Pacer(1 << 20)
    began = time.monotonic()
    for _ in range(8):
        await pacer.spend(1 << 16)
    assert 0.2 <= time.monotonic() - began < 2


def test_notifier_tells_systemd_and_is_silent_elsewhere(tmp_path: Path) -> None:
    """Messages go to the socket that the environment names; without one nothing happens."""
    Notifier(None).ready("serving")
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(5)
        notifier = Notifier(str(path), "30000000")
        notifier.ready("serving")
        notifier.watchdog("fine")
        notifier.stopping()
        said = [systemd.recv(200).decode() for _ in range(3)]
    assert said == ["READY=1\nSTATUS=serving", "WATCHDOG=1\nSTATUS=fine", "STOPPING=1"]
    assert notifier.watchdog_seconds == 30
    Notifier(str(tmp_path / "gone")).ready("serving")


def test_service_manager_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    """A datagram socket's queue is ten long: past it the daemon's loop would stand in the kernel."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        notifier, began = Notifier(str(path), "30000000"), time.monotonic()
        for _ in range(2000):
            notifier.watchdog("fine")
        notifier.stopping()
        assert time.monotonic() - began < 5


def test_shell_finishes_one_input_before_it_takes_the_next() -> None:
    """An input that a handler gives waits until the effects of the current one are done."""
    session = SessionId("s")
    done: list[object] = []

    class TwoEffects:
        def step(self, happened: Stop) -> tuple[object, ...]:
            del happened
            first = not done
            return (SessionHealed(session, Offset(1)), SessionEnded(session, Offset(2))) if first else ()

    shell = NodeShell(cast("NodeCore", TwoEffects()))

    def healed(effect: SessionHealed) -> None:
        done.append(effect)
        shell.step(Stop())
        done.append("after the nested step")

    shell.handle(SessionHealed, healed)
    shell.handle(SessionEnded, done.append)
    shell.step(Stop())
    assert done == [
        SessionHealed(session, Offset(1)),
        "after the nested step",
        SessionEnded(session, Offset(2)),
    ]


async def test_shell_is_usable_after_a_handler_has_failed() -> None:
    """A failing handler stops the daemon, but does not leave the shell locked for whoever cleans up."""
    session = SessionId("s")

    class OneEffect:
        def step(self, happened: Stop) -> tuple[object, ...]:
            del happened
            return (SessionHealed(session, Offset(1)),)

    shell = NodeShell(cast("NodeCore", OneEffect()))
    seen: list[int] = []

    def fails(effect: SessionHealed) -> None:
        seen.append(effect.offset)
        raise AssertionError(effect)

    shell.handle(SessionHealed, fails)
    for _ in range(2):
        try:
            shell.step(Stop())
        except AssertionError:
            await asyncio.sleep(0)
    assert seen == [1, 1]
