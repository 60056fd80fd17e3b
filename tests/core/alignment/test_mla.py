"""Multi-latent attention under the prefix schedule in fp64, against plain autograd."""

import functools
from typing import Any

import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.blocks import core
from megatron_prefix.megatron.install import install, installed, language_model
from tests.core.alignment.test_hybrid_memory import step
from tests.harness import hybrid, steps
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")

EXACT = hybrid.limit(128, 2)
DENSE: dict[str, Any] = {"num_layers": 2, "num_moe_experts": None}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


def model_of(fields, **options):
    """Equal arguments give equal weights."""
    return small_model("tiny-deepseek", spec={**DENSE, **fields}, **options)


def test_a_backward_casts_as_its_forward_did():
    """The projection of latents runs there again, under autocast as before."""
    with torch.autocast("cpu", torch.bfloat16):
        found = core.autocast_now("cpu")
    assert not torch.is_autocast_enabled("cpu")
    with found:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@functools.cache
def expected():
    """By plain autograd."""
    return steps.plain(model_of({}, wrap_ddp=False), steps.Contract(), hybrid.items())


@pytest.mark.parametrize("fields", [{"q_lora_rank": None, "qk_layernorm": False},
                                    {"v_head_dim": 28}])  # fmt: skip
def test_saved_bytes_are_those_that_were_predicted(fields):
    model = model_of(fields, dtype=torch.float32)
    for memory, within in (("retain", 0.03), ("recompute", 0.06)):
        for options in ({"chunk_tokens": 7}, {}):
            saved, report = step(model, memory=memory, **options)
            found = saved + report.cache_bytes
            assert report.memory.saved == pytest.approx(found, rel=within), (memory, options)


def test_up_projections_that_are_recomputed_are_not_kept(monkeypatch):
    """Megatron frees queries, keys and values between forward and backward, and so do segments."""
    kept: list[Any] = []
    attention = core.segment_attention

    def watched(query, key, value, context, *more):
        sizes = [one.untyped_storage().nbytes() for before in kept for one in before]
        assert context.backward or not any(sizes)
        kept.append((query, key, value))
        return attention(query, key, value, context, *more)

    monkeypatch.setattr(core, "segment_attention", watched)
    model = model_of({}, config_overrides=RECOMPUTED)
    assert hybrid.worst(model, expected(), chunk_tokens=7) <= EXACT
    assert kept


def test_work_is_that_of_the_projections():
    """DeepSeek-V3's: an ancestor's position costs as much as 410 pairs."""
    spec = resolve(
        "tiny-deepseek", **{**DENSE, "num_attention_heads": 128, "num_query_groups": 128},
        kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    work = MLA().work(spec)
    assert work.pairs == 128 * (192 + 128) and work.seen == 512 * 128 * 256
    assert work.seen / work.pairs == pytest.approx(409.6)
    model = model_of({}, wrap_ddp=False)
    mixers = [layer.self_attention for layer in language_model(model).decoder.layers]
    weights = [
        sum(one.numel() for name, one in mixer.named_parameters() if "norm" not in name)
        for mixer in mixers
    ]
    assert {*weights} == {MLA().parameters(resolve("tiny-deepseek", **DENSE))}


def test_latents_without_their_own_rotary_embedding_are_refused():
    model = model_of({})
    del language_model(model).decoder.layers[1].self_attention.rotary_pos_emb
    with pytest.raises(CannotShare, match="rotary embedding of the model, which its latents have"):
        install(model)
    assert installed(model) is None


def test_equal_rotary_embeddings_have_one_table():
    model = model_of({})
    assert hybrid.worst(model, expected()) <= EXACT
    rotary = installed(model).rotary
    assert (
        len(rotary.modules) == DENSE["num_layers"]
        and len({id(t) for t, _ in rotary.tables.values()}) == 1
    )
    # A change in one layer is seen by the next step.
    for chunk in (model, twin := model_of({}, wrap_ddp=False)):
        last = language_model(chunk).decoder.layers[-1].self_attention.rotary_pos_emb
        last.inv_freq_extra = 2 * last.inv_freq_extra
        last.inv_freq_inter = 2 * last.inv_freq_inter
        last.forward.cache_clear() if hasattr(last.forward, "cache_clear") else None
        type(last).forward.cache_clear()
    changed = steps.plain(twin, steps.Contract(), hybrid.items())
    assert hybrid.worst(model, expected()) > 1e-3
    assert hybrid.worst(model, changed) <= EXACT
    assert len({id(t) for t, _ in rotary.tables.values()}) == 2
