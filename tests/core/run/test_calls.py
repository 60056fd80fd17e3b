"""What a model call says of a microbatch, and what cannot be answered from segments."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.features.context_parallel import slices
from megatron_prefix.layers.attention import MaskUse
from megatron_prefix.layers.model import counts_tokens
from megatron_prefix.run.calls import (
    Callbacks,
    CallLayout,
    ModelCall,
    bound,
    check,
    check_masks,
    layouts,
    slices_of,
)
from megatron_prefix.run.read.read_calls import CallTokens, check_positions, read_tokens
from megatron_prefix.tree.cp_layout import Slices
from tests.harness import ranks  # noqa: F401  # applies the CPU platform


def forward(input_ids, position_ids, attention_mask, labels=None, **options):
    """The arguments of a model."""


def call(*args, number=0, **kwargs):
    return bound(inspect.signature(forward), args, kwargs, number)


def packing(*ends, padded=None, **fields):
    return SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
        cu_seqlens_q_padded=None if padded is None else torch.tensor(padded, dtype=torch.int32),
        **fields,
    )


@pytest.mark.parametrize(("given", "cp_size", "wanted"), [
    (dict(tokens=(3, 5)), 1, CallLayout((5, 5, 5), False)),
    (dict(tokens=(1, 9), ends=(0, 4, 9)), 1, CallLayout((4, 5), True)),
    (dict(tokens=(1, 12), ends=(0, 3, 7), padded=(0, 4, 12)), 1, CallLayout((4, 8), True)),
    (dict(tokens=(1, 12), ends=(0, 4, 9)), 1, CallLayout((4, 5, 3), True, 3)),
    (dict(tokens=(1, 6), ends=(0, 4, 12)), 2, CallLayout((4, 8), True)),
    (dict(tokens=(1, 4), ends=(0, 4, 4, 4)), 1, CallLayout((4,), True)),
    (dict(ends=(0, 4, 9)), 1, CallLayout((4, 5), True)),
    (dict(tokens=(2, 4), ends=(0, 4, 8)), 1, CallLayout((4, 4), False)),
    (dict(), 1, None),
])  # fmt: skip
def test_layouts(given, cp_size, wanted):
    shape, ends = given.get("tokens"), given.get("ends")
    found = call(
        None if shape is None else torch.zeros(shape, dtype=torch.int64), None, None,
        packed_seq_params=None if ends is None else packing(*ends, padded=given.get("padded")),
    )  # fmt: skip
    assert layouts([found], cp_size) == (None if wanted is None else [wanted])


@pytest.mark.parametrize(("arguments", "message"), [
    ({"decoder_input": torch.zeros(4, 1, 8)}, "model calls of the step have decoder_input"),
    ({"inference_context": object()}, "inference_context: leave it out"),
    ({"inference_params": object()}, "inference_params"),
    ({"output_processor_context": {"x": torch.zeros(3)}}, "which has tensors"),
])  # fmt: skip
def test_what_cannot_be_answered_is_refused_by_name(arguments, message):
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    check([call(tokens, None, None)])
    with pytest.raises(CannotShare, match=message):
        check([call(tokens, None, None), call(tokens, None, attention_mask=None, **arguments)])


def test_calls_of_one_step_are_alike():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    plain = call(tokens, None, None)
    with pytest.raises(CannotShare, match="some model calls of the step have labels"):
        check([plain, call(tokens, None, None, tokens)])
    with pytest.raises(CannotShare, match="some model calls of the step have loss_mask"):
        check([plain, call(tokens, None, None, loss_mask=tokens)])
    with pytest.raises(CannotShare, match="differ in temperature"):
        check([call(tokens, None, None, temperature=t) for t in (0.7, 1.0)])


def columns_of(calls, trained=None):
    found = read_tokens(calls, 1, Callbacks(trained))
    assert found is not None
    return found


def test_the_loss_mask_comes_before_the_callback():
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0.0, 0.5, -1.0]])
    asked = []

    def trained(one):
        asked.append(one)
        return torch.tensor([[True, False, False]])

    with_mask = columns_of([call(tokens, None, None, loss_mask=mask)], trained)
    assert with_mask.trained is not None and with_mask.trained.tolist() == [0, 1, 1] and not asked
    without = columns_of([call(tokens, None, None)], trained)
    assert without.trained is not None and without.trained.tolist() == [1, 0, 0] and len(asked) == 1


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "labels", "loss_mask"])
def test_tensors_overwritten_after_the_call_are_an_error(name):
    """A static buffer holds the last microbatch when all forward steps have run."""
    given = {n: torch.tensor([[1, 2, 3]]) for n in ("input_ids", "position_ids", "labels")}
    given["loss_mask"] = torch.ones(1, 3)
    made = call(attention_mask=None, **given)
    columns_of([made])
    given[name].zero_()
    with pytest.raises(UserError, match="of microbatch 0 is overwritten"):
        columns_of([made])


def test_a_mask_over_tokens_is_no_mask_of_positions():
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]])
    calls = [call(tokens, None, None, loss_mask=mask)]
    free = read_tokens(calls, 1, Callbacks(masks_tokens=True))
    told = read_tokens(calls, 1, Callbacks(lambda one: mask.roll(-1), masks_tokens=True))
    assert free is not None and free.trained is None
    assert told is not None and told.trained is not None and told.trained.tolist() == [0, 1, 0]


def known(positions, *lengths):
    column = np.array(positions)
    return CallTokens([CallLayout(lengths, True)], column, None, None, column)


def test_a_packing_or_the_trainer_says_how_calls_are_cut():
    zigzag, parts = [0, 3, 4, 5, 10, 11], [0, 1, 2, 3, 4, 5]
    for given, setting, expected in (
        ("zigzag", Slices.ZIGZAG, zigzag), ("contiguous", Slices.ZIGZAG, parts),
        ("zigzag", Slices.CONTIGUOUS, parts),
    ):  # fmt: skip
        packed = packing(0, 4, 12, cp_partition_mode=given)
        calls = [call(torch.zeros(1, 6), None, None, packed_seq_params=packed)]
        (found,) = layouts(calls, 2, setting=setting) or []
        assert found.held(0, 2).tolist() == expected
        assert found.slices is slices_of(calls, setting)
    assert CallLayout((4, 4), False, slices=Slices.CONTIGUOUS).held(1, 2).tolist() == [2, 3, 6, 7]


def test_contiguous_slices_of_context_parallelism_are_refused():
    for positions, lengths, rank in (
        ([0, 1, 2, 3], (8,), 0), ([4, 5, 6, 7], (8,), 1),
        ([0, 1, 2, 3, 0, 0], (8, 4), 0), ([4, 5, 6, 7, 0, 0], (8, 4), 1),  # behind it padding
        ([2, 3, 4, 5, 6, 7], (4, 8), 1),  # a pack cut as a whole
    ):  # fmt: skip
        group, said = ranks_of(rank, 2), known(positions, *lengths)
        with pytest.raises(CannotShare, match="contiguous parts"):
            slices.check_positions(said, group)
        layout = said.layouts[0]._replace(slices=Slices.CONTIGUOUS)
        slices.check_positions(said._replace(layouts=[layout]), group)
    slices.check_positions(known([0, 1, 6, 7], 8), ranks_of(0, 2))


def ranks_of(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def test_learned_embeddings_need_positions_that_start_at_zero():
    check_positions(known([0, 1, 2, 0, 1], 3, 2), 0, 1)
    with pytest.raises(CannotShare, match="do not count from 0"):
        check_positions(known([0, 1, 2, 3, 4], 3, 2), 0, 1)


# Which masks of model calls are taken, for each thing that attention does with one ----------------

CAUSAL = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
RESET = CAUSAL.clone()
RESET[..., 2:, :2] = True
FUTURE = CAUSAL.clone()
FUTURE[..., 1, 2] = False
TAIL = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
HEAD = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
HOLE = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
NONE_LEFT = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
IGNORED, OBEYED, NEEDED = MaskUse


def padding(kept):
    """Transformer-engine's mask of padding, [samples, 1, 1, positions], as SkyRL gives it."""
    return (kept == 0)[:, None, None]


