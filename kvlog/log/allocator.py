"""One call at process start that makes glibc keep multi-megabyte buffers instead of giving them back all the time.

Measured on the Kafka client with 900 KiB records: CPU seconds per GB × 0.33-0.41 for both producing and consuming. Only
both thresholds together help; the trim threshold alone makes it worse (× 1.5-1.9).
Price: up to TRIM_BYTES of freed memory stays in the process.
"""

from __future__ import annotations

import ctypes

__all__ = ["MMAP_BYTES", "TRIM_BYTES", "tune_allocator"]

MMAP_BYTES = 32 << 20
"""Allocations below this come from the heap and are reused; 32 MiB is glibc's own upper limit for the setting."""

TRIM_BYTES = 512 << 20
"""Free memory at the heap's end that is kept."""

# Source: glibc, malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_allocator() -> bool:
    """Set glibc's mmap and trim thresholds for this process; call it before the first large allocation.

    Returns: False where the C library has no mallopt (musl, macOS) or refuses the values; nothing is changed then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # The mmap threshold first: the trim threshold alone would cost, so it is set only when the other was taken.
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
