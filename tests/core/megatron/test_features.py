"""Every feature that the schedule cannot run is refused when it is installed, by name."""

import copy
import dataclasses
import inspect
from types import SimpleNamespace

import pytest
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_prefix import PrefixConfig, PrefixSchedule, trainers
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.features.host.part import offload_refusal
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron import features
from megatron_prefix.megatron.install import install, intercepted
from megatron_prefix.refusals import table
from megatron_prefix.refusals.table import OPTIONS
from megatron_prefix.trainers.table import VERL
from tests.harness import steps
from tests.harness.one_rank import small_model

# Megatron's option: a value that turns it on. With "experts", only where there are some.
VALUES = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True, "moe_router_padding_for_quantization": True,
    "batch_invariant_mode": True,
    "fp8_output_proj": True, "fp4": "e2m1", "quant_recipe": "a recipe",
    "mtp_use_repeated_layer": True, "mtp_hsm": True, "mtp_standalone": True,
    "mtp_isolated_loss": True,
    "qk_clip": True, "log_max_attention_logit": True, "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True, "vision_dp_when_cp": True, "hybrid_context_parallel": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "fine_grained_activation_offloading": True, "cpu_offloading": True, "enable_cuda_graph": True,
    "cuda_graph_impl": "local", "flash_decode": True, "fused_single_qkv_rope": True,
    "moe_expert_capacity_factor": 1.0, "moe_expert_rank_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True, "moe_token_dropping": True,
    "moe_input_jitter_eps": 0.01, "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.5, "moe_enable_routing_replay": True, "moe_paged_stash": True,
    "expert_tensor_parallel_size": 2,
}  # fmt: skip
BALANCING = {
    "moe_router_load_balancing_type sinkhorn": "sinkhorn",
    "moe_router_load_balancing_type quantile_balancing": "quantile_balancing",
    "moe_router_load_balancing_type global_aux_loss": ["aux_loss", "global_aux_loss"],
    "moe_router_load_balancing_type of another name": "something_new",
}
SCALES = {
    "fp8_recipe delayed": "delayed",
    "fp8_recipe tensorwise": "tensorwise",
    "fp8_recipe of another name": "custom",
}
"""Refused if `fp8` is on."""
NAMES = [one.name for one in OPTIONS]
LATER = {
    "fp8_output_proj", "mtp_isolated_loss", "mtp_use_repeated_layer", "mtp_hsm",
    "moe_expert_rank_capacity_factor", "moe_router_force_biased", "moe_paged_stash",
    "vision_dp_when_cp",
}  # fmt: skip
"""Options that megatron-core 0.16.1 does not have yet, or a trainer's config alone."""


@pytest.fixture(scope="module")
def model(on_one_rank):
    return small_model()


def option(name):
    """What to set on the config for a line of the table, and whether it needs experts."""
    if name in SCALES:
        return "fp8_recipe", SCALES[name], False
    if name in BALANCING:
        return "moe_router_load_balancing_type", BALANCING[name], True
    attribute = name.partition(" ")[0]
    return attribute, VALUES[attribute], name.startswith(("moe_", "expert_"))


@pytest.mark.parametrize("name", NAMES)
def test_refused_at_install_with_its_name_and_a_mend(name, model, monkeypatch):
    attribute, value, experts = option(name)
    config = unwrap(model).config
    before = [vars(module).copy() for module in unwrap(model).modules()]
    if experts:
        monkeypatch.setattr(config, "num_moe_experts", 4)
    if attribute == "fp8_recipe":
        monkeypatch.setattr(config, "fp8", "e4m3")
    if attribute == "mtp_use_repeated_layer":
        monkeypatch.setattr(config, "mtp_num_layers", 2)
        monkeypatch.setattr(config, "num_moe_experts", 4)
        monkeypatch.setattr(config, "moe_router_load_balancing_type", "global_aux_loss")
    if attribute == "vision_dp_when_cp":
        monkeypatch.setattr(config, "context_parallel_size", 2)
    monkeypatch.setattr(config, attribute, value, raising=False)
    fix = next(one.fix for one in OPTIONS if one.name == name)
    with pytest.raises(UserError) as refused:
        install(model)
    assert str(refused.value) == f"the prefix schedule cannot run this model with {name}: {fix}"
    assert "\n" not in str(refused.value) and len(fix) > 10
    assert [vars(module) for module in unwrap(model).modules()] == before


