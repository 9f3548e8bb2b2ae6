"""The scheduler's half: what it reads of vLLM's objects, and what it does when something breaks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlog.engines.step_plan import Dropped, LoadAsk, Ready, RowsAt, StepPlan, StepReport, TurnKey
from kvlog.engines.transformers_identity import adapter_digest
from kvlog.engines.vllm_adapters import AdapterDigests
from kvlog.engines.vllm_requests import context_digest
from kvlog.engines.vllm_scheduler import EngineShape, SchedulerHalf
from kvlog.engines.vllm_settings import ConnectorSettings
from tests.unit.engines.lora_folder import adapter, lora

KEY = TurnKey(1)


@pytest.fixture
def half():
    """With loads of up to 100 rows in one step."""
    settings = ConnectorSettings(link=Path("/nowhere"), load_step_bytes=1000)
    shape = EngineShape(engine=f"test-{os.urandom(8).hex()}", blocks=100, row_bytes=10, block_size=16)
    one = SchedulerHalf(settings, shape)
    yield one
    one.close()


def request(tokens: int = 50, **fields: Any) -> Any:
    """A vLLM Request, as far as it is read."""
    plain: dict[str, Any] = {
        "request_id": "r",
        "session_id": "s",
        "kv_transfer_params": None,
        "sampling_params": SimpleNamespace(n=1),
        "prompt_embeds": None,
        "resumable": False,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "all_token_ids": list(range(tokens)),
        "skip_reading_prefix_cache": False,
        "num_computed_tokens": 0,
    }
    return SimpleNamespace(**{**plain, **fields})


def output(*, new: Any = (), cached: Any = (), counts: dict[str, int] | None = None) -> Any:
    """A SchedulerOutput; `cached`: (name, computed, new blocks or None, resumed)."""
    return SimpleNamespace(
        num_scheduled_tokens=counts or {},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(blocks,))
            for name, computed, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            num_computed_tokens=[computed for _, computed, *_ in cached],
            new_block_ids=[None if blocks is None else (blocks,) for _, _, blocks, _ in cached],
            resumed_req_ids={name for name, *_, resumed in cached if resumed},
        ),
        preempted_req_ids=None,
    )


def blocks(*ids: int) -> Any:
    """KVCacheBlocks of one group."""
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def verified(half: SchedulerHalf, rows: int, of: Any) -> None:
    """The request has asked, and the worker has so many rows."""
    half.on_new_request(of)
    assert (None, False) == half.matched_tokens(of, 0)
    assert 1 == len(half.plan(output()).opens)
    half.take(StepReport(ready=(Ready(KEY, 0, 0, rows, logged=True),)), None)


def test_steps_are_read_from_vllms_outputs(half):
    """New, decoded, grown and resumed requests; blocks that came, or none."""
    one = request()
    verified(half, 20, one)
    assert (20, False) == half.matched_tokens(one, 0)
    half.allocated(one, blocks(3, 4), 20)
    plan = half.plan(output(new=[("r", 20, [3, 4])], counts={"r": 30}))
    assert ((LoadAsk(KEY, 0, 20, (3, 4)),), (RowsAt(KEY, (3, 4), True, (), 50),)) == (plan.loads, plan.rows)
    one.all_token_ids.append(7)
    plan = half.plan(output(cached=[("r", 50, None, False)], counts={"r": 1}))
    assert (RowsAt(KEY, (), False, (7,), 51),) == plan.rows
    one.all_token_ids.append(8)
    plan = half.plan(output(cached=[("r", 51, [9], False)], counts={"r": 1}))
    assert (RowsAt(KEY, (9,), False, (8,), 52),) == plan.rows
    assert (True, {"kvlog": {"loaded": 20, "unlogged": None}}) == half.finished(one, 3)


def test_long_load_is_said_to_be_beside_the_steps(half):
    """Over the bound of bytes, in rows."""
    one = request(300)
    verified(half, 200, one)
    assert [(100, False), (101, True)] == [half.matched_tokens(one, local) for local in (100, 99)]


def test_request_that_skips_the_prefix_cache_does_not_wait(half):
    """VLLM computes it all whatever it is told; its turn is asked for all the same."""
    one = request(skip_reading_prefix_cache=True)
    half.on_new_request(one)
    assert (0, False) == half.matched_tokens(one, 0)
    assert 1 == len(half.plan(output()).opens)


def test_increments_are_unlogged_requests_by_cause(half):
    """Since they were last asked for."""
    one = request()
    verified(half, 0, one)
    half.take(StepReport(dropped=(Dropped(KEY, "fenced"),)), None)
    assert ({"unlogged:fenced": 1}, {}) == (half.take_increments(), half.take_increments())


def test_unforeseen_error_ends_replication_and_nothing_else(half):
    """Every later call answers as if there were no connector; the fault is counted."""
    one = request()
    half.on_new_request(one)
    assert (0, False) == half.matched_tokens(SimpleNamespace(), 0)  # no such attributes
    assert (0, False) == half.matched_tokens(one, 0)
    assert StepPlan() == half.plan(output())
    half.take(None, {"x"})
    half.allocated(one, blocks(1), 0)
    assert not half.finished(one, 1)[0]
    assert {"faults": 1} == half.take_increments()


def test_rows_that_are_counted_as_loaded_are_loaded_whatever_breaks(half):
    """The plan that fails still carries them; computing on blocks that nobody filled would be silently wrong."""
    one = request()
    verified(half, 20, one)
    half.matched_tokens(one, 0)
    half.allocated(one, blocks(3, 4), 20)
    assert StepPlan(loads=(LoadAsk(KEY, 0, 20, (3, 4)),)) == half.plan(SimpleNamespace())
    with pytest.raises(AttributeError):
        half.allocated(one, SimpleNamespace(), 5)


def asked_until_known(half: SchedulerHalf, of: Any) -> tuple[int | None, bool]:
    """What the scheduler is told, once its adapter is known, or is not waited for any longer."""
    half.on_new_request(of)
    deadline = time.monotonic() + 10
    while (said := half.matched_tokens(of, 0)) == (None, False) and not half._planner._requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return said


def test_request_with_an_adapter_is_taken_when_its_weights_were_read(half, tmp_path):
    """It waits for that as for its turn; the turn's context has the weights' digest."""
    folder = adapter(tmp_path / "a")
    one = request(lora_request=lora(folder))
    assert (None, False) == asked_until_known(half, one)
    context = half.plan(output()).opens[0].request.context
    assert context_digest(one, adapter_digest(folder)) == context


@pytest.mark.parametrize("exists", [True, False])
def test_request_whose_adapter_is_not_read_in_time_is_served_unlogged(half, tmp_path, exists):
    """Or cannot be read at all: counted with the reason."""
    release = threading.Event()

    def find(_: str) -> Any:
        release.wait(10)
        return tmp_path

    if exists:
        half._adapters, half._wait_seconds = AdapterDigests(find), 0.05
    one = request(lora_request=lora(tmp_path / "none"))
    assert (0, False) == asked_until_known(half, one)
    release.set()
    assert {"unlogged:adapter_unreadable": 1} == half.take_increments()


def test_request_that_leaves_while_its_adapter_is_read_leaves_nothing(half, tmp_path):
    """An abort in that time."""
    one = request(lora_request=lora(adapter(tmp_path / "a")))
    half.on_new_request(one)
    half.finished(one, 0)
    assert {} == half._undescribed


@pytest.mark.parametrize(
    ("block", "few", "tokens", "waits"),
    [
        (16, None, 16, False),
        (16, None, 17, True),
        (256, None, 128, False),
        (256, None, 129, True),
        (16, 0, 1, True),
        (16, 40, 40, False),
    ],
)
def test_request_of_no_more_than_a_block_is_computed_at_once(block, few, tokens, waits):
    """Or of what the setting says; nought is a number."""
    shape = EngineShape(engine=f"test-{os.urandom(8).hex()}", blocks=100, row_bytes=10, block_size=block)
    one = SchedulerHalf(ConnectorSettings(link=Path("/nowhere"), compute_tokens=few), shape)
    asked = request(tokens)
    one.on_new_request(asked)
    assert ((None if waits else 0), False) == one.matched_tokens(asked, 0)
    one.close()
