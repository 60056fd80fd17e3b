"""Layers on CUDA graphs on a GPU: the same bits as without, also where nothing can be captured."""

import itertools

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.device.tolerance import relative_error, tolerance
from megatron_prefix.features.graphs import layers
from megatron_prefix.features.graphs.part import graphs_of
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model, has_transformer_engine, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.install import installed
from megatron_prefix.run.schedule import PrefixSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("on_one_gpu"),
    pytest.mark.skipif(not has_transformer_engine(), reason="transformer-engine is not installed"),
]
VOCAB, STEPS = 512, 4
CONFIG = dict(kernel="math", min_gain=4, segment_tokens=256, memory="retain", graph_tokens=1024)
WIDTHS = dict(hidden_size=512, ffn_hidden_size=1024, num_attention_heads=4)
EXPERTS = dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256, moe_z_loss_coeff=1e-3)
MODELS = {
    "dense": ("qwen3-8b", {"num_query_groups": 2}),
    "mtp": ("qwen3-8b", {"num_query_groups": 2, "mtp_num_layers": 2}),
    "experts": ("qwen3-30b-a3b", {"num_query_groups": 2, **EXPERTS}),
    "latents": ("moonlight-16b-a3b", {
        "num_query_groups": 4, "moe_layer_freq": (False, True, True), **EXPERTS,
        "moe_shared_expert_intermediate_size": 256}),
    "dense latents": ("moonlight-16b-a3b", {"num_query_groups": 4, "num_moe_experts": None}),
    "windows": ("gpt-oss-20b", {"num_query_groups": 2, "num_moe_experts": None}),
}  # fmt: skip
DELTA = dict(
    num_query_groups=2, linear_attention_freq=2, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
SHARED = dict(EXPERTS, moe_shared_expert_intermediate_size=256)
HYBRID = {
    "gated delta": ("qwen3-next-80b-a3b", {**DELTA, "num_moe_experts": None}),
    "gated delta, experts": ("qwen3-next-80b-a3b", {**DELTA, **SHARED}),
    "scan": ("tiny-nemotron-h", {"hybrid_override_pattern": "M*M-M", "mamba_head_dim": 64,
        "mamba_state_dim": 64, "mamba_num_heads": 16, "mamba_num_groups": 2}),
}  # fmt: skip
KERNELS = {"gated delta": "fla", "gated delta, experts": "fla", "scan": "mamba_ssm"}


def model(name="dense"):
    preset, fields = (MODELS | HYBRID)[name]
    num_layers = len(fields.get("hybrid_override_pattern", "123"))
    spec = resolve(preset, num_layers=num_layers, **WIDTHS | fields).with_vocab(VOCAB)
    return build_model(spec, dtype="bfloat16", device="cuda", layer_spec="te")[0]


def steps(chunk, schedule=None, **options):
    schedule = schedule or PrefixSchedule(PrefixConfig(**CONFIG | options))
    found = []
    for seed in range(STEPS):
        groups = list(generate(2, 200, 50, 4, vocab_size=VOCAB, seed=seed, uneven=True))
        items = align.microbatches(groups, seed)
        found.append(align.run_step(schedule, [chunk], items, optimize=False))
    return found


def without(monkeypatch, name="dense", **options):
    """With the same padding, and nothing captured."""
    with monkeypatch.context() as patch:
        patch.setattr(layers, "SEEN_BEFORE", 10**9)
        return steps(model(name), **options)


def same(ours, others):
    for one, other in zip(ours, others, strict=True):
        for name, gradient in other.gradients.items():
            assert gradient.isfinite().all() and torch.equal(one.gradients[name], gradient), name


@pytest.fixture
def _determined():
    """Experts' outputs are added up in one order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory, False
    )  # fmt: skip
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.use_deterministic_algorithms(False)


CHUNKS = {"chunk_tokens": 64}
OPTIONS = [{}, CHUNKS, {**CHUNKS, "memory": "recompute"}, {**CHUNKS, "memory": "recompute_act"}]
CASES = [*itertools.product(MODELS, OPTIONS), *itertools.product(HYBRID, OPTIONS[:2])]


@pytest.mark.usefixtures("_determined")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_are_bitwise_those_without(name, options, monkeypatch):
    """Of recurrent layers, too, all of which have graphs; a prompt is cut at the rule's chunks."""
    if name in KERNELS:
        pytest.importorskip(KERNELS[name], reason="the recurrent layers' kernels are not installed")
    chunk = model(name)
    same(steps(chunk, **options), without(monkeypatch, name, **options))
    made = graphs_of(chunk)
    assert not made.refused and made.captures > 0
    if name in HYBRID:
        assert len(made.layers) == len(unwrap(chunk).decoder.layers) - ends_early(chunk)


@pytest.mark.parametrize("name", ["dense", "experts", "dense latents", "windows", "gated delta"])
@pytest.mark.parametrize("chunks", [0, 64])
def test_mixers_inside_are_as_outside(chunks, name, monkeypatch):
    """As near as 16 bits are, since flash-attn-4 adds in another order; experts get their tokens by
    nearly equal scores, so of these only what is before them is compared."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    pytest.importorskip(KERNELS.get(name, "torch"), reason="its kernels are not installed")
    options = dict(kernel="fa4", chunk_tokens=chunks)
    limit = tolerance(torch.bfloat16, 4 * 250, width=1024, depth=3)
    chunk = model(name)
    ours, others = steps(chunk, **options), without(monkeypatch, name, **options)
    for step, other in zip(ours, others, strict=True):
        for key, gradient in other.gradients.items():
            if name != "experts" or "layers.0.self_attention" in key:
                assert relative_error(step.gradients[key], gradient) <= limit, key
    forms = [made for one in graphs_of(chunk).sets for made in one.made.values()]
    assert not graphs_of(chunk).refused and forms
    assert any(0 in sides.inside for made in forms for sides in made.values())


def ends_early(chunk):
    """Whether the last layer runs on what is read, without graphs."""
    hooks = installed(chunk)
    return hooks is not None and hooks.keys_only is not None


def test_what_waits_for_the_device_runs_without(monkeypatch):
    chunk = model()
    mlp = unwrap(chunk).decoder.layers[0].mlp

    def waits(*args, **kwargs):
        torch.cuda.synchronize()
        return type(mlp).forward(mlp, *args, **kwargs)

    monkeypatch.setattr(mlp, "forward", waits)
    same(steps(chunk), without(monkeypatch))
    assert graphs_of(chunk).refused
    assert torch.randn(4, device="cuda").isfinite().all()  # torch's generator has recovered
    free = torch.cuda.memory_reserved()
    del chunk
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= free


def test_weights_that_have_moved_are_captured_again(monkeypatch):
    chunk, plain = model(), model()
    ours, others = (PrefixSchedule(PrefixConfig(**CONFIG)) for _ in range(2))
    steps(chunk, ours)
    num = (first := graphs_of(chunk)).captures
    for one in unwrap(chunk).decoder.parameters():
        one.data = one.data.clone()
    with monkeypatch.context() as patch:
        patch.setattr(layers, "SEEN_BEFORE", 10**9)
        expected = [steps(plain, others) for _ in range(2)][1]
    same(steps(chunk, ours), expected)
    assert graphs_of(chunk) is first and first.captures > num
