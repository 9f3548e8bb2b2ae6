"""The ways of making a model's folder that need no network, for real."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvlog.engines import models
from kvlog.engines.models import ModelSource, ensure_model
from kvlog.engines.transformers import TransformersModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # child processes that import torch


def test_random_model_is_made_and_answers(tmp_path: Path) -> None:
    """The last resort is a model that loads, speaks the chat protocol and computes."""
    folder = ensure_model("random", cache_folder=tmp_path)
    model = TransformersModel.load(folder.path)
    logits = model.forward(model.new_cache(), model.encode_chat([("user", "Hello")]))
    assert (ModelSource.RANDOM, 4, (model.vocabulary,)) == (
        folder.source,
        model.identity.layout.layers,
        logits.shape,
    )


def test_hub_without_a_network_is_given_up_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is obeyed, and what the hub's own cache lacks is a source that failed, not a crash."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(models._SourceFailed):
        models._from_hub(tmp_path / "model", lambda _: None)
