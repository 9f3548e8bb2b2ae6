"""The other process of the local log's tests: `python -m tests.integration.local_log_child VERB DIRECTORY [ARGUMENT]`.

Each verb prints lines that its test reads; see the functions.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.errors import LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.base import AppendRequest
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.log.local_lock import WriteLock
from kvlog.log.local_store import Paths

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PARTITIONS = 2
IN_FLIGHT = 32


def _log(directory: Path) -> LocalLog:
    return LocalLog(
        directory, LocalLogOptions(partitions=PARTITIONS, retention_seconds=None, retention_bytes=None)
    )


def _request(partition: int, value: bytes) -> AppendRequest:
    return AppendRequest(partition=Partition(partition), key=b"session", value=value, kind=2, epoch=1)


def say(*words: object) -> None:
    """One line, at once."""
    print(*words, flush=True)


async def append(directory: Path, name: str) -> None:
    """Appends for ever; prints `partition offset number` when an append is acknowledged. NAME:SIZE names the values."""
    who, _, size = name.partition(":")
    log = _log(directory)
    await log.open()
    writer = await log.writer()
    pending: list[tuple[int, int, asyncio.Future[Offset]]] = []
    for number in itertools.count():
        partition = number % PARTITIONS
        value = f"{who} {number} ".encode().ljust(int(size), b".")
        pending.append((partition, number, await writer.append(_request(partition, value))))
        if len(pending) == IN_FLIGHT:
            partition, acknowledged, future = pending.pop(0)
            say(partition, await future, acknowledged)


async def identity(directory: Path, _: str) -> None:
    """Waits for a line on standard input, opens the log, and prints its identity."""
    say("ready")
    sys.stdin.readline()
    log = _log(directory)
    await log.open()
    say(await log.identity())
    await log.close()


async def tail(directory: Path, count: str) -> None:
    """Reads so many messages, whose values are their time of sending; prints how many ns each took to arrive."""
    log = _log(directory)
    await log.open()
    reader = await log.reader()
    reader.assign({Partition(0): Offset(0)})
    say("ready")
    left = int(count)
    while left:
        for message in await reader.poll(bytes_max=1 << 20, timeout_seconds=10.0):
            say(time.monotonic_ns() - int(bytes(message.value[:20])))
            left -= 1
    await log.close()


async def hold(directory: Path, _: str) -> None:
    """Takes the write lock, prints `held`, and keeps it until standard input ends."""
    with WriteLock(Paths(directory).lock).held(seconds=5.0):
        say("held")
        sys.stdin.read()


async def fill(directory: Path, _: str) -> None:
    """Fills the disk of the directory; when the log says so, makes room, and prints what became of everything."""
    ballast = directory.parent / "ballast"
    ballast.write_bytes(bytes(6 << 20))
    log = _log(directory)
    await log.open()
    writer = await log.writer()
    futures: list[asyncio.Future[Offset]] = []
    refused = None
    for number in range(1000):
        try:
            futures.append(await writer.append(_request(0, b"%06d" % number * 30_000)))
        except LogUnavailable as error:
            refused = str(error)
            break
        if number % 4 == 3:
            await asyncio.wait([futures[-1]], timeout=2.0)
    pending = sum(not future.done() for future in futures)
    ballast.unlink()
    offsets = await asyncio.wait_for(asyncio.gather(*futures), 20.0)
    after = await (await writer.append(_request(0, b"after")))
    reader = await log.reader()
    reader.assign({Partition(0): Offset(0)})
    found: list[str] = []
    while some := await reader.poll(bytes_max=1 << 20, timeout_seconds=0.0):
        found += [bytes(message.value[:6]).decode() for message in some]
    say(
        json.dumps(
            {"refused": refused, "pending": pending, "offsets": offsets, "after": after, "found": found}
        )
    )
    await log.close()


VERBS: dict[str, Callable[[Path, str], Awaitable[None]]] = {
    verb.__name__: verb for verb in (append, identity, tail, hold, fill)
}


async def main(verb: str, directory: str, argument: str = "") -> None:
    """Runs one verb."""
    await VERBS[verb](Path(directory), argument)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
