"""The bytes of a ring, and the loads and stores that both sides of it (kvlog.buffers.ring) are made of.

Memory: a control page, then the data area, whose size is a multiple of 64. Native byte order: it stays on one machine.

    0         16          128        136         256        264         4096
    ┌─────────┬───────────┬──────────┬───────────┬──────────┬───────────┬──────────────────────┐
    │ magic,  │ data      │ head     │           │ tail     │           │ data area            │
    │ version │ bytes u64 │ u64      │           │ u64      │           │                      │
    └─────────┴───────────┴──────────┴───────────┴──────────┴───────────┴──────────────────────┘
      fixed at creation     the writer's line      the reader's line (128 apart: the prefetcher takes lines in pairs)

head and tail count bytes since the ring was made, so they never fall; `head - tail` bytes are in use, and byte number
p lies at 4096 + p % (data bytes). Entries begin at multiples of 64 and never wrap: where one does not fit before the
end, a pad entry fills the rest, published together with the entry behind it. One entry is one step of the engine:

    0       4       8          16         24            32      36       40          44        64
    ┌───────┬───────┬──────────┬──────────┬─────────────┬───────┬────────┬───────────┬─────────┐
    │ magic │ 0     │ checksum │ position │ entry bytes │ turns │ tokens │ row bytes │ 0       │
    │ u32   │ u32   │ u64      │ u64      │ u64         │ u32   │ u32    │ u32       │         │
    ├───────┴───────┴──────────┴──────────┴─────────────┴───────┴────────┴───────────┴─────────┤
    │ table: turns × 40 bytes  turn u64 │ epoch u64 │ session hash u64 │ shard u16 │ 0 u16     │
    │                          │ start u32 │ n u32 │ 0 u32                                     │
    │ token ids: tokens × u32, of all turns in the table's order                               │
    │ to the next multiple of 64                                                               │
    │ rows: tokens × row bytes, token-major, in the same order                                 │
    │ to the next multiple of 64                                                               │
    └──────────────────────────────────────────────────────────────────────────────────────────┘

entry bytes is the whole size, a multiple of 64. checksum is xxh3_64 of the entry from byte 16 to the end of its rows
(of a pad: of its 64 header bytes from 16). position is the entry's own head, its number: it tells an entry from what an
earlier lap left in the same place, whose checksum is right too. row bytes is 0 in an entry of token ids only.

Order. head and tail are stored by `memoryview.cast("Q")`: one aligned 8-byte store, never byte by byte. On x86 stores
become visible in their order, so a reader that sees a head sees all entries below it. Arm may reorder; `Fence` goes
before each store of head or tail and after each load, so it holds there too. The tests ran on x86 only; hence the
second net: the reader believes an entry only when its position and its checksum fit, and looks again a few times.
"""

from __future__ import annotations

import struct
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

from kvlog.buffers.memory import SealedMemory, create
from kvlog.checksums import checksum
from kvlog.errors import DecodeError
from kvlog.ids import Epoch, Position, Shard, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ALIGNMENT_BYTES",
    "CONTROL_BYTES",
    "ENTRY_HEADER",
    "ENTRY_MAGIC",
    "NO_SIZES",
    "PAD_MAGIC",
    "TABLE_ROW",
    "EntryHeader",
    "EntrySizes",
    "Fence",
    "RingArea",
    "TableFields",
    "TableRow",
    "align",
    "count_rows",
    "create_ring",
    "pack_table",
    "session_hash",
    "unpack_table",
]

ALIGNMENT_BYTES = 64
"""A cache line; entries and their rows begin at multiples of it."""

CONTROL_BYTES = 4096
ENTRY_HEADER = struct.Struct("=I4xQQQIII20x")
TABLE_ROW = struct.Struct("=QQQH2xII4x")
ENTRY_MAGIC = int.from_bytes(b"KVRE", "little")
PAD_MAGIC = int.from_bytes(b"KVRP", "little")

