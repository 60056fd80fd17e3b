"""Kinds of layers: one file and one line each, and nobody else asks which kind a layer is; what
positions layers in FP8 take, what that costs, and what is padded for them."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix import features
from megatron_prefix.features.graphs import kinds
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.predict import kinds as predicted
from megatron_prefix.lab.predict.precision import kept_bytes
from megatron_prefix.layers import precision, table
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.layers.model import cost_of, dropped_bytes, layers_of, payloads_of
from megatron_prefix.layers.table import KINDS, part_of
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import build
from megatron_prefix.tree.payload_map import Form
from tests.core.test_rooms import in_fresh_interpreter
from tests.harness import data
from tests.harness.trees import is_prefix_tree, received, rollout_sets, tree_options

PACKAGE = data.REPOSITORY / "megatron_prefix"
EVERY = (*KINDS, *(features.load(kind.path)() for kind in features.KINDS))
OWN = {
    f"{name.replace('.', '/')}.py"
    for name in (
        table.__name__, presets.__name__, kinds.__name__, predicted.__name__,
        *(type(kind).__module__ for kind in EVERY),
    )
}  # fmt: skip
"""Files that may name kinds: of `kinds`, what CUDA graphs run of each; of `predicted`, what each
saves."""
NAMES = "|".join(type(kind).__name__ for kind in EVERY)
SYMBOL = f'"[{re.escape("".join(table.SYMBOLS - {"-"}))}]"'
"""In quotes; "-" is also stdout."""
ASKS = re.compile(
    rf"from megatron_prefix\.(?:layers|features)\S* import .*\b({NAMES})\b"
    rf"|isinstance\([^)]*\b({NAMES})\b"
    rf"|kind\.(name|symbol) ==|{SYMBOL} (not )?in |{SYMBOL}: [a-z_]+[,}}]|[!=]= {SYMBOL}"
    rf"|\.(get|count|find|index)\({SYMBOL}"
)


def test_only_its_file_and_the_table_name_a_kind():
    """Neither by its class nor by asking what a part's kind is; the lab only says it to people."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(data.REPOSITORY))
        if place not in OWN:
            assert not ASKS.search(path.read_text(encoding="utf-8")), place


def test_numbers_of_all_presets_need_neither_torch_nor_megatron():
    in_fresh_interpreter(
        "from megatron_prefix.lab.models.presets import PRESETS\n"
        "from megatron_prefix.layers.model import cost_of\n"
        "from megatron_prefix.lab.predict.model import footprint_of\n"
        "from megatron_prefix.lab.predict.execution import Execution\n"
        "for spec in PRESETS.values():\n"
        "    cost_of(spec), footprint_of(spec, Execution())\n"
    )


def test_what_no_kind_knows_is_not_taken_for_nothing():
    assert part_of(SimpleNamespace(self_attention=object(), mlp=object()), Slot.MIXER) is None
    alone = SimpleNamespace(self_attention=None, mlp=object())
    assert part_of(alone, Slot.MIXER) == (None, None)
    assert part_of(SimpleNamespace(mixer=object()), Slot.MIXER) is None


class Other(Kind):
    """Every second layer of a GPTModel."""

    name, symbol, slot, form = "other", "O", Slot.MIXER, Form.SPANS

    def module_of(self, layer):
        return getattr(layer, "other", None)

    def fills(self, config, layer):
        return layer % 2 == 1

    def work(self, config):
        return LayerWork(1000.0 * config.hidden_size, 70.0)

    def payload(self, config, sharding):
        return Payload(Form.SPANS, 5.0, 6.0)


def test_a_new_kind_is_one_line(monkeypatch):
    """Its module is found, and its numbers are in costs and payloads."""
    spec, sharding = presets.resolve("tiny-llama", num_layers=4), Sharding()
    cost = cost_of(spec, 0)
    line = features.FeatureKind(
        f"{__name__}:Other", lambda _: True, lambda layer: hasattr(layer, "other"), symbol="O"
    )
    monkeypatch.setattr(features, "KINDS", (line, *features.KINDS))
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(other=3)]))
    [part] = table.payload_parts(model)
    other = part.kind
    assert part.module == 3 and isinstance(other, Other)

    attention, mlp = layers_of(spec)[0]
    assert layers_of(spec) == [(attention, mlp), (other, mlp)] * 2
    assert layers_of(spec, "O*") == [(other,), (attention,)]
    products = other.work(spec).products - attention.work(spec).products
    flops = cost_of(spec, 0).forward
    assert flops.positions == cost.forward.positions + 2 * 2 * products
    assert flops.pairs == cost.forward.pairs / 2 + 2 * 2 * 70
    keys, states = attention.payload(spec, sharding), other.payload(spec, sharding)
    assert payloads_of(spec, None, sharding) == (*[(keys,), (states,)] * 2, ())
    assert dropped_bytes(spec, None, sharding) == 4 * mlp.dropped(spec, sharding) > 0


