"""Every feature that the schedule cannot run is refused when it is installed, by name."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, Refusal, UserError
from megatron_prefix.features import replays_routes
from megatron_prefix.features.experts.routers import global_loss_is_whole
from megatron_prefix.features.host.part import offload_refusal
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.model import has_global_loss
from megatron_prefix.megatron import features
from megatron_prefix.megatron.install import install
from megatron_prefix.refusals import table
from megatron_prefix.refusals.table import OPTIONS
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

# Megatron's option: a value that turns it on. With "experts", only where there are some.
VALUES: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "moe_router_padding_for_quantization": True,
    "fp8_output_proj": True,
    "fp4": "e2m1",
    "quant_recipe": "a recipe",
    "mtp_use_repeated_layer": True,
    "mtp_standalone": True,
    "mtp_isolated_loss": True,
    "qk_clip": True,
    "log_max_attention_logit": True,
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "vision_dp_when_cp": True,
    "hybrid_context_parallel": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "fine_grained_activation_offloading": True,
    "cpu_offloading": True,
    "enable_cuda_graph": True,
    "cuda_graph_impl": "local",
    "flash_decode": True,
    "fused_single_qkv_rope": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_dropping": True,
    "moe_input_jitter_eps": 0.01,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.5,
    "moe_enable_routing_replay": True,
    "moe_paged_stash": True,
    "expert_tensor_parallel_size": 2,
}
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
    "fp8_output_proj",
    "mtp_isolated_loss",
    "mtp_use_repeated_layer",
    "moe_expert_rank_capacity_factor",
    "moe_router_force_biased",
    "moe_paged_stash",
    "vision_dp_when_cp",
}
"""Options that megatron-core 0.16.1 does not have yet, or a trainer's config alone."""


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with one_rank():
        yield small_model()


def option(name: str) -> tuple[str, Any, bool]:
    """What to set on the config for a line of the table, and whether it needs experts."""
    if name in SCALES:
        return "fp8_recipe", SCALES[name], False
    if name in BALANCING:
        return "moe_router_load_balancing_type", BALANCING[name], True
    attribute = name.partition(" ")[0]
    return attribute, VALUES[attribute], name.startswith(("moe_", "expert_"))