_CONTROL = struct.Struct("=8sI4xQ")
_CONTROL_MAGIC = b"KVLGRING"
_VERSION = 1
_HEAD_AT = 128
_TAIL_AT = 256
_SUMMED_FROM = 16
_UNSUMMED_HEADER = struct.Struct("=I4xQ")
_SUMMED_HEADER = struct.Struct("=QQIII20x")
_HEADER_BYTES = ENTRY_HEADER.size
_ROW_BYTES = TABLE_ROW.size
_SIZES_KEPT = 256
"""Decode steps are of a few kinds, and ask for the same sizes again and again."""


def align(size_bytes: int) -> int:
    """The next multiple of ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def session_hash(session: str) -> int:
    """What stands for a session in a table row: xxh3_64 of its UTF-8 bytes."""
    return checksum(session.encode())


class TableRow(NamedTuple):
    """Rows [start, start + n) of one turn in an entry; turn and epoch tell the daemon whether they are still wanted."""

    turn: Turn
    epoch: Epoch
    session_hash: int
    shard: Shard
    start: Position
    n: int


TableFields = tuple[Turn, Epoch, int, Shard, Position, int]
"""What a TableRow is made of: a plain tuple, which takes an eighth of the time to make, once a turn and step."""


def pack_table(table: Sequence[TableFields], into: memoryview) -> int:
    """Write table rows one after the other from the beginning of `into`. Returns: the rows of all turns together."""
    at = total = 0
    pack_into = TABLE_ROW.pack_into
    for turn, epoch, hashed, shard, start, n in table:
        assert n >= 1, "at least one row a turn"
        pack_into(into, at, turn, epoch, hashed, shard, start, n)
        at += _ROW_BYTES
        total += n
    return total


def unpack_table(data: bytes) -> tuple[TableRow, ...]:
    """The table rows of whole bytes; any bytes give some rows, whose sense is the caller's to judge."""
    return tuple(
        TableRow(Turn(turn), Epoch(epoch), hashed, Shard(shard), Position(start), n)
        for turn, epoch, hashed, shard, start, n in TABLE_ROW.iter_unpack(data)
    )


def count_rows(table: Sequence[TableRow]) -> int | None:
    """The rows of all turns together; None if a turn has none, which no right table says."""
    total = 0
    for row in table:
        if row.n < 1:
            return None
        total += row.n
    return total


class EntrySizes(NamedTuple):
    """Where the parts of an entry lie, in bytes from its beginning; the same arithmetic on both sides.

    Args:
        tokens_at: where the token ids begin.
        rows_at: where the rows begin.
        used_bytes: where the rows end.
        entry_bytes: what the entry takes in the ring.
    """

    turns: int
    tokens: int
    row_bytes: int
    tokens_at: int
    rows_at: int
    used_bytes: int
    entry_bytes: int

    @classmethod
    @lru_cache(maxsize=_SIZES_KEPT)
    def of(cls, turns: int, tokens: int, row_bytes: int) -> Self:
        """The sizes that follow from a table of `turns` rows, `tokens` token ids and as many rows."""
        tokens_at = _HEADER_BYTES + turns * _ROW_BYTES
        rows_at = align(tokens_at + 4 * tokens)
        used_bytes = rows_at + tokens * row_bytes
        return cls(turns, tokens, row_bytes, tokens_at, rows_at, used_bytes, align(used_bytes))


NO_SIZES = EntrySizes.of(turns=0, tokens=0, row_bytes=0)


class EntryHeader(NamedTuple):
    """The 64 bytes with which an entry or a pad begins."""

    magic: int
    checksum: int
    position: int
    entry_bytes: int
    sizes: EntrySizes

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The header that 64 bytes stand for; any 64 bytes give one."""
        magic, summed, position, entry_bytes, turns, tokens, row_bytes = ENTRY_HEADER.unpack(data)
        return cls(magic, summed, position, entry_bytes, EntrySizes.of(turns, tokens, row_bytes))

    @property
    def is_pad(self) -> bool:
        """It fills the end of the data area and carries nothing."""
        return self.magic == PAD_MAGIC

    @property
    def summed_bytes(self) -> int:
        """Where the bytes under the checksum end."""
        return ENTRY_HEADER.size if self.is_pad else self.sizes.used_bytes


class Fence:
    """A full memory barrier from Python: nothing before `cross` is reordered with anything after it.

    A lock's release followed by its acquire orders everything on both sides (release then acquire of one word, in
    program order), and the lock is private, so it never waits. About 0.1 µs.
    Source: Arm Architecture Reference Manual B2.3, "Barrier-ordered-before": Release, then Acquire
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def cross(self) -> None:
        """Order all loads and stores before this call before all those after it."""
        self._lock.release()
        self._lock.acquire()