NOT_CAUSAL, PADS = "attention_mask of a model call is not causal", "padding_mask leaves tokens out"


def accepts(use, *, counted=False, **masks):
    """ "" or why a step is refused whose last call has these masks."""
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    plain = {"input_ids": tokens, "attention_mask": CAUSAL}
    try:
        check_masks(
            [ModelCall(0, plain), ModelCall(1, {**plain, **masks})], use, counts_tokens=counted
        )
    except CannotShare as error:
        return str(error)
    return ""


@pytest.mark.parametrize("use", MaskUse)
@pytest.mark.parametrize(
    "mask",
    [
        RESET, FUTURE, CAUSAL.float(), CAUSAL[..., :1, :], torch.zeros(4), HEAD, HOLE, NONE_LEFT,
        padding(HEAD), padding(HOLE), padding(NONE_LEFT), padding(TAIL).long(), ~padding(TAIL),
    ],
    ids=[
        "reset", "future", "float", "one row", "vector", "head", "hole", "none left", "padded head",
        "padded hole", "none but padding", "padding as a number", "padding upside down",
    ],
)  # fmt: skip
def test_masks_that_are_not_causal_are_refused(use, mask):
    assert NOT_CAUSAL in accepts(use, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_that_cuts_off_the_end_is_taken_if_ignored(dtype):
    assert not accepts(IGNORED, attention_mask=TAIL.to(dtype))
    assert not accepts(IGNORED, attention_mask=torch.ones(2, 4, dtype=dtype))
    assert not accepts(IGNORED, attention_mask=padding(TAIL))
    # Of another shape than the tokens', and where attention would obey it.
    assert NOT_CAUSAL in accepts(IGNORED, attention_mask=TAIL[:, :3].to(dtype))
    for use in (OBEYED, NEEDED):
        for mask in (TAIL.to(dtype), padding(TAIL)):
            assert NOT_CAUSAL in accepts(use, attention_mask=mask)


def test_a_padding_mask_matters_where_routers_count():
    pads, none = TAIL == 0, torch.zeros(2, 4, dtype=torch.bool)
    assert not accepts(OBEYED, padding_mask=pads)
    assert not accepts(OBEYED, padding_mask=none, counted=True)
    assert PADS in accepts(OBEYED, padding_mask=pads, counted=True)


@pytest.mark.parametrize(("fields", "counts"), [
    ({}, False), ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01}, False),
    ({"moe_aux_loss_coeff": 0.0}, False), ({"moe_aux_loss_coeff": 0.01}, True),
    ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
      "moe_aux_loss_coeff": [0.0, 0.01]}, True),
    ({"moe_z_loss_coeff": 1e-3}, True),
    ({"moe_router_enable_expert_bias": True}, True),
])  # fmt: skip
def test_what_of_routers_counts_tokens(fields, counts):
    options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, **fields}
    assert counts_tokens(SimpleNamespace(num_moe_experts=4, **options)) == counts
    assert not counts_tokens(SimpleNamespace(num_moe_experts=None, **options))
