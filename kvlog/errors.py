"""Every error of kvlog, named by what its receiver must do.

    KvlogError
    ├── LocalProtocolError     our caller asked for something that the protocol forbids: fix the caller
    │   ├── InvalidSessionId, RowTooLarge, LayoutMismatch
    ├── DecodeError            the log (or the ring) holds bytes that we refuse; never our caller's fault
    │   └── UnknownVersion
    ├── Retryable              try again, later
    │   ├── LogUnavailable, RingFull, PoolFull, LinkClosed
    ├── OutcomeUnknown         an append may or may not be in the log: never write under that epoch again
    ├── Fenced                 a newer epoch owns the session: stop, do not claim back
    ├── LogTruncated           the records are below the log start offset: use a snapshot, or recompute
    ├── SessionUnknown         the log has no record of the session: ask for another one
    ├── LogReplaced            the topic is another one than before: all state of it is void
    └── ConfigError            the operator must change a setting; nothing was started

Each error carries fields, not a formatted text, and a `hint` that tells the operator what to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ConfigError",
    "DecodeError",
    "Fenced",
    "InvalidSessionId",
    "KvlogError",
    "LayoutMismatch",
    "LinkClosed",
    "LocalProtocolError",
    "LogReplaced",
    "LogTruncated",
    "LogUnavailable",
    "OutcomeUnknown",
    "PoolFull",
    "Retryable",
    "RingFull",
    "RowTooLarge",
    "SessionUnknown",
    "UnknownVersion",
]


class KvlogError(Exception):
    """The root of every error that kvlog raises on purpose."""

    hint: ClassVar[str] = ""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.fields = fields

    def __getattr__(self, name: str) -> object:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        said = ", ".join(f"{name}: {value}" for name, value in self.fields.items())
        text = type(self).__name__ + (f" ({said})" if said else "")
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[KvlogError], fields: dict[str, object]) -> KvlogError:
    return kind(**fields)


class LocalProtocolError(KvlogError):
    """Our own caller asked for something that the protocol forbids."""

    hint = "This is a fault in the calling code: please report it with the fields above."


class InvalidSessionId(LocalProtocolError):
    """A session id that kvlog does not take."""

    hint = "Name the session with 1 to 256 bytes of printable UTF-8."


class RowTooLarge(LocalProtocolError):
    """One position's bytes do not fit into one record (fields: row_bytes, record_bytes_max)."""

    hint = (
        "Raise log.max_record_bytes and the topic's max.message.bytes above the row size, or use more shards."
    )


class LayoutMismatch(LocalProtocolError):
    """Two sides disagree on layout, dtype, model digest, weight version or shards (fields: field, expected, actual)."""

    hint = "Serve the same model, dtype and parallelism on both nodes, or give them different topic prefixes."


class DecodeError(KvlogError):
    """The log or a ring holds bytes that cannot be read (fields: problem, and where known: offset)."""

    hint = "The record is refused and counted; if it repeats, look for a foreign producer or failing memory."


class UnknownVersion(DecodeError):
    """A format version, kind or codec that this build does not read (fields: problem)."""

    hint = "Upgrade this node before log.format_version is raised on any writer."


class Retryable(KvlogError):
    """Nothing is wrong with the request: try again later."""


class LogUnavailable(Retryable):
    """The log cannot be reached (fields: where, problem)."""

    hint = "Generation goes on and lag grows; check the broker or the log directory named above."


class RingFull(Retryable):
    """The ring has no room for this step (fields: entry_bytes, free_bytes)."""

    hint = "The adapter keeps its cursor and catches up at the next step; a larger link.ring_bytes rides out bursts."


class PoolFull(Retryable):
    """No block is free (fields: blocks_wanted, blocks_free)."""

    hint = "Raise pool.bytes, or let idle sessions expire sooner."


class LinkClosed(Retryable):
    """The connection between engine and daemon has ended (fields: problem)."""

    hint = "Generation goes on unreplicated; the adapter reconnects by itself."


class OutcomeUnknown(KvlogError):
    """An append may or may not be in the log (fields: partition, problem)."""

    hint = "The writer stops writing under this epoch and claims anew."


class Fenced(KvlogError):
    """A newer epoch owns the session (fields: session, epoch, newer_epoch)."""

    hint = "Another node took the session over; end the request here and do not claim it back."


class LogTruncated(KvlogError):
    """Records that are needed lie below the log start offset (fields: partition, wanted, log_start)."""

    hint = "Restore from a snapshot or prefill from token ids; raise the topic's retention if this was unexpected."
    partition: int
    wanted: int
    log_start: int


class SessionUnknown(KvlogError):
    """The log has no record of the session (fields: session, partition, log)."""

    hint = "Check its spelling and the topic prefix; records older than the retention are gone for good."


class LogReplaced(KvlogError):
    """The log is another one than before: topic recreated or tail lost (fields: partition, problem)."""

    hint = "All state of the partition is void; primaries claim anew by themselves."
    partition: int
    problem: str


class ConfigError(KvlogError):
    """A setting is wrong, or does not fit this machine or cluster (fields: setting, problem, fix)."""

    hint = "Nothing was started. Correct the setting and run `kvlogd check-config`."
