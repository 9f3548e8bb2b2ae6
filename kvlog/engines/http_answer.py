"""Answers of the engine's HTTP server in OpenAI's JSON: chunks of a stream, whole answers, errors. No I/O."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlog.engines.acked_gate import AckedGate
    from kvlog.engines.generation import FinishReason, NewToken
    from kvlog.engines.jobs import Failed, Finished

__all__ = ["DONE", "AnswerFormat", "WholeAnswer", "error_body", "event"]

JSON = dict[str, object]

DONE = b"data: [DONE]\n\n"


def event(body: JSON) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_body(kind: str, message: str) -> JSON:
    """OpenAI's error object."""
    return {"error": {"type": kind, "message": message}}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What all chunks of one answer have in common.

    Args:
        request_id: names the answer.
        model: the model's name.
        chat: chat chunks instead of text chunks.
        with_ids: token ids in each chunk.
        prompt_tokens: for `usage`.
        resumed_tokens: of the answer, computed elsewhere; for `usage`.
        acked: what held the answer's tokens; None: nothing did.
    """

    request_id: str
    model: str
    chat: bool
    with_ids: bool
    prompt_tokens: int
    resumed_tokens: int
    acked: AckedGate | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> JSON | None:
        """The chunk before the first token, where there is one."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self.chat else None

    def token_chunk(self, new: NewToken) -> JSON:
        """One more token."""
        choice: JSON = {"delta": {"content": new.text}} if self.chat else {"text": new.text}
        if self.with_ids:
            choice["token_ids"] = [new.token]
        return self._chunk(choice)

    def last_chunk(self, finished: Finished, new_tokens: int) -> JSON:
        """The chunk after the last token, with `usage` and `kvlog`."""
        choice: JSON = {"delta": {}} if self.chat else {"text": ""}
        body = self._chunk(choice, finished.finish)
        return body | self._ending(finished, new_tokens)

    def whole(self, answer: WholeAnswer, finished: Finished) -> JSON:
        """A whole answer, not streamed; text and ids are those beyond the resumed ones."""
        text = "".join(answer.texts)
        choice: JSON = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        if self.with_ids:
            choice["token_ids"] = answer.tokens
        body = self._chunk(choice, finished.finish)
        body["object"] = "chat.completion" if self.chat else "text_completion"
        return body | self._ending(finished, len(answer.tokens))

    def _chunk(self, choice: JSON, finish: FinishReason | None = None) -> JSON:
        return {
            "id": self.request_id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **choice, "finish_reason": finish}],
        }

    def _ending(self, finished: Finished, new_tokens: int) -> JSON:
        completion = self.resumed_tokens + new_tokens
        digests = finished.kv_digests
        return {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": completion,
                "total_tokens": self.prompt_tokens + completion,
            },
            "kvlog": asdict(finished.details)
            | ({} if digests is None else {"kv_digests": digests})
            | ({} if self.acked is None else _acked(self.acked)),
        }


@dataclass(slots=True)
class WholeAnswer:
    """An answer that is collected before it is sent."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, new: NewToken) -> None:
        """One more token."""
        self.texts.append(new.text)
        self.tokens.append(new.token)


def _acked(gate: AckedGate) -> JSON:
    return {"acked": "held" if gate.late is None else "degraded", "acked_reason": gate.late}


def failure_status(failed: Failed) -> int:
    """The HTTP status of an answer that failed before anything was sent."""
    return {"fenced": 409, "stopping": 503, "not_acked": 503}.get(failed.kind, 500)