@pytest.mark.parametrize(
    ("variant", "layers"), [("gated_delta_net", [0, 2]), ("gdn", [0, 2]), ("gdn2", [])]
)
def test_gated_delta_net_by_the_names_of_all_releases(variant, layers):
    """Megatron-Core 0.20 calls it gdn, and gdn2 is another module."""
    config = SimpleNamespace(experimental_attention_variant=variant, linear_attention_freq=2)
    assert [layer for layer in range(4) if GatedDeltaNet().fills(config, layer)] == layers


NONE = {"fp8": None, "fp8_recipe": "blockwise"}


@pytest.mark.parametrize(("fields", "sequence_ranks", "cp", "rows", "whole"), [
    (NONE, 1, 1, 1, 1),
    (NONE, 2, 4, 2, 1),
    ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 1, 1, 16, 16),
    ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 1, 2, 16, 32),
    ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 2, 1, 256, 256),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 1, 1, 32, 32),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 4, 2, 128, 256),
    ({"fp8": "e4m3", "fp8_recipe": "delayed"}, 2, 1, 2, 1),  # it is refused later on
    ({}, 1, 1, 1, 1),
])  # fmt: skip
def test_rows_that_layers_in_fp8_get(fields, sequence_ranks, cp, rows, whole):
    config = SimpleNamespace(**fields)
    assert precision.row_multiple(config, sequence_ranks) == rows
    assert precision.segment_multiple(config, sequence_ranks, cp) == whole


def column_blocks(rows, columns):
    """Bytes of a copy in blocks of columns, as transformer-engine 2.11 allocates it: `make_empty`
    and `get_scale_shape` in transformer_engine/pytorch/tensor/float8_blockwise_tensor.py."""
    return rows * columns + 4 * math.ceil(rows / 128) * math.ceil(columns / 4) * 4


def mx_column_blocks(rows, columns):
    """The same in transformer_engine/pytorch/tensor/mxfp8_tensor.py; a scale is a byte."""
    scales = math.ceil(rows / 32 / 4) * 4, math.ceil(columns / 128) * 128
    return rows * columns + math.prod(scales)


@pytest.mark.parametrize(
    ("recipe", "allocated"), [("blockwise", column_blocks), ("mxfp8", mx_column_blocks)]
)
def test_what_a_product_keeps_of_its_input(recipe, allocated):
    config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)
    assert kept_bytes(config, 2) == allocated(2048, 14336) / (2048 * 14336)
    assert kept_bytes(SimpleNamespace(**{**vars(config), "fp8": None}), 2) == 2
    assert kept_bytes(SimpleNamespace(fp8="e4m3", fp8_recipe="delayed"), 2) == 2


@given(rollout_sets(), tree_options(), st.sampled_from([1, 2, 5]))
def test_segments_are_whole(sets, options, times):
    """Only padding is added, and none between spans of inner segments; plans run."""
    rollouts, groups = sets
    options = replace(options, pad_multiple=times * options.multiple)
    plain, forest = (
        build(rollouts, groups, one) for one in (replace(options, pad_multiple=1), options)
    )
    is_prefix_tree(forest)
    assert [s[1:5] for s in forest.segments] == [s[1:5] for s in plain.segments]
    for found, before in zip(forest.segments, plain.segments, strict=True):
        assert not found.padded_length % options.pad_multiple
        assert 0 <= found.padded_length - before.padded_length < options.pad_multiple
        num = len(before.spans) - (not before.inner)
        assert found.spans[:num] == before.spans[:num]
        rest = found.spans[num:]
        if before.inner:
            assert all(not span.rollouts and not span.length for span in rest) and len(rest) < 2
        else:
            assert [span._replace(padded=0) for span in rest] == [
                before.spans[-1]._replace(padded=0)
            ]
    assert received(forest) == forest
    best_plan(forest, 2, microbatches=tuple(range(len(rollouts))))
