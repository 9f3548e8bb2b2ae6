"""`kvlog replay SESSION`: rebuilds a session's cache from the log into a file that an engine loads.

The file holds the conversation: token ids, and rows from which text can be computed. Only its owner can read it.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from consumers.access import log_settings, opened
from consumers.answers import Answer
from consumers.exits import ExitCode
from consumers.reading import PartitionFold, home_of
from consumers.render import bytes_text, facts, mark, number_text, progress
from consumers.replay_file import RowSpool, write_replay_file
from consumers.show import unknown_session
from consumers.tables import session_rows
from kvlog.core.effects import CutRows, DropSession, StoreRows
from kvlog.core.session import Standing
from kvlog.errors import ConfigError, DecodeError, LogTruncated
from kvlog.ids import Digest, Offset, Position, Shard, parse_session_id
from kvlog.records import Codec
from kvlog.wire.codec import decode_payload
from kvlog.wire.replayed import Replayed

if TYPE_CHECKING:
    import argparse

    from rich.text import Text

    from consumers.reading import Step
    from kvlog.core.session import SessionState
    from kvlog.ids import SessionId
    from kvlog.log.base import Log, PartitionBounds

__all__ = ["HELP", "add_arguments", "run"]

HELP = "rebuild a session's cache from the log into a file that an engine loads"

_NAME_CHARACTERS_MAX = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("session", metavar="SESSION", help="the session's id")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (SESSION.safetensors in this folder)"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")


async def run(arguments: argparse.Namespace) -> Answer:
    """Replay one session into a file.

    Raises:
        SessionUnknown: no record of it is in the log.
        InvalidSessionId: this cannot be a session's id.
        LogTruncated: retention has taken the session's first records.
        LogUnavailable: the log cannot be read now.
        ConfigError: the file cannot be written.
    """
    session = parse_session_id(arguments.session)
    out: Path = arguments.out or Path(_file_name(session))
    _refuse_place(out, force=arguments.force)
    spool = RowSpool(out.parent)
    try:
        async with opened(log_settings(arguments)) as log:
            state = await _replayed(log, session, spool)
            where = log.where
        replayed = _described(state, spool)
        with progress(f"writing {out.name}", replayed.data_bytes) as advance:
            write_replay_file(out, replayed, state.tokens[: replayed.length], spool, advance)
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error
    finally:
        spool.close()
    return _answer(out, where, state, replayed)


def _file_name(session: SessionId) -> str:
    """A session's id may have slashes, spaces and anything that prints."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", session)[:_NAME_CHARACTERS_MAX].lstrip(".") + ".safetensors"


def _refuse_place(out: Path, *, force: bool) -> None:
    """Before an hour of reading, not after it.

    Raises:
        ConfigError: the file is there, or its folder is not.
    """
    if out.exists() and not (force and out.is_file()):
        raise ConfigError(
            setting="--out", problem=f"{out} is there already", fix="name another file, or --force"
        )
    if not out.parent.is_dir():
        raise _unwritable(out, "no such folder")


def _unwritable(out: Path, problem: str) -> ConfigError:
    fix = "name a file in a folder with room, or free some: twice the rows' size is needed while it works"
    return ConfigError(setting="--out", problem=f"{out}: {problem}", fix=fix)


@dataclass(slots=True)
class _Rebuild:
    """One session's rows on their way into the spool. `records`: of the session, as many as were read."""

    session: SessionId
    spool: RowSpool
    records: int = 0

    def apply(self, step: Step) -> None:
        """Carry out what the fold says of the session's bytes."""
        self.records += step.session == self.session
        for effect in step.effects:
            match effect:
                case StoreRows() if effect.delta.session == self.session:
                    self._store(effect)
                case CutRows() if effect.session == self.session:
                    self.spool.cut(effect.length)
                case DropSession() if effect.session == self.session:
                    self.spool.cut(Position(0))
                case _:
                    pass

    def _store(self, effect: StoreRows) -> None:
        """As in a daemon: what does not decode is absent, and the fold goes on."""
        delta, layout = effect.delta, effect.layout
        if delta.codec is Codec.IDS:
            self.spool.absent(delta.shard, delta.start)
            return
        decoded_bytes = len(delta.tokens) * layout.row_bytes
        try:
            rows = decode_payload(effect.payload, delta.codec, layout.dtype, decoded_bytes=decoded_bytes)
        except DecodeError:
            self.spool.absent(delta.shard, delta.start)
            return
        self.spool.store(delta.shard, delta.start, rows, layout.row_bytes)


