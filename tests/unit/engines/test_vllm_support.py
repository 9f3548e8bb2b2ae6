"""What the connector serves, and the names that its refusals give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlog.engines.vllm_settings import ConnectorSettings, CudaUse
from kvlog.engines.vllm_support import (
    CacheGroup,
    EngineFacts,
    check_api,
    check_version,
    first_refusal,
    refuse_unsupported,
)
from kvlog.errors import ConfigError

GROUP = CacheGroup(
    kind="FullAttentionSpec", layers=("model.layers.0.attn",), dtype="bfloat16", head_size=64, head_size_v=64
)
FACTS = EngineFacts(groups=(GROUP,))


def group(**fields: Any) -> EngineFacts:
    """Facts with one field of the group changed."""
    return replace(FACTS, groups=(replace(GROUP, **fields),))


def test_plain_attention_is_served():
    """One group of full attention in bfloat16 on one rank."""
    refuse_unsupported(FACTS)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (replace(FACTS, tensor_parallel=3, kv_heads=4), "3 ranks do not divide 4 KV heads"),
        (replace(FACTS, tensor_parallel=8, kv_heads=4), "8 ranks do not divide 4 KV heads"),
        (replace(FACTS, tensor_parallel=2, kv_heads=4, nodes=2), "2 machines"),
        (replace(FACTS, tensor_parallel=2, kv_heads=4, executor="ray"), "ray"),
        (replace(FACTS, pipeline_parallel=2), "--pipeline-parallel-size"),
        (replace(FACTS, data_parallel=4), "--data-parallel-size"),
        (replace(FACTS, context_parallel=2), "--decode-context-parallel-size"),
        (replace(FACTS, cache_dtype="fp8_e4m3"), "--kv-cache-dtype"),
        (replace(FACTS, load_failure_policy="fail"), "kv_load_failure_policy"),
        (replace(FACTS, role="kv_consumer"), "kv_role"),
        (replace(FACTS, speculative="eagle3"), "eagle3"),
        (replace(FACTS, encoder_decoder=True), "encoder-decoder"),
        (replace(FACTS, plans_ahead=True, loads_in_a_step=True), "load_step_bytes"),
        (replace(FACTS, platform="tpu"), "tpu"),
        (replace(FACTS, platform="cuda"), '"cuda": "experimental"'),
        (replace(FACTS, groups=(GROUP, GROUP)), "2 groups"),
        (replace(FACTS, groups=()), "0 groups"),
        (group(kind="MambaSpec"), "model.layers.0.attn: MambaSpec"),
        (group(kind="SlidingWindowMLASpec"), "SlidingWindowMLASpec"),
        (group(kind="MLAAttentionSpec", dtype="uint8", packed="x"), "uint8"),
        (group(kind="SlidingWindowSpec"), "SlidingWindowSpec"),
        (group(sliding_window=4096), "sliding window of 4096"),
        (group(chunk=8192), "chunks of 8192"),
        (group(head_size_v=128), "K has 64"),
        (group(dtype="uint8"), "uint8"),
        (group(packed="elements packed as INT4"), "INT4"),
    ],
)
def test_what_is_not_served_is_refused_by_name(facts, said):
    """The option, group or layer that is in the way stands in the error."""
    refusal = first_refusal(facts)
    assert refusal is not None
    assert said in str(refusal)
    with pytest.raises(ConfigError):
        refuse_unsupported(facts)


def test_latent_attention_is_served_with_one_plane():
    """MLA has no V of its own."""
    latent = replace(GROUP, kind="MLAAttentionSpec", head_size=576, head_size_v=0)
    assert first_refusal(replace(FACTS, groups=(latent,))) is None
    assert (1, 2) == (latent.planes, GROUP.planes)


@pytest.mark.parametrize("kv_heads", [1, 3, 4])
def test_latent_attention_of_several_ranks_is_served_whatever_its_heads(kv_heads):
    """Each rank has the whole row, which one of them logs: there is nothing to divide."""
    latent = replace(GROUP, kind="MLAAttentionSpec", head_size=576, head_size_v=0)
    facts = replace(FACTS, groups=(latent,), tensor_parallel=2, kv_heads=kv_heads)
    assert first_refusal(facts) is None
    assert "2 machines" in str(first_refusal(replace(facts, nodes=2)))
    assert "--decode-context-parallel-size" in str(first_refusal(replace(facts, context_parallel=2)))


def test_cuda_is_served_to_whoever_asks_for_it_in_so_many_words():
    """Nobody gets a path that has never run on a device by accident."""
    asked = ConnectorSettings.parse({"link": "/s", "cuda": "experimental"}).cuda
    assert first_refusal(replace(FACTS, platform="cuda", cuda=asked)) is None
    assert CudaUse.REFUSED is ConnectorSettings.parse({"link": "/s"}).cuda


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_divide_the_heads_are_served(ranks):
    """Each keeps its heads of every row."""
    assert first_refusal(replace(FACTS, tensor_parallel=ranks, kv_heads=4)) is None


def test_drafts_of_the_prompt_are_served():
    """Ngram has no cache of its own."""
    assert first_refusal(replace(FACTS, speculative="ngram")) is None


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_version_in_the_window_is_served(version):
    """All patch releases of a tested minor version."""
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", "0"])
def test_version_outside_the_window_is_refused_unless_told(version):
    """The operator may know better."""
    with pytest.raises(ConfigError, match="any_version"):
        check_version(version)
    check_version(version, any_version=True)


def test_api_that_lacks_a_method_is_named():
    """A clear error now instead of a crash in a worker."""
    names = {"on_new_request", "start_load_kv"}
    with pytest.raises(ConfigError, match="wait_for_save"):
        check_api(names)


def test_settings_are_read_with_their_defaults():
    """Only the link has none."""
    found = ConnectorSettings.parse({"link": "/run/kvlog/kvlogd.sock", "wait_seconds": 5, "step_bytes": 1024})
    assert ("/run/kvlog/kvlogd.sock", 5, 2.0, 1024) == (
        str(found.link),
        found.wait_seconds,
        found.hold_seconds,
        found.step_bytes,
    )


@pytest.mark.parametrize(
    ("extra", "tokens"), [({}, None), ({"compute_tokens": 0}, 0), ({"compute_tokens": 64}, 64)]
)
def test_setting_of_what_is_computed_at_once_is_a_block_unless_it_is_given(extra, tokens):
    """Nought is a number, too: whoever names a session waits then."""
    assert tokens == ConnectorSettings.parse({"link": "/s", **extra}).compute_tokens


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "link"),
        ({"link": ""}, "link"),
        ({"link": "/s", "lnik": 1}, "no such key"),
        ({"link": "/s", "wait_seconds": "2"}, "wait_seconds"),
        ({"link": "/s", "hold_blocks_share": 1.5}, "hold_blocks_share"),
        ({"link": "/s", "step_bytes": 0}, "step_bytes"),
        ({"link": "/s", "hold_seconds": True}, "hold_seconds"),
        ({"link": "/s", "compute_tokens": -1}, "compute_tokens"),
        ({"link": "/s", "compute_tokens": None}, "compute_tokens"),
        ({"link": "/s", "cuda": True}, "cuda"),
        ({"link": "/s", "cuda": "yes"}, "experimental"),
    ],
)
def test_settings_that_make_no_sense_are_refused(extra, said):
    """A typing error never changes what is replicated in silence."""
    with pytest.raises(ConfigError, match=said):
        ConnectorSettings.parse(extra)
