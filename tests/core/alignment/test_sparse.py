"""DeepSeek's sparse attention under the prefix schedule in fp64, against plain autograd and the
stock schedule; what of its indexer's loss is refused."""

from types import SimpleNamespace as Namespace

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.context_parallel.slices import check_slices
from megatron_prefix.features.dsa import loss, visible
from megatron_prefix.features.dsa.chosen import Index, choose
from megatron_prefix.features.dsa.kind import DSA
from megatron_prefix.features.dsa.sparse import Sparse
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.features.own_dsa.kind import FollowingDSA, OwnDSA
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers import table
from megatron_prefix.megatron.install import install, language_model
from megatron_prefix.tree.cp_layout import Slices
from tests.core.alignment import test_hybrid as hybrid_cases
from tests.harness import hybrid, sparse, steps
from tests.harness.hybrid import worst
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.sparse import model_of

EXACT = hybrid.limit(128, 2)


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank(), sparse.rotating():
        yield


@pytest.mark.parametrize("most", [1, 500])
def test_some_queries_at_a_time(most, monkeypatch):
    monkeypatch.setattr(visible, "MAX_SCORES", most)
    expected = steps.plain(model_of({}, wrap_ddp=False), steps.Contract(), hybrid.items())
    for options in ({}, {"chunk_tokens": 7}, {"memory": "offload"}):
        assert worst(model_of({}), expected, **options) <= EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_chosen_by_scores_in_fp32(dtype):
    """Of keys in half precision: rounded once more, many scores are equal."""
    draw = torch.Generator().manual_seed(3)
    shapes = (40, 4, 32), (200, 32), (40, 4)
    index = Index(*(torch.randn(shape, generator=draw).to(dtype) for shape in shapes))
    chosen, tied = choose(index, 20)
    expected, _ = choose(Index(*(one.float() for one in index)), 20)
    assert torch.equal(chosen.sort().values, expected.sort().values) and not tied.any()


@pytest.mark.parametrize(("heads", "is_tied"), [(1, True), (16, False)])
def test_ties_are_told(heads, is_tied, monkeypatch, caplog):
    """Half of one head's scores are zero; which of these stock takes, no copy of a prompt can know.
    Nothing is shared, nothing differs: then rows are as long as stock's."""
    monkeypatch.setattr(Sparse, "has_warned", False)
    fields = {"dsa_indexer_n_heads": heads}
    expected = steps.plain(model_of(fields, wrap_ddp=False), steps.Contract(), hybrid.items())
    assert worst(model_of(fields), expected, min_gain=10**6) <= EXACT
    monkeypatch.setattr(Sparse, "has_warned", False)
    caplog.clear()
    assert (worst(model_of(fields), expected) <= EXACT) != is_tied
    told = [one.getMessage() for one in caplog.records if "keys tie at the end" in one.message]
    assert len(told) == is_tied


def test_a_frozen_indexer_has_no_gradient():
    twin, model = (model_of({}, wrap_ddp=False) for _ in "ab")
    for name, parameter in (*twin.named_parameters(), *model.named_parameters()):
        parameter.requires_grad_(".indexer." not in name)
    expected = steps.plain(twin, steps.Contract(), hybrid.items())
    assert worst(model, expected, chunk_tokens=7) <= EXACT
    assert all(one.grad is None for name, one in model.named_parameters() if ".indexer." in name)


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_an_indexer_that_is_trained_gets_zeros(coefficient):
    """Not nothing: whoever reduces gradients when they come waits for each of them. A loss is of
    training mode alone."""
    model = model_of({"dsa_indexer_loss_coeff": coefficient}, wrap_ddp=False).eval()
    steps.call(schedule_with(chunk_tokens=7), steps.Contract().step, model, hybrid.items())
    own = {name: one.grad for name, one in model.named_parameters() if ".indexer." in name}
    assert own and all(one is not None and not one.any() for one in own.values())


def test_an_indexer_and_its_loss_may_change_between_steps():
    """That of DeepSeek-V3.2 was warmed up by the dense loss."""
    step, found = steps.Contract().step, []
    for schedule in (forward_backward_no_pipelining, schedule_with(chunk_tokens=7)):
        model = model_of({"dsa_indexer_loss_coeff": 0.5}, wrap_ddp=False)
        steps.run(schedule, step, model, hybrid.items())
        for layer in language_model(model).decoder.layers:
            core = layer.self_attention.core_attention
            core.config.dsa_indexer_use_sparse_loss, core.softmax_scale = True, 0.3
            core.index_topk = core.indexer.index_topk = 3
        found.append(steps.run(schedule, step, model, hybrid.items())[1])
    assert max(float((found[1][n] - x).abs().max()) for n, x in found[0].items()) <= EXACT


def test_what_of_an_indexers_loss_is_refused(monkeypatch):
    monkeypatch.setattr(loss, "is_since", lambda _: True)
    model = language_model(model_of({}, wrap_ddp=False))
    model.decoder.layers[-1].self_attention.core_attention.indexer.linear_wk.requires_grad_(False)
    facts = {"model": Namespace(looks_ahead=1), "scale_functions": [print]}
    part = loss.IndexerLoss(None, Namespace(language_models=[model], **facts), None)
    names = ("multi-token prediction", "a grad_scale_func of the trainer's own", "frozen weights")
    for name, reason in zip(names, part.refusals(), strict=True):
        assert f"with {name}" in reason.text
    pack = {"packed_seq_params": Namespace(real_token_mask_q=torch.ones(1))}
    with pytest.raises(CannotShare, match="real_token_mask_q of a pack"):
        part.read(Namespace(calls=lambda _: [{"packed_seq_params": None}, pack]))


