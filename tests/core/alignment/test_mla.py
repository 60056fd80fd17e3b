"""Multi-latent attention, and sliding windows with sinks, in fp64 against plain autograd."""

import dataclasses
import functools
import re
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.features.windows.windowed import last_positions
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers import table
from megatron_prefix.layers.blocks import core
from megatron_prefix.megatron.install import install, installed, language_model
from megatron_prefix.refusals.table import LEARNED_SINKS_CP, SINKS_CP, WINDOW_CP
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form
from tests.core.alignment.test_hybrid import step
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


EXACT_WINDOWS = hybrid.limit(128, 3)


def window(left, every=2, **more):
    return {"window_size": (left, 0), "window_attn_skip_freq": every, **more}


CONTRACT, ITEMS = steps.Contract(), hybrid.items()


def windows_of(overrides, **options):
    """Equal arguments give equal weights; sinks are not zero."""
    model = small_model(spec={"num_layers": 3}, config_overrides=overrides, **options)
    for number, (name, parameter) in enumerate(unwrap(model).named_parameters()):
        if "softmax_offset" in name:
            draw = torch.Generator().manual_seed(number)
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.parametrize("before", [window(6, None), {}], ids=["another window", "none"])
def test_a_window_that_changes_is_seen(before):
    model = windows_of(before)
    expected = steps.plain(windows_of(before, wrap_ddp=False), CONTRACT, ITEMS)
    assert hybrid.worst(model, expected) <= EXACT_WINDOWS
    unwrap(model).config.window_size = 3, 0
    for layer in unwrap(model).decoder.layers:
        layer.self_attention.core_attention.scale_mask_softmax.window_size = 3, 0
    narrow = steps.plain(windows_of(window(3, None), wrap_ddp=False), CONTRACT, ITEMS)
    assert hybrid.worst(model, narrow) <= EXACT_WINDOWS < hybrid.worst(model, expected)


def test_layers_with_a_window_keep_less():
    held = [hybrid.report_of(windows_of(window(left))).cache_bytes for left in (3, 200)]
    assert held[0] < 0.6 * held[1]  # one layer of three is full


@pytest.mark.parametrize("ends", [(4, 2), (0, 0), (5, -1), (-1, 0)])
def test_other_windows_are_refused(ends):
    model = windows_of({"window_size": ends})
    with pytest.raises(CannotShare, match=re.escape(f"window_size {ends}: give (positions")):
        hybrid.report_of(model)


class Pair(UserList[int]):
    """A sequence that is no list."""


@pytest.mark.parametrize("given", [[5, 0], Pair([5, 0])])
def test_any_pair_is_a_window(given):
    assert hybrid.worst(windows_of(window(0) | {"window_size": given}), five()) <= EXACT_WINDOWS


@functools.cache
def five():
    return steps.plain(windows_of(window(5), wrap_ddp=False), steps.Contract(), hybrid.items())


def test_the_layer_says_what_its_window_is():
    """Whatever the config says later."""
    model = windows_of(window(5))
    for other in ((3, 0), None, 7):
        unwrap(model).config.window_size = other
        assert hybrid.worst(model, five()) <= EXACT_WINDOWS


# Context-parallel ranks: which rows they keep, and what is refused --------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last", [1, 3, 8, 100])
def test_last_rows_are_dealt_once(size, last):
    """Of all last positions each is some rank's, at its place."""
    lengths = [8 * size, 2 * size, 12 * size]
    left = [Form("positions", last).rows(length) for length in lengths]
    whole = np.full(sum(left), -1)
    for rank in range(size):
        held = cp_layout.held_positions(lengths, rank, size)
        mine, places = last_positions(lengths, left, rank, size)
        assert (whole[places] == -1).all()
        whole[places] = held[mine]
    ends = np.cumsum(lengths)
    wanted = [np.arange(end - num, end) for end, num in zip(ends, left, strict=True)]
    assert (whole == np.concatenate(wanted)).all()


@pytest.mark.parametrize(("softmax", "how", "expected"), [
    ("vanilla", None, []), ("learnable", None, []), ("vanilla", "a2a", []),
    ("vanilla", "all_gather", []), ("vanilla", "p2p", [WINDOW_CP]),
    ("vanilla", "a2a+p2p", [WINDOW_CP]), ("off-by-one", "a2a", []),
    ("off-by-one", "all_gather", [SINKS_CP]), ("learnable", "p2p", [SINKS_CP, WINDOW_CP]),
    ("learnable", "a2a", [LEARNED_SINKS_CP]),
])  # fmt: skip
def test_what_the_stock_module_cannot_do_is_refused(softmax, how, expected):
    """The module says how it exchanges keys; Megatron's own one has no context parallelism."""
    model = unwrap(small_model(config_overrides={"window_size": (4, 0), "softmax_type": softmax}))
    part, config = table.payload_parts(model)[0], dataclasses.replace(model.config)
    config.context_parallel_size = 2
    if how is not None:
        part.module.core_attention.cp_comm_type = how
    found = [one.refusal for one in part.kind.option_refusals(part.module, config)]
    assert found == expected
    config.context_parallel_size = 1
    assert not [*part.kind.option_refusals(part.module, config)]
