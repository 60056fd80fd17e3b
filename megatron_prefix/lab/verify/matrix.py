"""The rows of the verb `matrix`: layouts, models, shapes and recomputations. [pure]

A row is one run of `align`: Megatron's stock schedule on full sequences against the prefix
schedule, both in the row's layout and on the same microbatches: one rollout each, and in the shape
"packed" several. To add a layout, add a line to LAYOUTS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime.layout import Layout

MODELS = {
    "dense": "tiny-qwen3",
    "moe": "tiny-moe",
    "gdn": "tiny-qwen3-next",
    "gdn-moe": "tiny-qwen3-next",
    "mamba": "tiny-nemotron-h",
    "hybrid-gdn": "tiny-qwen3-next",
    "hybrid-moe": "tiny-nemotron-h",
    "mla": "tiny-deepseek",
    "mla-moe": "tiny-deepseek",
    "window": "tiny-gpt-oss",
    "window-moe": "tiny-gpt-oss",
}
RECURRENT = ("gdn", "gdn-moe", "mamba", "hybrid-gdn", "hybrid-moe")
"""Megatron-Core 0.16 does not pack microbatches of these."""
EXPERTS = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 1e-2,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gdn-moe": EXPERTS,
    "mamba": {"num_layers": 8, "hybrid_override_pattern": "M-M*M-*M"},
    "hybrid-gdn": {
        "num_layers": 8,
        "experimental_attention_variant": None,
        "hybrid_override_pattern": "G-G*G-*G",
    },
    "hybrid-moe": {**EXPERTS, "hybrid_override_pattern": "MEM*EM"},
    "mla": {"num_moe_experts": None},
    "mla-moe": {"moe_router_load_balancing_type": "aux_loss"},
    "window": {"num_moe_experts": None},
}
"""Fields of the preset that a model changes."""
RECOMPUTES = ("none", "full")
ROLLOUT = Baseline("rollout")
# In 16 bit the ratio of two errors is judged, parameter by parameter. That needs many roundings, so
# layers are wider, there are more tokens, and weights are smaller. A token that goes to another
# expert than in fp32 would hide all roundings, so tokens go to all experts.
SIXTEEN_BIT = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 64,
    "init_method_std": 0.03,
}
SIXTEEN_BIT_OF = {
    "dense": {"ffn_hidden_size": 1408},
    "moe": {"moe_ffn_hidden_size": 256, "moe_router_topk": 8},
    "gdn": {"ffn_hidden_size": 1408},
    "gdn-moe": {"moe_ffn_hidden_size": 256, "moe_router_topk": 8},
    "mamba": {"ffn_hidden_size": 1408},
    "hybrid-gdn": {"ffn_hidden_size": 1408},
    "hybrid-moe": {"moe_ffn_hidden_size": 256, "moe_router_topk": 8},
    "mla": {
        "ffn_hidden_size": 1408, "kv_lora_rank": 128, "qk_head_dim": 64, "v_head_dim": 64,
        "num_query_groups": 8,
    },
    "mla-moe": {
        "moe_ffn_hidden_size": 256, "moe_router_topk": 8, "moe_router_group_topk": 4,
        "kv_lora_rank": 128, "qk_head_dim": 64, "v_head_dim": 64, "num_query_groups": 8,
    },
    "window": {"ffn_hidden_size": 1408},
    "window-moe": {"moe_ffn_hidden_size": 256, "moe_router_topk": 8},
}  # fmt: skip

# name: layout, models that can run it. With tensor parallelism Megatron-Core requires sequence
# parallelism for experts, so for them TP2 is always +SP.
LAYOUTS: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "TP2": (Layout(tp=2), ("dense", "window")),
    "TP2+SP": (
        Layout(tp=2, sequence_parallel=True),
        ("dense", "moe", "gdn", "gdn-moe", "mamba", "hybrid-gdn", "hybrid-moe", "mla", "window"),
    ),
    "PP2": (Layout(pp=2), ("dense", "moe", "gdn", "mamba", "mla", "window")),
    "PP4": (Layout(pp=4), ("dense", "moe")),
    "PP2xVPP2": (
        Layout(pp=2, vpp=2), ("dense", "moe", "gdn", "mamba", "hybrid-gdn", "mla", "window"),
    ),
    "CP2": (Layout(cp=2), ("dense", "moe", "gdn", "mamba", "hybrid-gdn", "mla")),
    "CP4": (Layout(cp=4), ("dense", "moe")),
    "EP2": (Layout(ep=2, dp=2), ("moe", "gdn-moe", "hybrid-moe", "mla-moe", "window-moe")),
    "EP4": (Layout(ep=4, dp=4), ("moe",)),
    "DP2": (Layout(dp=2), ("dense", "moe", "gdn", "mamba", "mla", "window")),
    "TP2xPP2": (Layout(tp=2, pp=2), ("dense", "moe")),
    "TP2xCP2": (Layout(tp=2, cp=2), ("dense", "moe")),
    "PP2xCP2": (Layout(pp=2, cp=2), ("dense", "moe", "mamba", "mla-moe")),
    "PP2xEP2": (Layout(pp=2, ep=2, dp=2), ("moe", "gdn-moe", "hybrid-moe", "window-moe")),
    "TP2xPP2xCP2": (Layout(tp=2, pp=2, cp=2), ("dense", "moe")),
    "TP2xEP2xPP2": (
        Layout(tp=2, pp=2, ep=2, dp=2, sequence_parallel=True), ("moe", "gdn-moe", "mla-moe"),
    ),
    # Experts are spread over context- and data-parallel ranks, in this order.
    "CP2xEP2": (Layout(cp=2, ep=2), ("moe",)),
    "CP2xEP4": (Layout(cp=2, ep=4, dp=2), ("moe",)),
    "TP2xCP2xEP2xPP2": (
        Layout(tp=2, cp=2, pp=2, ep=2, sequence_parallel=True), ("moe", "mla-moe"),
    ),
    "TP2xCP2xEP4xPP2": (Layout(tp=2, cp=2, pp=2, ep=4, dp=2, sequence_parallel=True), ("moe",)),
}  # fmt: skip


def is_sixteen_bit(dtype: str) -> bool:
    """Whether rows of this dtype are judged against an fp32 reference."""
    return dtype in ("bfloat16", "float16")


@dataclass(frozen=True)
class RolloutShape:
    """The tree of a row's rollouts, and its chunks.

    Attributes:
        tree: see lab/data/generate.py; "branch" has loss in inner segments.
        chunk_tokens: see PrefixConfig.
        pack_tokens: of a packed microbatch; 0: one rollout per microbatch.
    """

    tree: str
    chunk_tokens: int = 0
    pack_tokens: int = 0

    def groups(self, dp: int, dtype: str) -> list[Group]:
        """At least four groups of four uneven rollouts; a multiple of `dp`.

        In 16 bit at least two, since there are several draws.
        """
        prompt, response, vocab = (768, 512, 1000) if is_sixteen_bit(dtype) else (32, 24, 96)
        least = 2 if is_sixteen_bit(dtype) else 4
        made = generate(
            dp * -(-least // dp), prompt, response, 4, tree=self.tree, depth=3, vocab_size=vocab,
            uneven=True,
        )  # fmt: skip
        return list(made)

    def baseline(self, dtype: str) -> Baseline:
        """Microbatches of one rollout, or of a few uneven ones."""
        scale = 16 if is_sixteen_bit(dtype) else 1
        return Baseline("packed", scale * self.pack_tokens) if self.pack_tokens else ROLLOUT

    def config(self, dtype: str) -> PrefixConfig:
        """Waves of two or three rollouts, and nothing dissolved."""
        scale = 16 if is_sixteen_bit(dtype) else 1
        return PrefixConfig(
            chunk_tokens=scale * self.chunk_tokens, segment_tokens=scale * 64, min_gain=0
        )


SHAPES = {
    "flat": RolloutShape("flat"),
    "tree": RolloutShape("branch"),
    "chunked": RolloutShape("branch", chunk_tokens=16),
    "packed": RolloutShape("branch", chunk_tokens=16, pack_tokens=192),
}


@dataclass(frozen=True)
class Row:
    """One alignment.

    Attributes:
        model: key of MODELS.
        layout: key of LAYOUTS.
        shape: key of SHAPES.
        recompute: see ModelOptions.
    """

    model: str
    layout: str
    shape: str
    recompute: str

    @property
    def name(self) -> str:
        """MODEL/LAYOUT/SHAPE/RECOMPUTE, which `--only` matches."""
        return f"{self.model}/{self.layout}/{self.shape}/{self.recompute}"

    def overrides(self, dtype: str) -> dict[str, Any]:
        """Fields of ModelSpec that the row changes."""
        own = OVERRIDES.get(self.model, {})
        if not is_sixteen_bit(dtype):
            return own
        return {**own, **SIXTEEN_BIT, **SIXTEEN_BIT_OF[self.model]}

    def layout_in(self, world_size: int | None = None) -> Layout:
        """The row's layout; data parallelism fills a world that is larger.

        Raises:
            UserError: the world is not a multiple of the layout's.
        """
        layout = LAYOUTS[self.layout][0]
        if self.model.endswith("moe") and layout.tp > 1:
            layout = replace(layout, sequence_parallel=True)
        if world_size is None:
            return layout
        if world_size % layout.world_size:
            raise UserError(
                f"needs a multiple of {layout.world_size} ranks, but the world has {world_size}"
            )
        return replace(layout, dp=layout.dp * (world_size // layout.world_size))


def rows() -> Iterator[Row]:
    """All rows, layout by layout."""
    for model in MODELS:
        for layout, (_, models) in LAYOUTS.items():
            if model in models:
                for shape, recompute in itertools.product(SHAPES, RECOMPUTES):
                    if model not in RECURRENT or not SHAPES[shape].pack_tokens:
                        yield Row(model, layout, shape, recompute)


@dataclass(frozen=True)
class Result:
    """The result of a row.

    Attributes:
        row: its name.
        status: "aligned"; "different": a difference exceeds the policy; "failed": an error;
            "refused": this release or this world cannot run it.
        ranks: size of the world.
        seconds: duration.
        grad_max_rel_diff: largest relative difference of a gradient.
        tolerance: of that difference (in 16 bit: of `grad_error_ratio_max`).
        grad_error_ratio_max: in 16 bit, error against fp32 over the stock schedule's.
        reason: why it is not aligned, one line.
        run: dtype and device; only rows of one run are shown together.
        baseline: "packed" or "rollout", the microbatches of both schedules.
        compared_with: what the prefix schedule was compared with, in words.
    """

    row: str
    status: str
    ranks: int
    seconds: float
    grad_max_rel_diff: float | None = None
    tolerance: float | None = None
    grad_error_ratio_max: float | None = None
    reason: str = ""
    run: str = ""
    baseline: str = ""
    compared_with: str = ""

    @property
    def cell(self) -> str:
        """The row's cell of the table: its difference, or its status."""
        if self.status in ("refused", "failed"):
            return self.status
        ratio, error = self.grad_error_ratio_max, self.grad_max_rel_diff
        error_text = f"{error:.0e}" if ratio is None else f"{ratio:.3f}"
        return error_text if self.status == "aligned" else f"DIFFERENT {error_text}"