class RingArea:
    """The bytes of a ring, without a role: where things lie, and how head and tail are loaded and stored."""

    def __init__(self, memory: SealedMemory) -> None:
        view = memory.view
        self.data_bytes = _checked_data_bytes(view)
        self.data = view[CONTROL_BYTES : CONTROL_BYTES + self.data_bytes]
        self._head = view[_HEAD_AT : _HEAD_AT + 8].cast("Q")
        self._tail = view[_TAIL_AT : _TAIL_AT + 8].cast("Q")
        self._fence = Fence()

    @property
    def entry_bytes_max(self) -> int:
        """The largest entry that an empty ring takes wherever head stands: half of the data area."""
        return self.data_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def load_head(self) -> int:
        """The writer's head; what is read afterwards is at least as new."""
        head = self._head[0]
        self._fence.cross()
        return head

    def load_tail(self) -> int:
        """The reader's tail; what is written afterwards cannot disturb reads before it."""
        tail = self._tail[0]
        self._fence.cross()
        return tail

    def store_head(self, head: int) -> None:
        """Publish everything below head. Order: after all writes below it."""
        self._fence.cross()
        self._head[0] = head

    def store_tail(self, tail: int) -> None:
        """Give everything below tail back to the writer. Order: after all reads below it."""
        self._fence.cross()
        self._tail[0] = tail

    def place(self, position: int) -> int:
        """Where byte number `position` lies in `data`."""
        return position % self.data_bytes

    def summed(self, position: int, header: EntryHeader) -> int:
        """The checksum of the entry's bytes as they stand in the ring now."""
        at = self.place(position)
        return checksum(self.data[at + _SUMMED_FROM : at + header.summed_bytes])

    def write_header(self, header: EntryHeader) -> None:
        """Write an entry's header; the checksum is computed over what is there, so everything else comes first."""
        at, sizes = self.place(header.position), header.sizes
        fields = (header.position, header.entry_bytes, sizes.turns, sizes.tokens, sizes.row_bytes)
        _SUMMED_HEADER.pack_into(self.data, at + _SUMMED_FROM, *fields)
        _UNSUMMED_HEADER.pack_into(self.data, at, header.magic, self.summed(header.position, header))

    def close(self) -> None:
        """Give the views of the memory back."""
        for view in (self._head, self._tail, self.data):
            view.release()


def create_ring(data_bytes: int, *, setting: str = "link.ring_bytes") -> SealedMemory:
    """Memory for a ring whose data area has at least `data_bytes`; an entry can take half of it.

    Raises:
        ConfigError: the memory is not there; make the setting smaller.
    """
    data_bytes = align(max(data_bytes, 2 * ALIGNMENT_BYTES))
    memory = create("kvlog-ring", CONTROL_BYTES + data_bytes, setting=setting)
    _CONTROL.pack_into(memory.view, 0, _CONTROL_MAGIC, _VERSION, data_bytes)
    return memory


def _checked_data_bytes(view: memoryview) -> int:
    if len(view) < CONTROL_BYTES:
        raise DecodeError(problem="a ring's memory is too short", bytes_actual=len(view))
    magic, version, data_bytes = _CONTROL.unpack_from(view)
    if magic != _CONTROL_MAGIC or version != _VERSION:
        raise DecodeError(problem="not a ring of this version", magic=magic, version=version)
    if (
        data_bytes < 2 * ALIGNMENT_BYTES
        or data_bytes % ALIGNMENT_BYTES
        or CONTROL_BYTES + data_bytes > len(view)
    ):
        raise DecodeError(problem="a ring's data area does not fit its memory", data_bytes=data_bytes)
    return int(data_bytes)