async def _replayed(log: Log, session: SessionId, spool: RowSpool) -> SessionState:
    """Fold the session from its first needed offset if the table knows it, else from the log start."""
    partition = home_of(session, log)
    bounds = await log.bounds(partition)
    rebuild = _Rebuild(session, spool)
    for first in await _beginnings(log, session, bounds):
        spool.cut(Position(0))
        fold = PartitionFold(log, partition, first=first, end=bounds.high_watermark)
        with progress(f"reading partition {partition}", bounds.high_watermark - first) as advance:
            async with aclosing(fold.steps()) as steps:
                async for step in steps:
                    rebuild.apply(step)
                    advance(step.offset - first)
        state = fold.core.session(session)
        if state is not None and state.standing is not Standing.UNROOTED:
            return state
    if not rebuild.records:
        raise await unknown_session(log, session)
    raise LogTruncated(
        session=session,
        partition=partition,
        wanted="the claim and Truncate(0) that the session began with",
        log_start=bounds.log_start,
    )


async def _beginnings(log: Log, session: SessionId, bounds: PartitionBounds) -> list[Offset]:
    """Where to begin: what the table says is a hint, the log start is the truth."""
    hints = [row.first_needed for row in await session_rows(log) if row.session == session]
    useful = [Offset(hint) for hint in hints if bounds.log_start < hint < bounds.high_watermark]
    return [*useful, bounds.log_start]


def _described(state: SessionState, spool: RowSpool) -> Replayed:
    """The rows of one identity and context that every shard has: those of position 0."""
    first = next((shard.runs[0] for shard in state.shards if shard.runs), None)
    identity = first.identity if first else state.claim.identity
    context = first.context if first else state.claim.context
    usable = state.usable(state.tokens, context, identity)
    present = min((spool.present(Shard(s)) for s in range(len(state.shards))), default=Position(0))
    return Replayed(
        session=state.session,
        epoch=state.epoch,
        chain=state.chain or 0,
        checksum=0,
        length=state.length,
        positions=min(usable, present),
        identity=identity,
        context=Digest(context),
    )


def _answer(out: Path, where: str, state: SessionState, replayed: Replayed) -> Answer:
    broken = state.standing is Standing.BROKEN
    identity, layout = replayed.identity, replayed.identity.layout
    figures: dict[str, object] = {
        "session": state.session,
        "log": where,
        "file": str(out),
        "bytes": out.stat().st_size,
        "standing": state.standing.value,
        "epoch": replayed.epoch,
        "length": replayed.length,
        "positions": replayed.positions,
        "shards": identity.shards,
        "layers": layout.layers,
        "chain": f"{replayed.chain:016x}",
        "model": identity.model.hex(),
        "weights": identity.weights.hex(),
    }
    missing = replayed.length - replayed.positions
    shown: dict[str, str | Text] = {
        "session": state.session,
        "file": f"{out}, {bytes_text(out.stat().st_size)}",
        "standing": mark(
            "broken: this is its last good length" if broken else state.standing.value,
            "bad" if broken else "good",
        ),
        "token ids": number_text(replayed.length),
        "rows": number_text(replayed.positions)
        + (f"; {missing} are to be computed from token ids" if missing else ""),
        "chain": f"{replayed.chain:016x}, epoch {replayed.epoch}",
        "model": f"{identity.model.hex()[:16]}, weights {identity.weights.hex()[:16]}",
        "note": "the file holds the conversation; only its owner can read it",
    }
    return Answer(ExitCode.BROKEN if broken else ExitCode.WHOLE, figures, (facts(shown),))