def table(results: Iterable[Result]) -> list[list[str]]:
    """The table: a line per model and layout, a column per shape and recomputation; first the head.

    A cell is the largest relative difference of a gradient (in 16 bit the error ratio) or a status.
    """
    by_name = {result.row: result for result in results}
    columns = list(itertools.product(SHAPES, RECOMPUTES))
    head = [
        shape if recompute == "none" else f"{shape} {recompute}" for shape, recompute in columns
    ]
    lines = [["layout", *head]]
    for model, layout in dict.fromkeys((row.model, row.layout) for row in rows()):
        cells = [by_name.get(Row(model, layout, *column).name) for column in columns]
        if any(cells):
            texts = [cell.cell if cell is not None else "" for cell in cells]
            lines.append([f"{model} {layout}", *texts])
    return lines


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Number of rows by status, without zeros."""
    known = ("aligned", "different", "failed", "refused")
    numbers = {status: sum(result.status == status for result in results) for status in known}
    return {status: number for status, number in numbers.items() if number}


def said(results: Sequence[Result]) -> str:
    """The counts in words."""
    numbers = ", ".join(f"{number} {status}" for status, number in counts(results).items())
    return f"{len(results)} rows: {numbers}"


def notes(results: Sequence[Result]) -> dict[str, list[str]]:
    """Rows by the reason why they are not aligned, and by what they were compared with."""
    rows_of: dict[str, list[str]] = {}
    for result in results:
        if result.status != "aligned":
            rows_of.setdefault(f"{result.status}: {result.reason}", []).append(result.row)
    for result in results:
        if result.compared_with:
            rows_of.setdefault(f"compared with: {result.compared_with}", []).append(result.row)
    return rows_of


def markdown(results: Sequence[Result], title: str) -> str:
    """The table, the counts and the reasons as a document."""
    head, *lines = table(results)
    text = [f"# {title}", "", _line(head), _line(["---"] * len(head)), *map(_line, lines)]
    text += ["", f"{said(results)}.", ""]
    text += [f"- {why} ({len(names)}, e.g. {names[0]})" for why, names in notes(results).items()]
    return "\n".join(text).rstrip() + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def result_of(fields: Mapping[str, Any]) -> Result:
    """A result from its fields, as JSON has them.

    Raises:
        TypeError: other fields than a result's.
    """
    return Result(**fields)
