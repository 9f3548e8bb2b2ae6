"""What the exit code of a tool says, the same for every verb."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError, LocalProtocolError, LogTruncated, Retryable, SessionUnknown

if TYPE_CHECKING:
    from kvlog.errors import KvlogError

__all__ = ["ExitCode", "exit_code_of"]


class ExitCode(IntEnum):
    """The verdict, for scripts."""

    WHOLE = 0
    """Done, and what was looked at is whole."""
    BROKEN = 1
    """A session is broken, or the log holds a record that is damaged or does not fit."""
    USAGE = 2
    """The command line or a setting is wrong; nothing was looked at."""
    UNREACHABLE = 3
    """The log cannot be reached, or is not there."""
    UNKNOWN = 4
    """The log has no such session, or retention has taken what is needed of it."""


def exit_code_of(error: KvlogError) -> ExitCode:
    """The exit code of a tool that could not finish."""
    match error:
        case Retryable():
            return ExitCode.UNREACHABLE
        case ConfigError() | LocalProtocolError():
            return ExitCode.USAGE
        case LogTruncated() | SessionUnknown():
            return ExitCode.UNKNOWN
        case _:
            return ExitCode.BROKEN