def test_every_line_names_an_option_of_megatron():
    """A misspelt name would never be refused."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    named = {option(name)[0] for name in NAMES} - {"position_embedding_type"} - LATER
    assert named <= known


def test_the_host_takes_no_quantised_weights(model, monkeypatch):
    assert offload_refusal(model) is None
    monkeypatch.setattr(unwrap(model).config, "fp8", "e4m3")
    found = offload_refusal(model)
    assert found is not None and found.refusal is table.OFFLOAD_FP8


def test_weights_are_quantised_once_a_step(monkeypatch):
    """As transformer-engine's modules, which quantise a weight unless they have it kept."""
    model = small_model()
    monkeypatch.setattr("megatron_prefix.megatron.install.is_fp8", lambda _: True)
    kept = {"weight": "of an earlier step"}
    linear = unwrap(model).decoder.layers[0].mlp.linear_fc1
    linear._fp8_workspaces, linear.is_first_microbatch = kept, True
    quantised = []

    def quantise(*_):
        assert not linear.is_first_microbatch
        quantised.extend({"weight"} - {*kept})
        kept["weight"] = "of this one"

    linear.register_forward_pre_hook(quantise)
    schedule = PrefixSchedule(PrefixConfig(mode="on", min_gain=0))
    for number in (1, 2):
        linear.is_first_microbatch = True
        steps.call(schedule, steps.Contract().step, model, steps.group(0, 2))
        assert quantised == ["weight"] * number and kept["weight"] == "of this one"


def test_options_are_looked_at_in_every_step(model, monkeypatch):
    model = small_model()  # in the world of the other
    schedule = PrefixSchedule(PrefixConfig(mode="on"))
    steps.call(schedule, steps.Contract().step, model, steps.group(0, 2))
    monkeypatch.setattr(unwrap(model).config, "fp8", "hybrid")
    with pytest.raises(UserError, match="with fp8_recipe delayed: use blockwise"):
        steps.call(schedule, steps.Contract().step, model, steps.group(0, 2))


@pytest.mark.parametrize("refusal", features.OTHER_STEPS, ids=lambda one: one.name)
def test_steps_with_other_arguments_are_never_called(refusal, model, monkeypatch):
    monkeypatch.setattr(unwrap(model).config, refusal.name, 1)
    calls = []
    with pytest.raises(CannotShare, match=f"^{refusal.name}: ") as caught:
        steps.call(PrefixSchedule(PrefixConfig(mode="on")), calls.append, model, steps.group(0, 2))
    assert caught.value.refusal is refusal and not calls


