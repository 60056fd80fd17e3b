"""Kinds of layers: one file and one line each, and nobody else asks which kind a layer is."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from megatron_prefix.layers import table
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.layers.table import KINDS, part_of
from megatron_prefix.megatron.install import language_model
from megatron_prefix.tree.payload_map import Form
from tests.harness import data
from tests.harness.one_rank import one_rank, small_model

PACKAGE = data.REPOSITORY / "megatron_prefix"


def test_each_kind_has_a_file_of_its_own() -> None:
    files = {type(kind).__module__ for kind in KINDS}
    assert len(files) == len(KINDS) == len({kind.symbol for kind in KINDS})
    assert all(one.rpartition(".")[0] == "megatron_prefix.layers" for one in files)


def test_only_its_file_and_the_table_name_a_kind() -> None:
    """Neither by its class nor by asking what a part's kind is; the lab only says it to people."""
    names = "|".join(type(kind).__name__ for kind in KINDS)
    asks = re.compile(
        rf"from megatron_prefix\.layers\S* import .*\b({names})\b|isinstance\([^)]*\b({names})\b"
        r"|kind\.(name|symbol) =="
    )
    own = {type(kind).__module__.replace(".", "/") + ".py" for kind in KINDS}
    own.add(table.__name__.replace(".", "/") + ".py")
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(data.REPOSITORY))
        if place not in own:
            assert not asks.search(path.read_text(encoding="utf-8")), place


def test_kinds_that_leave_a_payload_mix_positions() -> None:
    assert {kind.symbol: kind.form for kind in KINDS if kind.form} == {
        "*": Form.POSITIONS, "G": Form.SPANS, "M": Form.SPANS,
    }  # fmt: skip
    assert all(kind.slot is Slot.MIXER for kind in KINDS if kind.form)


@pytest.mark.parametrize(("spec", "mlp"), [({}, "-"), ({"num_moe_experts": 4}, "E")])
def test_the_parts_of_a_layer_are_found(spec: dict[str, int], mlp: str) -> None:
    name = "tiny-moe" if spec else "tiny-llama"
    with one_rank():
        model = small_model(name=name, vocab=64, wrap_ddp=False, spec=spec)
    layers = language_model(model).decoder.layers
    found = [[part_of(layer, slot) for slot in Slot] for layer in layers]
    assert {tuple(one.kind.symbol for one in parts) for parts in found} == {("*", mlp)}  # type: ignore[union-attr]


def test_what_no_kind_knows_is_not_taken_for_nothing() -> None:
    assert part_of(SimpleNamespace(self_attention=object(), mlp=object()), Slot.MIXER) is None
    alone = SimpleNamespace(self_attention=None, mlp=object())
    assert part_of(alone, Slot.MIXER) == (None, None)
    assert part_of(SimpleNamespace(mixer=object()), Slot.MIXER) is None


def test_a_new_kind_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Kind):
        name, symbol, slot, form = "other", "O", Slot.MIXER, Form.SPANS

        def module_of(self, layer: object) -> object | None:
            return getattr(layer, "other", None)

    monkeypatch.setattr(table, "KINDS", (Other(), *KINDS))
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(other=3)]))
    [part] = table.payload_parts(model)
    assert part.module == 3 and part.kind is not None and part.kind.form is Form.SPANS