def test_work_and_weights_are_those_of_the_modules():
    config = Namespace(**vars(resolve("tiny-deepseek", **sparse.DENSE)) | sparse.DSA)
    assert DSA().work(config).pairs == MLA().work(config).pairs + 16 * 16
    for layer in language_model(model_of({}, wrap_ddp=False)).decoder.layers:
        named = layer.self_attention.named_parameters()
        weights = sum(one.numel() for name, one in named if "norm" not in name)
        assert DSA().parameters(config) == weights


def test_recomputed_attention_is_refused():
    fields = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    with pytest.raises(CannotShare, match="DSA with core_attn in recompute_modules"):
        hybrid.report_of(model_of(fields))


@pytest.mark.parametrize(("fields", "message"), [
    ({"context_parallel_size": 2}, "DSA with context parallelism"),
    ({"dsa_indexer_topk_freq": 4}, "dsa_indexer_topk_freq above 1"),
])  # fmt: skip
def test_what_this_release_has_not_is_refused(fields, message):
    part = table.payload_parts(language_model(model_of({}, wrap_ddp=False)))[0]
    vars(part.module.config).update(fields)
    found = [one.refusal.name for one in part.kind.option_refusals(part.module, part.module.config)]
    assert found == [message]


@pytest.mark.parametrize("absorbed", [False, True])
def test_other_forwards_of_such_layers_are_refused(absorbed):
    """From 0.19 on Megatron's own spec has one that puts the projection into queries."""
    model = model_of({})
    for layer in language_model(model).decoder.layers:
        mixer = layer.self_attention
        forward = {"forward": type(mixer).forward if absorbed else lambda self, x: x}
        mixer.__class__ = type("AbsorbedMLASelfAttention", (type(mixer),), forward)
        if absorbed:
            del mixer.linear_kv_up_proj
    with pytest.raises(CannotShare, match="layer 0's attention AbsorbedMLASelfAttention, which"):
        install(model)


# slime's and miles' own, by a stand-in -----------------------------------------------------

OWN = "decoder.layers.0.self_attention"
ITS_OWN = "layer 0's attention DSAMLASelfAttention, which has a forward"
FORWARD = sparse.DSAMultiLatentAttention.forward


def own_model():
    with sparse.own_sparse(every=2, first=1):
        return unwrap(small_model("tiny-deepseek", spec=sparse.DENSE, wrap_ddp=False))


def reads_more(self, *args, **options):
    return FORWARD(self, *args, **options)[0].roll(1), None


def inputs_of_more(self, *given):
    """It calls what it is to, and something else."""
    return gather_from_sequence_parallel_region, FORWARD


@pytest.mark.parametrize(("place", "value", "message"), [
    (f"{OWN}.forward", print, ITS_OWN),
    (f"{OWN}.__class__.__base__.forward", reads_more, ITS_OWN),
    (f"{OWN}.__class__.__base__.get_absorb_query_key_value_tensors", inputs_of_more, ITS_OWN),
    (f"{OWN}.rotary_pos_emb.forward", print, "rotary embedding YarnRotaryEmbedding: use"),
    ("config.tensor_model_parallel_size", 2, "and without sequence parallelism"),
    ("config.mtp_num_layers", 1, "own sparse attention with multi-token prediction"),
])  # fmt: skip
def test_own_layers_are_refused_by_name(place, value, message, monkeypatch):
    model = own_model()
    hybrid_cases.change(monkeypatch, model, place, value)
    with pytest.raises(CannotShare, match=message):
        install(model)


def test_switches_of_own_layers_are_looked_at_in_every_step(monkeypatch):
    model = own_model()
    parts = install(model).parts
    assert [type(part.kind) for part in parts] == [OwnDSA, FollowingDSA]
    monkeypatch.setenv("MEGATRON_USE_SGLANG_ROPE", "1")
    [refusal] = parts[0].kind.option_refusals(parts[0].module, model.config)
    assert "MEGATRON_USE_SGLANG_ROPE" in refusal.text


def test_calls_are_cut_as_own_layers_want_them():
    model = own_model()
    rank = Namespace(language_models=[model], models=[model])
    capture = Namespace(calls=lambda chunk: [])
    check_slices(capture, rank, Slices.CONTIGUOUS)
    with pytest.raises(CannotShare, match="chunks of the zig-zag"):
        check_slices(capture, rank, Slices.ZIGZAG)
    rank.models = rank.language_models = [model_of({}, wrap_ddp=False)]
    with pytest.raises(CannotShare, match="contiguous parts"):
        check_slices(capture, rank, Slices.CONTIGUOUS)


def test_work_and_weights_of_own_layers():
    model = own_model()
    config = table.with_module_fields(model.config, [model])
    for kind, layer in zip((OwnDSA(), FollowingDSA()), model.decoder.layers, strict=True):
        named = layer.self_attention.named_parameters()
        weights = sum(one.numel() for name, one in named if "norm" not in name)
        read = 6 * config.num_attention_heads * (2 * config.kv_lora_rank + 8)
        assert kind.parameters(config) == weights
        assert kind.work(config).products == weights + read
        assert kind.work(config).pairs == (0 if kind.follows else 16 * 16)
