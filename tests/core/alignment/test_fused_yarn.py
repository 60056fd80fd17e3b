"""YaRN's scale of queries and keys with apply_rope_fusion, as this release has it."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.rl import packing
from megatron_prefix.layers import fused_yarn, table
from megatron_prefix.refusals.table import FUSED_YARN
from tests.harness import hybrid, steps
from tests.harness.one_rank import small_model
from tests.harness.own_delta import Packed

pytestmark = pytest.mark.usefixtures("on_one_rank")

EXACT = hybrid.limit(128, 3)
ITEMS = hybrid.items()
PACKS = [packing.pack(ITEMS[at : at + 4]) for at in range(0, len(ITEMS), 4)]
FORMS: dict[str, tuple[steps.Contract, list[Any]]] = {
    "rows": (steps.Contract(), ITEMS), "packs": (Packed(), PACKS)
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """transformer-engine's take no scale."""

    def of_rows(t, freqs, interleaved=False):
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

    def of_packs(t, cu_seqlens, freqs, cp_size, cp_rank):
        sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = [of_rows(one[:, None], freqs[: len(one)])[:, 0] for one in t.split(sizes)]
        return torch.cat(parts)

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", of_rows)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", of_packs)


def model_of(fused=True, **options):
    model = small_model("tiny-gpt-oss", spec={"num_moe_experts": None}, **options)
    unwrap(model).config.apply_rope_fusion = fused
    return model


def worst(form, expected):
    contract, data = FORMS[form]
    model = model_of()
    ours = PrefixSchedule(PrefixConfig(min_gain=0, kernel="math", chunk_tokens=7))
    found = steps.run(ours, contract.step, model, data).gradients
    forest = ours.report.forest
    assert forest.executed_tokens < forest.raw_tokens
    return max(
        float((found[name] - one).abs().max()) / expected.terms[name]
        for name, one in expected.gradients.items()
    )


@pytest.mark.filterwarnings("ignore:mscale")
@pytest.mark.parametrize("form", FORMS)
def test_segments_are_scaled_as_the_calls_are(form):
    contract, data = FORMS[form]
    expected = steps.plain(model_of(wrap_ddp=False), contract, data)
    assert worst(form, expected) <= EXACT
    plain = steps.plain(model_of(fused=False, wrap_ddp=False), contract, data)
    differs = form == "packs" and not fused_yarn.packs_are_scaled()
    assert (worst(form, plain) > EXACT) == differs


@pytest.mark.filterwarnings("ignore:mscale")
@pytest.mark.skipif(fused_yarn.packs_are_scaled(), reason="this release scales packs")
def test_packs_and_rows_in_one_step_are_refused():
    model, ours = model_of(), PrefixSchedule(PrefixConfig(min_gain=0, kernel="math"))
    number = iter(range(2))

    def step(iterator, model):
        return (Packed() if next(number) else steps.Contract()).step(iterator, model)

    with pytest.raises(CannotShare) as caught:
        steps.call(ours, step, model, [ITEMS[0], PACKS[1]])
    assert caught.value.refusal is FUSED_YARN


@pytest.mark.skipif(fused_yarn.packs_are_scaled(), reason="this release scales packs")
def test_an_attention_of_another_forward_is_refused(monkeypatch):
    model = unwrap(model_of())
    part = table.payload_parts(model)[0]
    assert not [*part.kind.option_refusals(part.module, model.config)]
    monkeypatch.setattr(fused_yarn, "is_known", lambda module: False)
    (found,) = part.kind.option_refusals(part.module, model.config)
    assert found.refusal is FUSED_YARN
    model.config.apply_rope_fusion = False
    assert not [*part.kind.option_refusals(part.module, model.config)]