class Capped(DotProductAttention):
    """Caps scores, as Gemma's."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).tanh()


class TwoBases(RotaryEmbedding):
    """Rotary positions otherwise than Megatron's."""

    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class OwnPositions(SelfAttention):
    """Rotates queries and keys itself."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(("place", "name", "value", "message"), [
    ("rotary_pos_emb", "__class__", TwoBases, "rotary embedding TwoBases: use Megatron's"),
    ("decoder.layers.1.self_attention", "__class__", OwnPositions,
     "layer 1's attention OwnPositions, which has"),
    ("decoder.layers.1.self_attention.core_attention", "__class__", Capped, "attention Capped"),
    ("decoder.layers.0.self_attention", "attn_mask_type", AttnMaskType.no_mask, "type no_mask"),
    ("decoder.layers.0.self_attention.core_attention", "attn_mask_type", AttnMaskType.padding,
     "layer 0's attn_mask_type padding: use causal attention"),
])  # fmt: skip
def test_modules_that_segments_would_leave_out_are_refused(
    place, name, value, message, model, monkeypatch
):
    module = unwrap(model).get_submodule(place)
    monkeypatch.setattr(module, name, value, raising=False)
    with pytest.raises(UserError, match=message):
        install(model)


def test_a_second_table_of_rotary_positions_is_an_error(model):
    def two(_, args, kwargs):
        return args, {**kwargs, "rotary_pos_emb": (kwargs["rotary_pos_emb"],) * 2}

    model = small_model()  # in the world of the other
    unwrap(model).decoder.register_forward_pre_hook(two, with_kwargs=True)
    schedule = PrefixSchedule(PrefixConfig(mode="on"))
    with pytest.raises(UserError, match="gives its layers rotary_pos_emb tuple, and its"):
        steps.call(schedule, steps.Contract().step, model, steps.group(0, 2))


def test_dropout_of_an_adapter_is_refused(model, monkeypatch):
    children = unwrap(model).decoder.layers[1].mlp._modules
    monkeypatch.setitem(children, "adapter", nn.Dropout(0.1))
    with pytest.raises(UserError, match=r"dropout of 0\.1 in .*\.1\.mlp\.adapter: set it to 0"):
        install(model)
    monkeypatch.setitem(children, "adapter", nn.Dropout(0.0))
    features.check(unwrap(model), model)


def test_options_of_one_layer_are_refused(model, monkeypatch):
    core = unwrap(model).decoder.layers[1].self_attention.core_attention
    own = copy.copy(core.config)
    own.qk_clip = True
    monkeypatch.setattr(core, "config", own)
    with pytest.raises(UserError, match="with qk_clip: use the stock schedule"):
        install(model)


def test_a_model_without_a_decoder_is_no_language_model():
    with pytest.raises(CannotShare, match="no language models"):
        install(nn.Linear(2, 2))


class TorchFullyShardedDataParallel(nn.Module):
    """Named as Megatron's."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_torchs_own_ddp_is_refused(model):
    with pytest.raises(CannotShare, match="torch's own DistributedDataParallel: use Megatron's"):
        install(nn.parallel.DistributedDataParallel(unwrap(model)))


def test_fully_sharded_parameters_are_refused(model, monkeypatch):
    with pytest.raises(UserError, match="by TorchFullyShardedDataParallel: use Distributed"):
        install(TorchFullyShardedDataParallel(unwrap(model)))
    monkeypatch.setattr(model.ddp_config, "use_megatron_fsdp", True)
    with pytest.raises(UserError, match="sharded by DistributedDataParallel: use Distributed"):
        install(model)


@pytest.mark.parametrize("version", ["0.15.0", "0.15.3", "0.16.0", "0.16.0rc1", "0.9"])
def test_an_old_megatron_is_refused_and_slimes_is_taken(version):
    [*map(features.check_version, ("0.16.0rc0", "0.16.0rc0+1dcf0d", "0.19.3", "1.0.0"))]
    with pytest.raises(UserError, match=rf"megatron-core {version} is too old: install 0.16.1"):
        features.check_version(version)


def test_a_model_is_checked_with_a_line_about_versions(model, monkeypatch):
    monkeypatch.setattr(trainers, "running_trainer", lambda: VERL)
    monkeypatch.setattr(features.versions, "warn_untested", said := [].append)
    features.check(unwrap(model), model)
    assert said.__self__ == [VERL]


def test_a_forward_in_anothers_place_keeps_its_signature(model):
    """SkyRL looks there for `output_processor`."""
    with intercepted(model, lambda _, stock: lambda *args, **kwargs: stock(*args, **kwargs)):
        assert "attention_mask" in inspect.signature(unwrap(model).forward).parameters


@pytest.mark.parametrize(("ranks", "marks", "refused"), [
    (2, "weight", True), (2, "weight bias", False), (2, "", False), (1, "weight", False),
])  # fmt: skip
def test_a_heads_bias_is_marked_as_its_weight_is(ranks, marks, refused):
    """miles' critic leaves its bias out, and every rank the gradient of its own positions."""
    head = nn.Linear(4, 1)
    for name in marks.split():
        getattr(head, name).sequence_parallel = True
    config = SimpleNamespace(tensor_model_parallel_size=ranks)
    found = [*features.head_refusals(SimpleNamespace(output_layer=head, config=config))]
    assert found == [table.UNMARKED_BIAS.given("Linear")] * refused
