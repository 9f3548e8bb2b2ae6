"""Rows that are dear to copy: a step copies what it has time for, and the rest catches up."""

from __future__ import annotations

import time

from tests.integration.one_request import ROW_BYTES, Engine, assert_logged, linked, wait_for

ROW_SECONDS = 100e-6
"""25 µs a KiB: seven times what the dearest layout costs."""


class DearCache:
    """A cache whose every row takes its time of the processor."""

    def __init__(self, cache):
        self._cache = cache

    @property
    def length(self):
        """Rows."""
        return self._cache.length

    def copy_rows(self, start, out):
        """Copy, and work."""
        self._cache.copy_rows(start, out)
        until = time.thread_time() + ROW_SECONDS * (len(out) // ROW_BYTES)
        while time.thread_time() < until:
            pass


def test_rows_that_are_dear_to_copy_are_written_over_more_steps(tmp_path):
    """A budget of bytes alone lets one step take 40 ms; by time, what is left of it is 20 rows, and all rows arrive."""
    with linked(tmp_path / "s", step_bytes=400 * ROW_BYTES, step_seconds=0.002) as (running, replicator):
        engine = Engine(replicator, tokens=[1] * 400)
        engine.compute()
        written = []
        while replicator.counts.rows < engine.cache.length:
            before = replicator.counts.rows
            replicator.after_step([(engine.handle, DearCache(engine.cache), engine.tokens)])
            written.append(replicator.counts.rows - before)
        assert 100 < written[0] <= 128, "what nobody has measured yet"
        assert max(written[3:]) <= 21
        wait_for(lambda: engine.handle.acked_length == engine.cache.length)
        assert_logged(running.daemon, engine)
        engine.close()
