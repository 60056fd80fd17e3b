"""DeepSeek's sparse attention under the prefix schedule in fp64, against plain autograd and the
stock schedule; its indexer is not trained."""

import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.dsa import sparse as blocks
from megatron_prefix.features.dsa.kind import DSA
from megatron_prefix.features.dsa.sparse import Index, Sparse, choose
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers import table
from megatron_prefix.megatron.install import install, language_model
from tests.harness import hybrid, sparse, steps
from tests.harness.hybrid import worst
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank
from tests.harness.sparse import model_of

EXACT = hybrid.limit(128, 2)


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank(), sparse.rotating():
        yield


@pytest.mark.parametrize("most", [1, 500])
def test_some_queries_at_a_time(most, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_SCORES", most)
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
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".indexer." not in name)
        return model

    twin, model = (freeze(model_of({}, wrap_ddp=False)) for _ in "ab")
    expected = steps.plain(twin, steps.Contract(), hybrid.items())
    steps.call(schedule_with(chunk_tokens=7), steps.Contract().step, model, hybrid.items())
    found = steps.gradients(model)
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None
        else:
            largest = (found[name] - expected.gradients[name]).abs().max()
            assert largest <= EXACT * expected.terms[name], name


def test_an_indexer_that_is_trained_gets_zeros():
    """Not nothing: whoever reduces gradients when they come waits for each of them."""
    model = model_of({}, wrap_ddp=False)
    steps.call(schedule_with(chunk_tokens=7), steps.Contract().step, model, hybrid.items())
    own = {name: one.grad for name, one in model.named_parameters() if ".indexer." in name}
    assert own and all(one is not None and not one.any() for one in own.values())


class Shape:
    """A spec with an indexer, as Megatron's config has it."""

    def __init__(self, **fields):
        self._spec = resolve("tiny-deepseek", **sparse.DENSE)
        vars(self).update({**sparse.DSA, **fields})

    def __getattr__(self, name):
        return getattr(self._spec, name)


def test_work_and_weights_are_those_of_the_modules():
    latent = MLA().work(Shape())
    assert DSA().work(Shape()).pairs == latent.pairs + 16 * 16
    decoder = language_model(model_of({}, wrap_ddp=False)).decoder
    mixers = [one.self_attention for one in decoder.layers]
    weights = [
        sum(one.numel() for name, one in mixer.named_parameters() if "norm" not in name)
        for mixer in mixers
    ]
    assert {*weights} == {DSA().parameters(Shape())}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"dsa_indexer_loss_coeff": 0.01}, "the dense loss of DSA's indexer"),
     ({"dsa_indexer_loss_coeff": 0.01, "dsa_indexer_use_sparse_loss": True}, "the sparse loss"),
     ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
      "DSA with core_attn in recompute_modules")],
)  # fmt: skip
def test_what_is_refused(fields, message):
    with pytest.raises(CannotShare, match=message):
        hybrid.report_of(model_of(fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"context_parallel_size": 2}, "DSA with context parallelism"),
     ({"dsa_indexer_topk_freq": 4}, "dsa_indexer_topk_freq above 1")],
)  # fmt: skip
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
