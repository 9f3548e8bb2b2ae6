"""The ring between an engine and its daemon: one writer, one reader, whole entries or nothing, and nobody ever waits.

The engine reserves room for one step's rows, gathers them straight into the ring, and commits; the daemon peeks at the
oldest entry, takes what it needs from the ring's own bytes, and releases it. A writer that dies in between leaves no
trace: nothing is visible before `commit` has stored the head. A ring lives as long as its link; a new link, a new ring.

Cost at 128 KiB rows, against a plain memcpy of the same bytes: tests/bench/hook_ring.py.
The bytes, and why the order of stores is right: kvlog.buffers.ring_layout.
"""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvlog.buffers.ring_layout import (
    ALIGNMENT_BYTES,
    ENTRY_HEADER,
    ENTRY_MAGIC,
    NO_SIZES,
    PAD_MAGIC,
    EntryHeader,
    EntrySizes,
    RingArea,
    TableFields,
    TableRow,
    count_rows,
    create_ring,
    pack_table,
    session_hash,
    unpack_table,
)
from kvlog.errors import DecodeError, RingFull, RowTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvlog.buffers.doorbell import Doorbell
    from kvlog.buffers.memory import SealedMemory

__all__ = [
    "ReaderCounts",
    "Reservation",
    "RingEntry",
    "RingPart",
    "RingReader",
    "RingWriter",
    "TableFields",
    "TableRow",
    "WriterCounts",
    "create_ring",
    "session_hash",
]

_VISIBLE_TRIES = 64
"""How often an entry that its checksum does not confirm is read again: a store that another core made becomes visible
within microseconds, and one try at a 2 MiB entry takes about 100 µs, so this is over within milliseconds."""


@dataclass(slots=True)
class WriterCounts:
    """What a writer has done since it was made."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0
    full: int = 0
    abandoned: int = 0


@dataclass(slots=True)
class ReaderCounts:
    """What a reader has seen since it was made; `rereads`: tries beyond the first at an entry."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0
    rereads: int = 0
    corrupt: int = 0


class Reservation(NamedTuple):
    """Room in the ring that nobody sees yet.

    Args:
        rows: the ring's own bytes, whatever they hold now, to be filled token-major in the table's order; not to be
            touched after `commit` or `abandon`.
        header: of the entry; its checksum is computed at `commit`.
        pad_bytes: what is skipped before the entry, so that it does not wrap.
    """

    rows: memoryview
    header: EntryHeader
    pad_bytes: int


