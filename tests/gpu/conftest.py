"""The tests of this folder need a CUDA device; without one they skip, and say so in the summary.

make test-gpu        or: python -m pytest -m gpu tests/gpu -rs -s
"""

from __future__ import annotations

import pytest
import torch

REASON = "NO GPU: torch sees no CUDA device here, so the cuda:N pool and a cache on a device are NOT tested by this run"


def pytest_report_header() -> str:
    """Say at the top what this run is worth."""
    if torch.cuda.is_available():
        return f"gpu: {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return f"gpu: {REASON}"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip(REASON)
    return torch.device("cuda", 0)
