"""docs/format.md says what the code does: its tables are compared with it, its example is parsed by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlog.checksums import chain, checksum
from kvlog.ids import Position, Seq
from kvlog.layout import DType, Layout
from kvlog.limits import DEFAULT
from kvlog.records import Claim, Codec, Delta, EndReason, Entry, Kind, Truncate
from kvlog.wire.codec import decode_payload
from kvlog.wire.frame import FORMAT_VERSION, MAGIC, PREAMBLE_BYTES
from kvlog.wire.header import FIELDS, NODE_ID_BYTES_MAX, URI_BYTES_MAX
from kvlog.wire.message import decode

TEXT = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """Gives the text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def table(text: str) -> list[list[str]]:
    """Gives the cells of the rows of the tables in a text, without their heads."""
    bodies = re.findall(r"^\|-.*\n((?:\|.*\n)*)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for body in bodies for line in body.splitlines()
    ]


def entries() -> list[Entry]:
    """Parses the three messages of the example."""
    blocks = re.findall(r"```hex\n(.*?)```", section("Example"), re.DOTALL)
    delta = "".join(row[1].strip("`") for row in table(section("Example")))
    return [decode(bytes.fromhex(text)) for text in (*blocks, delta)]


def cell(kind: Kind, field: str) -> str:
    """Gives the range of a field as the document has it."""
    (found,) = [
        row[2] for row in table(section(f"{kind.name.title()} (kind {int(kind)})")) if row[0] == field
    ]
    return found


def test_format_document_is_about_the_version_that_we_write() -> None:
    """A new version needs a new page."""
    assert TEXT.startswith(f"# The format of a record, version {FORMAT_VERSION}\n")


@pytest.mark.parametrize("kind", Kind)
def test_format_document_lists_the_fields_in_order(kind: Kind) -> None:
    """Each kind's table is the header's array, field by field."""
    named = tuple(row[0] for row in table(section(f"{kind.name.title()} (kind {int(kind)})")))
    own = FIELDS[kind] if kind is not Kind.SNAPSHOT else FIELDS[kind][len(FIELDS[Kind.CLAIM]) :]
    assert own == named


def test_format_document_offsets_are_the_preambles() -> None:
    """Offsets and sizes of the preamble follow from each other and end where the header begins."""
    rows = table(section("The message"))
    at = 0
    for offset, size, _ in rows[:7]:
        assert int(offset) == at
        at += int(size)
    assert [row[0] for row in rows[6:]] == ["20", "28", "28 + H"]
    assert at == PREAMBLE_BYTES
    assert MAGIC.hex(" ") in rows[0][2]


def test_format_document_names_every_number() -> None:
    """Kinds, codecs, dtypes and reasons have the numbers that the code gives them."""
    kinds = ", ".join(f"{int(kind)} {kind.name.title()}" for kind in Kind)
    assert kinds in section("The message")
    assert ", ".join(f"{int(codec)} {codec.name}" for codec in Codec) == cell(Kind.DELTA, "codec")
    assert ", ".join(f"{number} {dtype}" for number, dtype in enumerate(DType, 1)) == cell(
        Kind.CLAIM, "dtype"
    )
    assert ", ".join(f"{number} {reason}" for number, reason in enumerate(EndReason, 1)) == cell(
        Kind.END, "reason"
    )


def test_format_document_bounds_are_the_limits() -> None:
    """The bounds in the document are those in the code."""
    assert f"at most {DEFAULT.header_bytes:,}" in section("The message")
    assert f"1 to {DEFAULT.shards}" == cell(Kind.CLAIM, "shards")
    assert f"0 to {DEFAULT.shards - 1}" == cell(Kind.DELTA, "shard")
    assert f"0 to {DEFAULT.session_tokens:,}" == cell(Kind.TRUNCATE, "length") == cell(Kind.DELTA, "start")
    assert f"n from 1 to {DEFAULT.delta_tokens:,}" in cell(Kind.DELTA, "tokens")
    assert f"1 to {NODE_ID_BYTES_MAX} bytes" in cell(Kind.CLAIM, "node")
    assert f"1 to {URI_BYTES_MAX:,} bytes" in cell(Kind.SNAPSHOT, "uri")
    assert f"{DEFAULT.decoded_bytes >> 20} MiB" in section("Claim (kind 1)")


def test_format_document_example_decodes_to_what_it_says() -> None:
    """The example's bytes are a claim, a truncate and a delta with the values in the text."""
    claim, truncate, delta = (entry.record for entry in entries())
    assert isinstance(claim, Claim)
    assert (claim.session, claim.node, claim.epoch) == ("s", "a", 1)
    assert claim.identity.layout == Layout(1, 1, 1, 2, DType.BFLOAT16)
    assert truncate == Truncate(claim.session, claim.epoch, claim.writer, Seq(0), Position(0))
    assert isinstance(delta, Delta)
    assert (delta.tokens, delta.codec, delta.start, delta.seq) == ((5, 70_000), Codec.RAW, 0, 1)


def test_format_document_example_chains() -> None:
    """The chain in the example is computed from record to record, and the text names its values."""
    claim, truncate, delta = entries()
    after_claim = chain(0, claim.header, 0)
    assert f"`{after_claim:016x}`" in section("Example")
    assert (claim.chain, truncate.chain) == (0, chain(after_claim, truncate.header, 0))
    assert delta.chain == chain(truncate.chain, delta.header, checksum(delta.payload))
    assert f"`{truncate.chain:016x}`" in section("Example")
    assert f"`{delta.chain:016x}`" in section("Example")
    assert f"`{checksum(delta.payload):016x}`" in section("Example")
    assert f"`{checksum(b''):016x}`" in section("Delta (kind 2)")


def test_format_document_example_has_the_rows_that_it_says() -> None:
    """The example's payload is the two rows in the text, and fits its layout."""
    claim, _, delta = entries()
    assert isinstance(claim.record, Claim)
    layout = claim.record.identity.layout
    rows = decode_payload(delta.payload, Codec.RAW, layout.dtype, decoded_bytes=2 * layout.row_bytes)
    assert rows.hex() == "803f0040004080bf"
    assert "(1.0, 2.0) and (2.0, −1.0)" in section("Example")


def test_format_document_example_offsets_add_up() -> None:
    """Each row of the example begins where the one before it ends."""
    at = 0
    for offset, text, _ in table(section("Example")):
        assert int(offset) == at
        at += len(bytes.fromhex(text.strip("`")))