class RingWriter:
    """The engine's end. Used by one thread at a time; never waits.

    Args:
        memory: a ring, attached writable.
        doorbell: rung after each commit.

    Raises:
        DecodeError: the memory is not a ring; close the link that it came from.
    """

    def __init__(self, memory: SealedMemory, doorbell: Doorbell | None = None) -> None:
        self._area = RingArea(memory)
        self._doorbell = doorbell
        self._head = self._area.load_head()
        self._tail = self._area.load_tail()
        self._open: Reservation | None = None
        self.counts = WriterCounts()
        self._check_tail(self._tail, self._tail)

    @property
    def entry_bytes_max(self) -> int:
        """The largest entry that this ring ever takes."""
        return self._area.entry_bytes_max

    @property
    def bytes_free(self) -> int:
        """Bytes that are not in use; an entry may need more than its size, because entries do not wrap.

        Raises:
            DecodeError: the reader's side of the ring holds nonsense; close the link.
        """
        tail = self._area.load_tail()
        self._check_tail(tail, self._tail)
        self._tail = tail
        return self._area.data_bytes - (self._head - tail)

    def rows_max(self, turns: int, row_bytes: int) -> int:
        """The most rows of `turns` turns that one entry can have in an empty ring; 0: not even one."""
        fixed = EntrySizes.of(turns, 0, row_bytes).used_bytes + 2 * ALIGNMENT_BYTES
        return max(0, (self.entry_bytes_max - fixed) // (4 + row_bytes))

    def reserve(self, table: Sequence[TableFields], tokens: Sequence[int], row_bytes: int) -> Reservation:
        """Take room for one entry; at most one reservation is open at a time.

        Args:
            table: a TableRow's fields for each turn, n ≥ 1.
            tokens: token ids of all rows in the table's order; an `array("I")` is the quickest.
            row_bytes: size of each row; 0: token ids only.

        Raises:
            RingFull: no room now (fields: entry_bytes, free_bytes), or never: then the field entry_bytes_max is there,
                and fewer rows have to be written at a time.
            RowTooLarge: not even an empty ring takes one row of this size.
            DecodeError: the reader's side of the ring holds nonsense; close the link.
        """
        assert self._open is None, "commit or abandon the open reservation first"
        sizes = EntrySizes.of(len(table), len(tokens), row_bytes)
        pad_bytes = self._find_room(sizes)
        position = self._head + pad_bytes
        entry = self._area.data[self._area.place(position) :][: sizes.used_bytes]
        rows = pack_table(table, entry[ENTRY_HEADER.size :])
        assert len(tokens) == rows, "one token id a row"
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
        entry[sizes.tokens_at : sizes.tokens_at + 4 * sizes.tokens] = memoryview(ids).cast("B")
        header = EntryHeader(ENTRY_MAGIC, 0, position, sizes.entry_bytes, sizes)
        self._open = Reservation(entry[sizes.rows_at :], header, pad_bytes)
        return self._open

    def commit(self, reservation: Reservation) -> None:
        """Publish the entry with one store, and wake the reader."""
        self._close_reservation(reservation)
        header, area = reservation.header, self._area
        if reservation.pad_bytes:
            area.write_header(EntryHeader(PAD_MAGIC, 0, self._head, reservation.pad_bytes, NO_SIZES))
        area.write_header(header)
        self._head = header.position + header.entry_bytes
        area.store_head(self._head)
        self.counts.entries += 1
        self.counts.rows += header.sizes.tokens
        self.counts.bytes += header.entry_bytes
        if self._doorbell is not None:
            self._doorbell.ring()

    def abandon(self, reservation: Reservation) -> None:
        """Give the room back; the reader never learns of it."""
        self._close_reservation(reservation)
        self.counts.abandoned += 1

    def close(self) -> None:
        """Give the views of the memory back; the memory itself is the caller's."""
        if self._open is not None:
            self.abandon(self._open)
        self._area.close()

    def _close_reservation(self, reservation: Reservation) -> None:
        assert reservation is self._open, "not the open reservation"
        self._open = None
        try:
            reservation.rows.release()
        except BufferError:  # the caller still has an array over it: his to drop
            return

    def _find_room(self, sizes: EntrySizes) -> int:
        """How many bytes to skip before the entry.

        Raises:
            RingFull: there is no room.
            RowTooLarge: there never will be, for even one row.
        """
        entry_bytes, free_bytes, most = sizes.entry_bytes, self.bytes_free, self.entry_bytes_max
        if entry_bytes > most:
            if EntrySizes.of(1, 1, sizes.row_bytes).entry_bytes > most:
                raise RowTooLarge(row_bytes=sizes.row_bytes, record_bytes_max=most)
            self.counts.full += 1
            raise RingFull(entry_bytes=entry_bytes, free_bytes=free_bytes, entry_bytes_max=most)
        rest = self._area.data_bytes - self._area.place(self._head)
        pad_bytes = 0 if entry_bytes <= rest else rest
        if pad_bytes + entry_bytes > free_bytes:
            self.counts.full += 1
            raise RingFull(entry_bytes=entry_bytes, free_bytes=free_bytes)
        return pad_bytes

    def _check_tail(self, tail: int, tail_min: int) -> None:
        if not tail_min <= tail <= self._head <= tail + self._area.data_bytes or tail % ALIGNMENT_BYTES:
            raise DecodeError(problem="the ring's tail is nonsense", tail=tail, head=self._head)


@dataclass(frozen=True, slots=True)
class RingPart:
    """One turn's rows of an entry."""

    row: TableRow
    tokens: tuple[int, ...]
    rows: memoryview


@dataclass(frozen=True, slots=True)
class RingEntry:
    """The oldest entry, verified.

    Args:
        table: one row for each turn.
        tokens: token ids of all rows, in the table's order; a copy, format I.
        rows: the ring's own bytes, read-only, token-major; valid until `release`. The writer leaves them alone until
            then, but a writer run wild could: what is stored elsewhere gets a checksum of its own.
        row_bytes: size of a row; 0: token ids only.
    """

    table: tuple[TableRow, ...]
    tokens: memoryview
    rows: memoryview
    row_bytes: int

    def parts(self) -> Iterator[RingPart]:
        """The entry turn by turn, in the table's order; `rows` are views, valid until `release`."""
        at = 0
        for row in self.table:
            end = at + row.n
            yield RingPart(
                row, tuple(self.tokens[at:end]), self.rows[at * self.row_bytes : end * self.row_bytes]
            )
            at = end


class RingReader:
    """The daemon's end. Used by one thread at a time; never waits, and takes nothing that the writer says on trust.

    Raises:
        DecodeError: the memory is not a ring.
    """

    def __init__(self, memory: SealedMemory) -> None:
        self._area = RingArea(memory)
        self._tail = self._area.load_tail()
        if self._tail % ALIGNMENT_BYTES:
            raise DecodeError(problem="the ring's tail is nonsense", tail=self._tail)
        self._next = self._tail
        self._entry: RingEntry | None = None
        self._problem: DecodeError | None = None
        self.counts = ReaderCounts()

    @property
    def bytes_used(self) -> int:
        """Bytes that wait to be read, as far as the writer's head is to be believed."""
        return max(0, min(self._area.load_head() - self._tail, self._area.data_bytes))

    def peek(self) -> RingEntry | None:
        """The oldest entry, until it is released always the same; None: there is none yet.

        Raises:
            DecodeError: the ring holds what no right writer leaves there. It stays so: count it and close the link.
        """
        if self._problem is not None:
            raise self._problem
        if self._entry is None:
            try:
                self._entry = self._read()
            except DecodeError as error:
                self._problem = error
                self.counts.corrupt += 1
                raise
        return self._entry

    def release(self) -> None:
        """Give the room of the peeked entry back to the writer; its rows must not be used any more."""
        entry, self._entry = self._entry, None
        assert entry is not None, "nothing was peeked"
        with contextlib.suppress(BufferError):  # somebody still has an array over it: his to drop
            entry.rows.release()
        self.counts.entries += 1
        self.counts.rows += len(entry.tokens)
        self.counts.bytes += self._next - self._tail
        self._tail = self._next
        self._area.store_tail(self._tail)

    def close(self) -> None:
        """Give the views of the memory back; the memory itself is the caller's."""
        if self._entry is not None:
            with contextlib.suppress(BufferError):
                self._entry.rows.release()
            self._entry = None
        self._area.close()

    def _read(self) -> RingEntry | None:
        area, tail = self._area, self._tail
        head = area.load_head()
        if head == tail:
            return None
        if not tail < head <= tail + area.data_bytes or head % ALIGNMENT_BYTES:
            raise DecodeError(problem="the ring's head is nonsense", head=head, tail=tail)
        header = self._verified(tail, head)
        if header.is_pad:
            header = self._verified(header.position + header.entry_bytes, head)
            # Behind a pad the place is 0, and a pad there would be as long as the ring: _misfit has refused it.
            assert not header.is_pad, "a pad follows a pad"
        entry = self._parse(header)
        self._next = header.position + header.entry_bytes
        return entry

    def _verified(self, position: int, head: int) -> EntryHeader:
        """The header at `position`, once position, sizes and checksum fit.

        Raises:
            DecodeError: they do not, however often one looks.
        """
        problem = ""
        for attempt in range(_VISIBLE_TRIES):
            self.counts.rereads += attempt > 0
            header = self._header_at(position)
            problem = self._misfit(header, position, head)
            if not problem:
                return header
        raise DecodeError(problem=problem, position=position, head=head)

    def _header_at(self, position: int) -> EntryHeader:
        at = self._area.place(position)
        # Our own copy: every size that is used below was checked, whatever happens to the ring's bytes meanwhile.
        return EntryHeader.unpack(bytes(self._area.data[at : at + ENTRY_HEADER.size]))

    def _misfit(self, header: EntryHeader, position: int, head: int) -> str:
        """What is wrong with a header, in words; empty if nothing."""
        if header.position != position:
            return "an entry does not carry its own position"
        rest = self._area.data_bytes - self._area.place(position)
        most = min(rest, head - position)
        if not ENTRY_HEADER.size <= header.entry_bytes <= most:
            return "an entry does not fit the ring"
        if header.is_pad:
            if header.entry_bytes != rest:
                return "a pad does not end where the ring does"
        elif header.magic != ENTRY_MAGIC:
            return "an entry does not begin with its magic"
        elif header.entry_bytes != header.sizes.entry_bytes:
            return "an entry's parts do not add up to its size"
        if header.checksum != self._area.summed(position, header):
            return "an entry's checksum does not fit its bytes"
        return ""

    def _parse(self, header: EntryHeader) -> RingEntry:
        sizes, at, data = header.sizes, self._area.place(header.position), self._area.data
        table = unpack_table(bytes(data[at + ENTRY_HEADER.size : at + sizes.tokens_at]))
        if count_rows(table) != sizes.tokens:
            raise DecodeError(problem="an entry's table does not fit its token ids", position=header.position)
        ids = bytes(data[at + sizes.tokens_at : at + sizes.tokens_at + 4 * sizes.tokens])
        rows = data[at + sizes.rows_at : at + sizes.used_bytes].toreadonly()
        return RingEntry(table, memoryview(ids).cast("I"), rows, sizes.row_bytes)
