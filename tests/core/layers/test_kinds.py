"""Kinds of layers: one file and one line each, and nobody else asks which kind a layer is."""

import re
from types import SimpleNamespace

import pytest

from megatron_prefix import features
from megatron_prefix.features.graphs import kinds
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.predict import kinds as predicted
from megatron_prefix.layers import table
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.layers.model import cost_of, dropped_bytes, layers_of, payloads_of
from megatron_prefix.layers.table import KINDS, part_of
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.tree.payload_map import Form
from tests.core.test_rooms import in_fresh_interpreter
from tests.harness import data

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
