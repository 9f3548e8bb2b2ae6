"""A small random Llama for tests, made once a run, and generation over it, greedy or seeded."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.engines.sampler import Sampler
from kvlog.engines.transformers import TransformersModel
from kvlog.engines.transformers_build import random_llama
from kvlog.layout import DType

if TYPE_CHECKING:
    import numpy as np

    from kvlog.engines.base import RowCache

GREEDY = Sampler()


@functools.cache
def random_folder(layers: int = 3, seed: int = 7) -> Path:
    """Gives a folder with the random model."""
    folder = Path(tempfile.mkdtemp(prefix="kvlog-test-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random_llama(folder / "random", layers=layers, seed=seed)
    return folder / "random"


@functools.cache
def random_model(dtype: DType = DType.FLOAT32) -> TransformersModel:
    """Gives the random model, loaded, on one thread."""
    return TransformersModel.load(random_folder(), dtype=dtype, threads=1)


def rows_of(model: TransformersModel, cache: RowCache, start: int = 0, end: int | None = None) -> bytearray:
    """Copies rows [start, end) out of a cache."""
    end = cache.length if end is None else end
    rows = bytearray((end - start) * model.identity.layout.row_bytes)
    cache.copy_rows(start, memoryview(rows))
    return rows


@dataclass(frozen=True)
class Run:
    """A prompt and how its answer is drawn."""

    model: TransformersModel
    prompt: list[int]
    sampler: Sampler = GREEDY

    def go_on(self, cache: RowCache, tokens: list[int], *, until: int) -> list[np.ndarray]:
        """Computes what `tokens` has beyond the cache, then draws until the answer has so many; tokens grows.

        Returns: the logits of each step.
        """
        steps = []
        while len(tokens) < len(self.prompt) + until:
            logits = self.model.forward(cache, tokens[cache.length :])
            steps.append(logits)
            tokens.append(self.sampler.pick(logits, len(tokens) - len(self.prompt)))
        return steps
