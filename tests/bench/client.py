"""A streaming client whose own cost is small and outside of the clock: it is connected before it is asked."""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Stream", "Told"]

_SECONDS = 600.0


@dataclass
class Told:
    """What an answer has said so far; times are monotonic seconds. `broken`: it ended before its end."""

    tokens: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    broken: bool = False
    error: dict[str, Any] | None = None
    kvlog: dict[str, Any] = field(default_factory=dict)


class Stream:
    """One connection to an engine, for one request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_SECONDS)
        self._connection.connect()
        assert self._connection.sock is not None, "it is connected"
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.told = Told()

    def ask(self, **body: object) -> Iterator[Told]:
        """Send a completion request; the same Told after each chunk, and once more at the end."""
        told = self.told
        text = json.dumps({"stream": True, "return_token_ids": True, **body})
        try:
            self._connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            assert response.status == http.client.OK, response.read().decode()
            while (line := response.readline()) and line != b"data: [DONE]\n":
                if line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))
                    yield told
            told.broken = not line
        except (OSError, http.client.HTTPException):
            told.broken = True
        finally:
            told.ended_at = time.monotonic()
            self._connection.close()
        yield told

    def whole(self, **body: object) -> Told:
        """Send a request and wait for its end; a broken or failed answer is an error."""
        *_, told = self.ask(**body)
        assert not told.broken, "the engine went away"
        assert told.error is None, told.error
        return told

    def _take(self, chunk: dict[str, Any]) -> None:
        told = self.told
        told.error = chunk.get("error") or told.error
        for choice in chunk.get("choices", []):
            told.tokens += choice.get("token_ids") or []
        if told.tokens and told.first_token_at is None:
            told.first_token_at = time.monotonic()
        told.kvlog = chunk.get("kvlog") or told.kvlog
