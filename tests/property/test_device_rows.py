"""Rows of a cache on a GPU under any order of steps, landings, cursors and block tables: what is read is right."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlog.engines.device_layout import stack_layers
from kvlog.engines.device_rows import DeviceOptions, DeviceRows, DeviceStore
from kvlog.layout import DType, Layout
from tests.unit.engines.fake_queue import FakeQueue

LAYOUT = Layout(2, 2, 1, 2, DType.FLOAT32)
SIZE, TABLE, REQUESTS = 4, 3, 3
MOST = SIZE * TABLE


@dataclass
class Request:
    """One request: how often its blocks were given anew, what it has computed, and where its log stands."""

    rows: DeviceRows
    blocks: list[int]
    version: int = 0
    computed: int = 0
    cursor: int = 0
    log: list[float] = field(default_factory=list)


class Engine:
    """Requests over one cache; each row is one number, of its request, version and position."""

    def __init__(self, slots: int, slot_rows: int, step_rows: int) -> None:
        self.raw = torch.zeros(2, REQUESTS * TABLE, 1, SIZE, 4)
        self.queue = FakeQueue()
        size = LAYOUT.row_bytes
        options = DeviceOptions(step_bytes=step_rows * size, slot_bytes=slot_rows * size, slots=slots)
        self.store = DeviceStore(stack_layers(list(self.raw), 2), SIZE, LAYOUT, self.queue, options)
        self.requests = [
            Request(self.store.open_rows(), list(range(n * TABLE, (n + 1) * TABLE))) for n in range(REQUESTS)
        ]
        for request in self.requests:
            request.rows.take_blocks(request.blocks, anew=True)

    def number(self, request: Request, position: int) -> float:
        """What its row there is."""
        return 10000.0 * request.version + 100 * self.requests.index(request) + position + 1

    def compute(self, request: Request, count: int) -> None:
        """A step's rows of one request."""
        for position in range(request.computed, min(MOST, request.computed + count)):
            block = request.blocks[position // SIZE]
            self.raw[:, block, :, position % SIZE] = self.number(request, position)
            request.computed = position + 1
        request.rows.settle(request.computed)

    def preempt(self, request: Request) -> None:
        """Its blocks are given anew: other rows come to lie there, and its log begins anew."""
        request.version += 1
        request.computed = request.cursor = 0
        request.rows.take_blocks(request.blocks, anew=True)
        self.raw[:, request.blocks] = -1

    def write(self, request: Request) -> None:
        """What the ring takes: each row's own number, whole."""
        length = request.rows.length
        if length <= request.cursor:
            return
        out = bytearray((length - request.cursor) * LAYOUT.row_bytes)
        request.rows.copy_rows(request.cursor, memoryview(out))
        got = np.frombuffer(out, np.float32).reshape(length - request.cursor, -1)
        expected = [self.number(request, position) for position in range(request.cursor, length)]
        assert (got == np.array(expected, np.float32)[:, None]).all()
        request.cursor = length

    def gather(self) -> None:
        """After a step."""
        self.store.gather_step([(request.rows, request.cursor) for request in self.requests])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["compute", "compute", "gather", "arrive", "arrive", "write", "write", "preempt", "back"]
        ),
        st.integers(0, REQUESTS - 1),
        st.integers(0, MOST),
    ),
    min_size=20,
    max_size=60,
)


@given(STEPS, st.integers(2, 3), st.integers(1, 6), st.integers(1, 6))
def test_row_that_is_read_is_the_requests_own_and_all_come_in_the_end(
    steps: list[tuple[str, int, int]], slots: int, slot_rows: int, step_rows: int
) -> None:
    """Copies land in their own time, cursors go back, blocks are given anew; every slot is free when all have left."""
    engine = Engine(slots, slot_rows, step_rows)
    for do, index, amount in steps:
        request = engine.requests[index]
        match do:
            case "compute":
                engine.compute(request, amount)
            case "gather":
                engine.gather()
            case "arrive":
                engine.queue.arrive(but=amount % 3)
            case "write":
                engine.gather()  # as the hook does: a cursor is followed before it is written from
                engine.write(request)
            case "preempt":
                engine.preempt(request)
            case _:
                request.cursor = min(request.cursor, amount)
    for _ in range(4 * MOST * REQUESTS):
        engine.gather()
        engine.store.drain()
        engine.queue.arrive()
        for request in engine.requests:
            engine.write(request)
    for request in engine.requests:
        assert request.cursor == request.computed
        request.rows.close()
    assert [0] * slots == [slot.uses for slot in engine.store._slots]
