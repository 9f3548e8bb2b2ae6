"""`codec = "auto"` and engines that do not fit a session, over real processes on one log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from consumers.reading import PartitionFold, home_of
from kvlog.ids import Offset, SessionId
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.records import Codec, Delta
from tests.integration.kafka_nodes import PROMPT, whole
from tests.nodes import Node, logged_length, synthetic_answer, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Both choose by themselves."""
    folder = tmp_path_factory.mktemp("auto")
    url = f"file://{folder}/log"
    nodes: list[Node] = []
    try:
        nodes += [
            Node.start(folder, name, url, engine=("synthetic",), sync={"codec": "auto"}) for name in "ab"
        ]
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.close()


def codecs_of(directory: Path, session: str) -> set[Codec]:
    """How a session's rows are packed in the log."""

    async def read() -> set[Codec]:
        log = LocalLog(directory, LocalLogOptions(read_only=True))
        await log.open()
        home = home_of(SessionId(session), log)
        fold = PartitionFold(log, home, first=Offset(0), end=(await log.bounds(home)).high_watermark)
        found = {step.record.codec async for step in fold.steps() if isinstance(step.record, Delta)}
        await log.close()
        return found

    return asyncio.run(read())


def test_conversation_under_auto_is_packed_as_was_said_and_resumes_identically(
    nodes: tuple[Node, Node],
) -> None:
    """The daemon says once what it chose and why; a standby that chose for itself attaches every row."""
    a, b = nodes
    expected = synthetic_answer(PROMPT, 40)
    answer = whole(a, "s", max_tokens=40)
    rows = len(PROMPT) + 39
    until(lambda: logged_length(a.folder / "log", "s") == rows, seconds=20, what="logged")
    assert a.daemon is not None
    (said,) = a.daemon.events("codec_chosen")
    assert said["codec"] in {"raw", "lz4", "split_zstd"}
    assert len(said["reason"]) > 10
    assert codecs_of(a.folder / "log", "s") <= {Codec[said["codec"].upper()], Codec.RAW}
    resumed = whole(b, "s", max_tokens=40, resume_token_ids=answer.tokens[:20])
    assert expected == answer.tokens == answer.tokens[:20] + resumed.tokens
    assert (len(PROMPT) + 19, True) == (resumed.kvlog["attached"], resumed.kvlog["logged"])


@pytest.mark.parametrize(
    ("arguments", "field"), [(("--row-bytes", "8192"), "model"), (("--weights", "3"), "weights")]
)
def test_engine_that_does_not_fit_a_session_is_told_which_field_differs(
    nodes: tuple[Node, Node], arguments: tuple[str, ...], field: str
) -> None:
    """Nothing is attached, the answer is the engine's own, and the session is logged anew under its identity."""
    a, b = nodes
    session = f"differs-{field}"
    first = whole(a, session)
    engine = b.engine
    assert engine is not None
    assert b.daemon is not None
    engine.stop(9)
    b.engine_arguments = ("synthetic", *arguments)
    try:
        b.start_engine()
        answer = whole(b, session)
        reference = whole(b, f"reference-{field}")
        assert (reference.tokens, 0, True) == (
            answer.tokens,
            answer.kvlog["attached"],
            answer.kvlog["logged"],
        )
        assert first.tokens != answer.tokens
        said = [event for event in b.daemon.events("identity_differed") if event["session"] == session]
        assert [field] == [event["field"] for event in said]
        assert said[0]["session_has"] != said[0]["engine_has"]
    finally:
        assert b.engine is not None
        b.engine.stop(9)
        b.engine_arguments = ("synthetic",)
        b.start_engine()
