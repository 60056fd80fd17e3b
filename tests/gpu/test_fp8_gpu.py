"""FP8 with blockwise scales on a GPU of Hopper's: transformer-engine's own arithmetic."""

from collections import Counter

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.layers import precision
from megatron_prefix.run.schedule import PrefixSchedule

pytestmark = pytest.mark.gpu
ONE, VOCAB = Layout(), 512
CONFIG = PrefixConfig(mode="on", min_gain=0)
SHAPE = {
    "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 64, "fp8": "e4m3", "fp8_recipe": "blockwise",
}  # fmt: skip
OPTIONS = ModelOptions(
    "tiny-llama", dtype="bfloat16", device="cuda", layer_spec="te", overrides=tuple(SHAPE.items())
)


@pytest.fixture(autouse=True)
def _scales(on_one_gpu):
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.quantization import check_fp8_block_scaling_support

    works, why = check_fp8_block_scaling_support()
    if not works:
        pytest.skip(why)


def model():
    return OPTIONS.build(OPTIONS.spec().with_vocab(VOCAB), ONE)


def items(seed=0):
    groups = GroupShape(500, 99, 4).groups(1, VOCAB, seed)
    multiple = alignment(OPTIONS.spec(), ONE)
    return align.made(groups, Baseline("packed", pack_tokens=2048), multiple, 1, seed)


def test_a_row_is_quantised_by_itself():
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import Float8BlockQuantizer

    quantise = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    )
    sizes = torch.logspace(-3, 3, 256, device="cuda").unsqueeze(1)
    x = (torch.randn(256, 512, device="cuda") * sizes).bfloat16()
    whole, part = quantise(x), quantise(x[48:112].contiguous())
    assert torch.equal(whole._rowwise_data[48:112], part._rowwise_data)
    assert torch.equal(whole._rowwise_scale_inv[:, 48:112], part._rowwise_scale_inv[:, :64])


def test_both_schedules_are_as_near_fp32():
    """Groups whose advantages sum to zero; log-probs, too."""
    spec, chunks = OPTIONS.spec().with_vocab(VOCAB), model()
    verdict = align.align(
        chunks, GroupShape(500, 99, 4).groups(1, VOCAB, 1), CONFIG,
        multiple=alignment(spec, ONE), reference=OPTIONS.reference(spec, ONE, chunks),
        baseline=Baseline("packed", pack_tokens=2048),
    )  # fmt: skip
    assert verdict.passed, verdict.failures
    assert verdict.executed_tokens < 0.6 * verdict.raw_tokens
    print(verdict.grad_error_ratio_p50, verdict.grad_error_ratio_max, verdict.logprob_max_abs_diff)


def test_weights_are_quantised_once_a_step(monkeypatch):
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    if not hasattr(Base, "get_weight_workspace"):
        pytest.skip("another transformer-engine")
    stock, made = Base.get_weight_workspace, Counter[int]()

    def counted(self, **given):
        before = self._fp8_workspaces.get(given["cache_name"])
        found = stock(self, **given)
        made[id(self)] += found is not before or given["update_workspace"]
        return found

    monkeypatch.setattr(Base, "get_weight_workspace", counted)
    chunks, ours = model(), PrefixSchedule(CONFIG)
    for steps in (1, 2):
        align.run_step(ours, chunks, items(), optimize=False)
        assert len(made) == 2 * 4 and {*made.values()} == {steps}


@pytest.mark.parametrize("name", ["segment_multiple", "row_multiple"])
def test_transformer_engine_takes_no_other_rows(name, monkeypatch):
    """Of segments, and of what their last layer reads."""
    chunks, given, ours = model(), items(), PrefixSchedule(CONFIG)
    for one in ("segment_multiple", "row_multiple"):
        monkeypatch.setattr(precision, one, lambda *_, number=1 if one == name else 16: number)
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=r"divisible|must pad"):
        align.run_step(ours, chunks, given, optimize=False)


def test_other_scales_are_refused(monkeypatch):
    chunks = model()
    monkeypatch.setattr(unwrap(chunks[0]).config, "fp8_recipe", "delayed")
    with pytest.raises(CannotShare, match="fp8_recipe delayed: use blockwise"):
        align.run_step(PrefixSchedule(CONFIG), chunks, items(), optimize=False)