@pytest.mark.parametrize("name", NAMES)
def test_refused_at_install_with_its_name_and_a_mend(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute, value, experts = option(name)
    config = unwrap(model).config
    before = [vars(module).copy() for module in unwrap(model).modules()]
    if experts:
        monkeypatch.setattr(config, "num_moe_experts", 4)
    if attribute == "fp8_recipe":
        monkeypatch.setattr(config, "fp8", "e4m3")
    if attribute == "mtp_use_repeated_layer":
        monkeypatch.setattr(config, "mtp_num_layers", 2)
    if attribute == "vision_dp_when_cp":
        monkeypatch.setattr(config, "context_parallel_size", 2)
    monkeypatch.setattr(config, attribute, value, raising=False)
    fix = next(one.fix for one in OPTIONS if one.name == name)
    with pytest.raises(UserError) as refused:
        install(model)
    assert str(refused.value) == f"the prefix schedule cannot run this model with {name}: {fix}"
    assert "\n" not in str(refused.value) and len(fix) > 10
    assert [vars(module) for module in unwrap(model).modules()] == before


def test_every_line_names_an_option_of_megatron() -> None:
    """A misspelt name would never be refused."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    named = {option(name)[0] for name in NAMES} - {"position_embedding_type"} - LATER
    assert named <= known


def test_a_plain_model_is_taken(model: Any) -> None:
    assert features.refusals(unwrap(model).config) == []
    features.check(unwrap(model), model)


@pytest.mark.parametrize("name", [name for name in NAMES if option(name)[2]])
def test_options_of_experts_do_no_harm_without_experts(name: str) -> None:
    attribute, value, _ = option(name)
    assert features.refusals(SimpleNamespace(**{attribute: value})) == []


def test_all_refusals_are_found() -> None:
    config = SimpleNamespace(hidden_dropout=0.1, fp8="e4m3", window_size=None)
    found = features.refusals(config)
    assert [one.refusal for one in found] == [table.HIDDEN_DROPOUT, table.FP8_DELAYED]
    assert found[1].text == (
        "fp8_recipe delayed: use blockwise or mxfp8: scaling factors depend on what shares a tensor"
    )


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", Fp8Recipe.blockwise, Fp8Recipe.mxfp8])
def test_scales_of_blocks_are_taken(recipe: str) -> None:
    assert features.refusals(SimpleNamespace(fp8="hybrid", fp8_recipe=recipe)) == []
    assert features.refusals(SimpleNamespace(fp8=None, fp8_recipe="delayed")) == []


def test_the_host_takes_no_quantised_weights(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offload_refusal(model) is None
    monkeypatch.setattr(unwrap(model).config, "fp8", "e4m3")
    found = offload_refusal(model)
    assert found is not None and found.refusal is table.OFFLOAD_FP8


def test_weights_are_quantised_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformer-engine's modules, which quantise a weight unless they have it kept."""
    model = small_model()
    monkeypatch.setattr("megatron_prefix.megatron.install.is_fp8", lambda _: True)
    kept = {"weight": "of an earlier step"}
    linear = unwrap(model).decoder.layers[0].mlp.linear_fc1
    linear._fp8_workspaces, linear.is_first_microbatch = kept, True
    quantised: list[str] = []

    def quantise(*_: Any) -> None:
        assert not linear.is_first_microbatch
        quantised.extend({"weight"} - {*kept})
        kept["weight"] = "of this one"

    linear.register_forward_pre_hook(quantise)
    schedule = PrefixSchedule(PrefixConfig(mode="on", min_gain=0))
    for number in (1, 2):
        linear.is_first_microbatch = True
        steps.call(schedule, Contract().step, model, steps.group(0, 2))
        assert quantised == ["weight"] * number and kept["weight"] == "of this one"


@pytest.mark.parametrize("share", ["on", "auto"])
def test_the_schedule_refuses_or_falls_back(
    share: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwrap(model).config, "attention_dropout", 0.1)
    schedule = PrefixSchedule(PrefixConfig(mode=share, min_speedup=0.01))
    if share == "on":
        with pytest.raises(UserError, match="attention_dropout: set it to 0"):
            steps.call(schedule, Contract().step, model, steps.group(0, 2))
        return
    steps.call(schedule, Contract().step, model, steps.group(0, 2))  # by the stock schedule
    assert schedule.report is not None and schedule.report.fallback_count == 1
    assert "attention_dropout: set it to 0" in schedule.report.decision.reason


def test_options_are_looked_at_in_every_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()  # in the world of the other
    schedule = PrefixSchedule(PrefixConfig(mode="on"))
    steps.call(schedule, Contract().step, model, steps.group(0, 2))
    monkeypatch.setattr(unwrap(model).config, "fp8", "hybrid")
    with pytest.raises(UserError, match="with fp8_recipe delayed: use blockwise"):
        steps.call(schedule, Contract().step, model, steps.group(0, 2))


@pytest.mark.parametrize("refusal", features.OTHER_STEPS, ids=lambda one: one.name)
def test_steps_with_other_arguments_are_never_called(
    refusal: Refusal, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwrap(model).config, refusal.name, 1)
    calls: list[Any] = []
    with pytest.raises(CannotShare, match=f"^{refusal.name}: ") as caught:
        steps.call(PrefixSchedule(PrefixConfig(mode="on")), calls.append, model, steps.group(0, 2))
    assert caught.value.refusal is refusal and not calls


def test_a_layer_without_core_attention_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = unwrap(model).decoder.layers[1]._modules  # pytest does not put a module back
    monkeypatch.setitem(children, "self_attention", nn.Identity())
    with pytest.raises(UserError, match="layer 1's mixer Identity: use Megatron's own attention"):
        install(model)


class Capped(DotProductAttention):
    """Caps scores, as Gemma's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).tanh()


class TwoBases(RotaryEmbedding):
    """Rotary positions otherwise than Megatron's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


class OwnPositions(SelfAttention):
    """Rotates queries and keys itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ("rotary_pos_emb", "__class__", TwoBases, "rotary embedding TwoBases: use Megatron's"),
        ("decoder.layers.1.self_attention", "__class__", OwnPositions,
         "layer 1's attention OwnPositions, which has"),
        ("decoder.layers.1.self_attention.core_attention", "__class__", Capped, "attention Capped"),
        ("decoder.layers.0.self_attention", "attn_mask_type", AttnMaskType.no_mask, "type no_mask"),
        ("decoder.layers.0.self_attention.core_attention", "attn_mask_type", AttnMaskType.padding,
         "layer 0's attn_mask_type padding: use causal attention"),
    ],
)  # fmt: skip
def test_modules_that_segments_would_leave_out_are_refused(
    place: str, name: str, value: Any, message: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = unwrap(model).get_submodule(place)
    monkeypatch.setattr(module, name, value, raising=False)
    with pytest.raises(UserError, match=message):
        install(model)


def test_a_second_table_of_rotary_positions_is_an_error(model: Any) -> None:
    def two(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "rotary_pos_emb": (kwargs["rotary_pos_emb"],) * 2}

    model = small_model()  # in the world of the other
    unwrap(model).decoder.register_forward_pre_hook(two, with_kwargs=True)
    schedule = PrefixSchedule(PrefixConfig(mode="on"))
    with pytest.raises(UserError, match="gives its layers rotary_pos_emb tuple, and its"):
        steps.call(schedule, Contract().step, model, steps.group(0, 2))


@pytest.mark.parametrize("masked", [True, False])
def test_with_any_masks_allowed_calls_need_a_causal_one(masked: bool, model: Any) -> None:
    """ModelOpt's layers, as Megatron-Bridge builds them."""

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        batch, mask = next(data_iterator), None
        if masked:
            mask = torch.ones(2 * batch["tokens"].shape[-1:], dtype=torch.bool).triu(1)[None, None]
        output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        return output, Contract().loss_func(batch)

    model = small_model()  # in the world of the other
    attention = unwrap(model).decoder.layers[1].self_attention
    attention.attn_mask_type = AttnMaskType.arbitrary
    schedule = PrefixSchedule(PrefixConfig(mode="on"))
    if masked:
        steps.call(schedule, step, model, steps.group(0, 2))
        assert schedule.report is not None and schedule.report.fallback_count == 0
        return
    with pytest.raises(UserError, match="has no attention_mask, and the layers' attn_mask_type"):
        steps.call(schedule, step, model, steps.group(0, 2))


def test_dropout_of_an_adapter_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    children = unwrap(model).decoder.layers[1].mlp._modules
    monkeypatch.setitem(children, "adapter", nn.Dropout(0.1))
    with pytest.raises(UserError, match=r"dropout of 0\.1 in .*\.1\.mlp\.adapter: set it to 0"):
        install(model)
    monkeypatch.setitem(children, "adapter", nn.Dropout(0.0))
    features.check(unwrap(model), model)


def test_options_of_one_layer_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = unwrap(model).decoder.layers[1].self_attention.core_attention
    own = copy.copy(core.config)
    own.qk_clip = True
    monkeypatch.setattr(core, "config", own)
    with pytest.raises(UserError, match="with qk_clip: use the stock schedule"):
        install(model)


def test_a_model_without_a_decoder_is_no_language_model() -> None:
    with pytest.raises(CannotShare, match="no language models"):
        install(nn.Linear(2, 2))


class TorchFullyShardedDataParallel(nn.Module):
    """Named as Megatron's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_torchs_own_ddp_is_refused(model: Any) -> None:
    with pytest.raises(CannotShare, match="torch's own DistributedDataParallel: use Megatron's"):
        install(nn.parallel.DistributedDataParallel(unwrap(model)))


def test_fully_sharded_parameters_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="by TorchFullyShardedDataParallel: use Distributed"):
        install(TorchFullyShardedDataParallel(unwrap(model)))
    monkeypatch.setattr(model.ddp_config, "use_megatron_fsdp", True)
    with pytest.raises(UserError, match="sharded by DistributedDataParallel: use Distributed"):
        install(model)


def test_weight_gradients_delayed_by_ddp_are_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.ddp_config, "delay_wgrad_compute", True)
    with pytest.raises(UserError, match="delay_wgrad_compute of DDP: turn it off"):
        install(model)


# --- Versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.15.0", "0.15.3", "0.16.0", "0.16.0rc1", "0.9"])
def test_an_old_megatron_is_refused(version: str) -> None:
    with pytest.raises(UserError, match=rf"megatron-core {version} is too old: install 0.16.1"):
        features.check_version(version)


@pytest.mark.parametrize(
    "version",
    ["0.16.1", "0.16.1rc0", "0.17.1", "0.18.1", "0.19.0", "0.19.2", "0.19.2+dc4f901"],
)
def test_versions_that_were_read_are_taken_quietly(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    features.check_version(version)
    assert not caplog.records


def test_the_version_that_slime_brings_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        features.check_version("0.16.0rc0")
    (record,) = caplog.records
    assert "only commit 1dcf0dafa of this version was tested" in record.getMessage()


@pytest.mark.parametrize("version", ["0.19.3", "0.20.0", "0.20.0rc1", "1.0.0"])
def test_a_newer_megatron_is_taken_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        features.check_version(version)
    (record,) = caplog.records
    expected = f"megatron-core {version} is newer than 0.19.2, the newest version tested"
    assert record.getMessage() == expected and record.levelno == logging.WARNING


def test_the_version_is_checked_at_install(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features.megatron.core, "__version__", "0.15.3")
    with pytest.raises(UserError, match=r"0\.15\.3 is too old"):
        install(model)


def test_the_global_loss_is_told_from_other_losses() -> None:
    def config(kinds, coefficients, experts=4):
        return SimpleNamespace(
            num_moe_experts=experts, moe_router_load_balancing_type=kinds,
            moe_aux_loss_coeff=coefficients,
        )  # fmt: skip

    assert has_global_loss(config("global_aux_loss", 0.1))
    assert has_global_loss(config(["aux_loss", "global_aux_loss"], [0.0, 0.1]))
    assert not has_global_loss(config(["aux_loss", "global_aux_loss"], [0.1, 0.0]))
    assert not has_global_loss(config("aux_loss", 0.1))
    assert not has_global_loss(config("global_aux_loss", 0.1, experts=None))
    assert not has_global_loss(SimpleNamespace())


def test_the_global_losses_log_is_never_averaged_over_ranks() -> None:
    def router(attach):
        return SimpleNamespace(attach_and_log_load_balancing_loss=attach)

    def before(activation, reduce_group_has_dp=False): ...

    def since(activation, needs_dp_avg=True): ...

    assert global_loss_is_whole(router(before)) == {"reduce_group_has_dp": True}
    assert global_loss_is_whole(router(since)) == {"needs_dp_avg": False}


def test_routes_are_followed_where_a_config_says_so() -> None:
    assert replays_routes(SimpleNamespace(moe_enable_routing_replay=True))
    assert replays_routes(SimpleNamespace(enable_routing_replay=True))
    assert not replays_routes(SimpleNamespace(moe_enable_routing_replay=False))


@pytest.mark.parametrize(("ranks", "marks", "refused"), [
    (2, "weight", True), (2, "weight bias", False), (2, "", False), (1, "weight", False),
])  # fmt: skip
def test_a_heads_bias_is_marked_as_its_weight_is(ranks: int, marks: str, refused: bool) -> None:
    """miles' critic leaves its bias out, and every rank the gradient of its own positions."""
    head = nn.Linear(4, 1)
    for name in marks.split():
        getattr(head, name).sequence_parallel = True
    config = SimpleNamespace(tensor_model_parallel_size=ranks)
    found = [*features.head_refusals(SimpleNamespace(output_layer=head, config=config))]
    assert found == [table.UNMARKED_BIAS.given("Linear")] * refused
