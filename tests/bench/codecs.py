"""The codec table on the real model's own rows: SmolLM2 reads a text, and its cache is what is encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.layout import DType
from tests.bench.codec_table import NO_WORK_GB_PER_SECOND, CodecRow, codec_table
from tests.bench.report import Row

if TYPE_CHECKING:
    from tests.bench.setting import Setting

__all__ = ["measure_codec"]

_SAMPLE_BYTES = 1 << 20
_TEXT = (
    "An LLM server keeps each conversation's key-value cache in memory. When the node dies, the context is gone: the "
    "next node must prefill everything again, in the middle of a user's answer. A log makes that cache a resource that "
    "can be replicated, replayed and fenced, and the sentence goes on where it stopped. "
)


def measure_codec(setting: Setting) -> list[Row]:
    """bfloat16, and in a full run float32."""
    rounds = 3 if setting.quick else 9
    return [
        row
        for dtype in ((DType.BFLOAT16,) if setting.quick else (DType.BFLOAT16, DType.FLOAT32))
        for found in codec_table(_rows(dtype), dtype, rounds=rounds)
        for row in _both_ways(dtype, found)
    ]


def _rows(dtype: DType) -> memoryview:
    """The cache of a text, as many whole rows as make up a MiB."""
    from kvlog.engines.models import ensure_model
    from kvlog.engines.transformers import TransformersModel

    model = TransformersModel.load(ensure_model().path, dtype=dtype, threads=1)
    row_bytes = model.identity.layout.row_bytes
    count = _SAMPLE_BYTES // row_bytes
    tokens = (model.encode(_TEXT) * (1 + count // 32))[:count]
    cache = model.new_cache()
    model.forward(cache, tokens)
    out = bytearray(count * row_bytes)
    cache.copy_rows(0, memoryview(out))
    return memoryview(out)


def _both_ways(dtype: DType, found: CodecRow) -> list[Row]:
    rows = []
    for way, values in (("encode", found.encode), ("decode", found.decode)):
        is_view = values[0] > NO_WORK_GB_PER_SECOND
        also: dict[str, float | str] = {"compression ratio": f"{found.ratio:.3f}"}
        if is_view:
            also["note"] = "a view, no copy"
        rows.append(
            Row(
                measure="codec",
                case=f"{found.codec}, {way}, SmolLM2-135M's KV in {dtype}",
                unit="GB/s of rows, one thread",
                values=() if is_view else values,
                also=also,
            )
        )
    return rows
