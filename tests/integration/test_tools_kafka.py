"""The tools over a real Kafka: the same answers as over the local log, and not a topic made by looking."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvlog.engines.replayed import load_replayed
from kvlog.errors import LocalProtocolError
from kvlog.ids import Offset
from kvlog.log.settings import LogSettings, make_log
from kvlog.wire.tables import NODES, NodeRow, encode_row
from tests.unit.consumers.test_replay import ListCache, ListModel
from tests.unit.consumers.written_log import WrittenLog, kvlog, rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.log.kafka import KafkaLog

pytestmark = pytest.mark.kafka

TOKENS = [11, 12, 13, 14]


async def tool(*arguments: object) -> tuple[int, dict[str, object]]:
    """Runs a verb in another thread, with an event loop of its own."""
    return await asyncio.to_thread(kvlog, *arguments)


async def test_tools_over_kafka_tell_what_was_written(
    kafka_log: KafkaLog, kafka_broker: str, kafka_prefix: str, tmp_path: Path
) -> None:
    """Verify, show, lag and replay of a session that was taken over, by bootstrap address and prefix alone."""
    log = await WrittenLog.on(kafka_log)
    await log.claim("s")
    await log.turn("s", TOKENS)
    await log.claim("s", "b")
    await log.turn("s", [*TOKENS, 15], "b")
    offsets = dict.fromkeys(range(3), 0) | {int(log.home("s")): 6}
    row = NodeRow(node="b", incarnation="00", beat=1, applied=offsets)
    await (await kafka_log.table(NODES)).put(b"b", encode_row(row))
    where = ("--log", f"kafka://{kafka_broker}", "--prefix", kafka_prefix)

    code, said = await tool("verify", *where)
    assert (0, 9, 5) == (code, said["records"], said["rows"])

    code, said = await tool("show", "s", *where)
    assert (0, "whole", "node-b", 5) == (code, said["standing"], said["owner"], said["length"])

    code, said = await tool("lag", "--patience", "0.3", *where)
    nodes = said["nodes"]
    assert isinstance(nodes, list)
    assert (0, 3, 1) == (code, nodes[0]["lag"]["records"], nodes[0]["lag"]["tokens"])

    out = tmp_path / "s.safetensors"
    assert 0 == (await tool("replay", "s", "--out", out, *where))[0]
    tokens, cache = load_replayed(out, ListModel())  # type: ignore[arg-type]  # a part of a model
    assert isinstance(cache, ListCache)
    assert ([*TOKENS, 15], rows_of(0, [*TOKENS, 15])) == (tokens, bytes(cache.rows))

    assert 4 == (await tool("verify", "t", *where))[0]


async def test_tools_over_kafka_with_a_wrong_prefix_make_no_topic(
    kafka_broker: str, kafka_prefix: str
) -> None:
    """3, the error says which topic is missing; and it is missing afterwards."""
    for _ in range(2):
        code, said = await tool("verify", "--log", f"kafka://{kafka_broker}", "--prefix", kafka_prefix)
        assert (3, "LogUnavailable") == (code, said["error"])
        fields = said["fields"]
        assert isinstance(fields, dict)
        assert f"there is no topic {kafka_prefix}.records" in fields["problem"]


async def test_kafka_log_that_is_opened_to_read_only_refuses_to_write(
    kafka_log: KafkaLog, kafka_broker: str, kafka_prefix: str
) -> None:
    """P is the topic's; writers and table rows are refused, reading works."""
    written = await WrittenLog.on(kafka_log)
    await written.put("s", b"value")
    settings = LogSettings(url=f"kafka://{kafka_broker}", topic_prefix=kafka_prefix, partitions=16)
    log = make_log(settings, read_only=True)
    await log.open()
    assert 3 == log.partitions
    table = await log.table(NODES)
    for refused in (log.writer(), table.put(b"a", b"b")):
        with pytest.raises(LocalProtocolError, match="read only"):
            await refused
    reader = await log.reader()
    reader.assign({written.home("s"): Offset(0)})
    messages = await reader.poll(bytes_max=100, timeout_seconds=5)
    assert [b"value"] == [bytes(message.value) for message in messages]
    assert 1 == (await log.bounds(written.home("s"))).high_watermark
    await log.close()


async def test_kafka_tool_that_says_another_number_of_partitions_is_refused(
    kafka_log: KafkaLog, kafka_broker: str, kafka_prefix: str, tmp_path: Path
) -> None:
    """2: with another P, sessions would be looked for in the wrong partitions."""
    assert 3 == kafka_log.partitions
    config = tmp_path / "k.toml"
    config.write_text(
        f'[log]\nurl = "kafka://{kafka_broker}"\ntopic_prefix = "{kafka_prefix}"\npartitions = 16\n'
    )
    code, said = await tool("lag", "--config", config)
    assert (2, "ConfigError") == (code, said["error"])
