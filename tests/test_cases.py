"""Every row of the table of cases."""

from dataclasses import replace

import pytest

from megatron_prefix.layers.blocks.operators import MathKernel
from megatron_prefix.refusals import table
from megatron_prefix.tree import payload_map
from tests import judge, mistakes
from tests.cases import FAMILIES, FURTHER, auto_row, random_row, row, wrong
from tests.harness.fuzzing import rounds

pytestmark = pytest.mark.usefixtures("on_one_rank")
VARIANTS = (
    *("softmax scale", "whole softmax scale", "layer scaling", "both scales"),
    *("a layer without rope", "interleaved rope", "scaled rope", "l2 norm"),
    *("residual behind the norm", "biases", "tied", "tied, norms", "untied, norms"),
    "no positions",
)
"""Options that reach attention or positions."""
LATENTS = ("mla rope", "mla no q_lora", "mla no norms", "mla wide values", "mla mscales")
WINDOWS = (
    *(f"window {left}" for left in (1, 7, 8, 30, 200)),
    *("mistral", "gemma", "windows last", "sinks", "off by one"),
)
RECURRENT = ("gdn", "mamba")
SPARSE = ("dsa two keys", "dsa all keys", "dsa rope", "dsa no q_lora", "dsa wide indexer")
ALONE = ("dsa mtp", "gdn alone", "mamba alone", "gdn and mamba")
ELSEWHERE = ("experts both", "experts global", "experts all", "experts bias")
EXPERTS = tuple(
    name for name in FAMILIES
    if name.startswith(("experts", "mla experts")) and name not in ELSEWHERE
)  # fmt: skip
EVERY = (
    *("whole", "chunks of 7", "packs of chunks", "depth first", "recompute chunks"),
    *("light chunks", "offload", "a layer on the host", "all on the host"),
)
"""Options that every kind of payload is tried in, in some of them with more beside."""
OWN = (*EVERY[1:4], "light chunks", "offload", "a layer on the host")
KINDS_ALONE = {
    "mla": (*EVERY[:4], "light chunks", "offload", "a layer on the host"),
    "gpt-oss": ("packs of chunks", "depth first", "light chunks", "a layer on the host"),
    "gdn": OWN,
    "mamba": (*EVERY[1:4], "light chunks", "a layer on the host"),
    "dsa": (*EVERY[:2], "depth first", "light chunks", "offload", "a layer on the host"),
}
TREE = ("several trees", "loss in prompts", "short spans", "three levels", "spans of many lengths")
JOINED = [
    ("joined", ("joined",)), ("joined 100", ("joined",)), ("joined 24", ()),
    ("joined 64", ("joined", "joined below a prompt")),
]  # fmt: skip


def _recomputed(model, *modules, first=0):
    """With Megatron's own recomputation; segments run again, or are on the host, in turn."""
    options = ("recompute chunks", "all on the host")
    return [
        row(model, options[(first + number) % 2], recompute=each)
        for number, each in enumerate(modules)
    ]


ROWS = [
    *(row(name, "chunks of 7") for name in VARIANTS),
    row("learned positions", "chunks of 7", positions="given"),
    *_recomputed("gqa", "block", "uniform", "core_attn+mlp+layernorm"),
    *_recomputed("gqa", "core_attn+mlp+layernorm", first=1),
    row("gdn in packs", "chunks of 7", form="thd"),
    # Experts: losses and counts of what every token stands for.
    *(row(name, "small") for name in EXPERTS),
    *(
        row(name, options, returns="per_token", recompute=recompute)
        for name, recompute in (("experts both", "none"), ("experts bias", "full"))
        for options in ("joined", "recompute", "offload", "a layer on the host", "budget")
        if (name, options) != ("experts both", "joined")
    ),
    row("experts global", "joined", "joined", recompute="full"),
    *(row(name, "small") for name in ("mtp 2 experts", "mtp 2 windows")),
    row("mtp 2", "recompute", recompute="full"),
    row("mtp 5", "small", **{**FURTHER, "returns": "three"}),
    row("mtp 2", "offload", form="thd", returns="per_token"),
    *(
        row(name, options, **FURTHER)
        for name in ("mtp 5", "mtp 3 mla")
        for options in ("whole", "chunks of 2")
        if (name, options) != ("mtp 5", "whole")
    ),
    row("experts both", "whole", recompute="moe+layernorm"),
    # Routes that routers follow.
    row("replay", "small", form="thd", loss_mask="absent", session="evaluate"),
    row("replay", "recompute", form="rows", recompute="full"),
    row("replay asked", "small", form="rows"),
    *(row(name, "recompute chunks") for name in ("replay mtp", "replay miles")),
    row("experts all", "recompute chunks", scale="by_microbatch", returns="per_token"),
    row("experts aux", "a rollout a wave"),
    *(
        row(name, "small", scale=when, returns="per_token")
        for name in ("mtp experts", "gqa")
        for when in ("after", "in_loss", "calls")
        if (name, when) != ("mtp experts", "calls")
    ),
    # Adapters.
    *(row("adapted", options) for options in ("recompute chunks", "offload")),
    # A reference with adapters off.
    *(
        row("switched", "packs of chunks", calls=f"reference_{when}")
        for when in ("before", "after")
    ),
    *(
        row(name, "small")
        for name in ("adapted fc2", "adapted last", "adapted first", "adapted experts")
    ),
    row("mla, projection frozen", "chunks of 7"),
    # Every kind of payload in every policy; other shapes of it in two.
    *(row(name, options) for name, some in KINDS_ALONE.items() for options in some),
    *(row(name, "whole", *TREE, "sidecar") for name in RECURRENT),
    *(row(name, "recompute chunks", session="evaluate") for name in ("mla", "dsa", "gdn")),
    row("gqa", "joined", session="evaluate"),
    *(row(name, "chunks of 2") for name in (*RECURRENT, "gpt-oss")),
    *(
        row(name, options)
        for name in (*LATENTS, *WINDOWS, *SPARSE, *ALONE)
        for options in ("chunks of 7", "depth first")
    ),
    *_recomputed("mla", "full", "mla_up_proj", "core_attn", "mla_up_proj+core_attn", "layernorm"),
    *_recomputed("mla", "core_attn", first=1),
    *_recomputed("mla", "mla_up_proj+core_attn"),
    *_recomputed("gpt-oss", "full", "selective"),
    *_recomputed("mamba", "full", "selective"),
    *_recomputed("dsa", "full", "mla_up_proj", "layernorm", first=1),
    *(row("dsa sparse loss", each) for each in (*EVERY[:2], "depth first", *EVERY[5::3])),
    *_recomputed("dsa sparse loss", "full"),
    row("dsa sparse loss", "small", loss_mask="tails", session="train_eval_mixed"),
    row("dsa dense loss", "recompute chunks", form="rows", returns="per_token"),
    # A trainer's own GatedDeltaNet.
    *(
        row(name, options)
        for name, some in (("own delta global", OWN), ("own delta attribute", EVERY[:4:3]))
        for options in (*some, "chunks of 2")
    ),
    row("own delta global", "whole", *TREE, "sidecar"),
    *(row(name, "chunks of 7") for name in ("own delta keywords", "own delta alone")),
    # Kimi K3's layers, and layers with several residual streams.
    *(row("kimi", options) for options in (*OWN, "chunks of 2")),
    row("kimi", "whole", *TREE, "sidecar"),
    row("kimi alone", "chunks of 7", form="thd"),
    row("kimi", "recompute chunks", session="evaluate"),
    *_recomputed("kimi", "layernorm", first=1),
    *(row("streams", options, recompute="mhc") for options in ("whole", "recompute chunks")),
    row("streams", "packs of chunks", form="thd"),
    row("streams", "graphs in chunks", tree="groups", session="train", form="rows"),
    *_recomputed("own delta attribute", "selective", first=1),
    *_recomputed("own delta global", "full", "selective"),
    # A trainer's own sparse attention.
    *(
        row(f"own sparse{more}", options)
        for more, options in (
            (" rope", "depth first"),
            ("", "joined 64"),
            ("", "chunks of 2"),
            ("", "light chunks"),
            (" experts", "small"),
        )
    ),
    row("own sparse sharing", "whole", *TREE, "sidecar"),
    row("own sparse sharing", "a layer on the host", session="evaluate"),
    *_recomputed("own sparse sharing", "block", "uniform", first=1),
    # Prompts in the segment of what follows them.
    *(row(name, each, *ran) for name in ("qk_norm", "mla") for each, ran in JOINED),
    *(row("gqa", each, *ran) for each, ran in JOINED[1:]),
    *(
        row("gqa", "joined 64", "joined", recompute=module)
        for module in ("full", "core_attn", "layernorm", "mlp")
    ),
]
WEIGHED = FURTHER | {"loss_mask": "weighed"}
KEYWORD = {"labels": "absent"}
MTP = [
    *(row("mtp", options) for options in ("depth first", "offload", "all on the host")),
    *(
        row(name, "packs of chunks")
        for name in ("mtp tied", "mtp norms", "mtp gdn", "mtp learned", "mtp no positions")
    ),
    *(row("mtp biases", options) for options in ("packs of chunks", "recompute chunks")),
    row("mtp global", "depth first", returns="per_token"),
    *(row("mtp", "recompute chunks", recompute=module) for module in ("full", "selective")),
    *(row("mtp", "packs of chunks", returns=form) for form in ("two", "per_token")),
    row("mtp", "chunks of 7", scale="constant"),
    row("mtp", "joined", scale="by_microbatch", returns="per_token"),
    row("mtp biases", "joined", scale="by_microbatch"),
    row("mtp", "chunks of 7", loss_mask="absent"),
    row("mtp", "recompute chunks", loss_mask="weighed", returns="per_token"),
    *(row("mtp", "chunks of 7", session=kind) for kind in ("evaluate", "train_eval_mixed")),
    row("mtp", "whole", form="thd_ends"),
    # As slime and miles call models.
    row("mtp keyword", "recompute chunks", **KEYWORD),
    row("mtp keyword", "small", recompute="full", **KEYWORD),
    row("mtp keyword", "chunks of 7", **KEYWORD, form="thd", session="train_eval_mixed"),
    row("mtp 3 keyword", "small", **KEYWORD | WEIGHED),
    row("mtp 3 keyword", "recompute chunks", **KEYWORD | WEIGHED, recompute="full"),
    row("mtp 2 keyword experts", "all on the host", **KEYWORD | WEIGHED),
    *(row("mtp unused", "small", labels=kind) for kind in ("given", "absent")),
    row("own delta mtp", "small", **KEYWORD),
    # Of releases that can.
    *(
        row("mtp without labels", "whole", labels="absent", loss_mask=kind)
        for kind in ("given", "weighed")
    ),
    row("mtp detached", "recompute chunks", labels="absent", returns="per_token"),
    row("mtp detached", "whole", recompute="full"),
    *(row("mtp 3 repeated", options, **WEIGHED) for options in ("chunks of 7", "all on the host")),
    row("mtp 3 repeated", "recompute chunks", recompute="full", **WEIGHED),
    row("mtp 5 repeated", "small", recompute="selective", **WEIGHED),
    row("mtp 2 repeated mla", "light"),
    row("mtp 2 repeated experts", "recompute chunks", recompute="selective"),
    row("mtp mamba", "chunks of 7", session="evaluate"),
    row("mtp 2 mamba", "recompute chunks", recompute="full", loss_mask="weighed"),
    row("mtp 2 mamba repeated", "all on the host"),
    row("mtp 2 gdn and mamba", "packs of chunks"),
    row("mtp 5 mamba repeated", "recompute chunks", recompute="full", **WEIGHED),
]
"""Multi-token prediction; tests/core/layers/test_mtp_newer.py has them in a later release."""
CALLS = [
    row("qk_norm", "small", form="thd_padded", labels="absent", in_place="div"),
    row("qk_norm", "small", form="thd_padded", loss_mask="absent"),
    row("qk_norm", "small", form="thd", returns="per_token"),
    row("qk_norm", "small", form="thd", labels="absent", in_place="div", session="evaluate"),
    *(row("qk_norm", "small", form="thd", batch=batch) for batch in ("get_next", "index")),
    row("qk_norm", "recompute", form="thd", recompute="full"),
    row("qk_norm", "offload", form="thd"),
    row("qk_norm", "losses in leaves", form="thd"),
    # Ends of samples without loss are left out, where nothing counts them.
    row("qk_norm", "small", form="thd", loss_mask="tails", labels="absent", in_place="div"),
    row("qk_norm", "small", form="thd", loss_mask="tails", session="evaluate"),
    row("experts", "small", "ends left out", form="thd", loss_mask="tails"),
    row("experts both", "small", form="thd", loss_mask="tails"),
    *(row("qk_norm", "small", form="thd", labels="absent", hook="doubled", session=session)
      for session in ("once", "evaluate")),
]  # fmt: skip
"""Forms of model calls."""
UNLIKE: list[tuple[str, dict[str, str]]] = [
    ("attention_mask of a model call is not causal", {"mask": "future", "form": "rows"}),
    ("calls model.train() or model.eval()", {"session": "mode_in_step", "form": "rows"}),
    ("does not call the model", {"calls": "not_at_all", "ddp": "none"}),
]
"""What a forward step does, and what is said of it."""
NOT_SHARED = [
    replace(row("gqa"), mode="observe", expects="fallback"),
    replace(row("gqa", "no gain"), mode="auto", expects="fallback", says="speedup"),
    auto_row(table.TWO_CALLS.fix, model="replay slime", calls="reference_before"),
    replace(row("gqa", calls="twice"), expects="refused", says="more than once"),
    *(
        replace(
            row(name, session="evaluate_with_gradients"),
            expects="refused",
            says=table.FORWARD_COUNTS.name,
        )
        for name in ("expert_bias", "aux_loss")
    ),
    replace(row("mtp unused experts"), expects="refused", says=table.AHEAD_IDLE.name),
    *(
        replace(each, mode=mode, expects=expects, says=says)
        for each, mode, expects, says in (
            (row("kimi", form="thd_padded"), "on", "refused", table.KIMI_PADDED.name),
            (row("mtp", form="thd_padded"), "on", "refused", table.AHEAD_PADDED.name),
            (row("mtp", form="thd_padded"), "auto", "fallback", table.AHEAD_PADDED.fix),
        )
    ),
    replace(row("gqa", raises="data_ends"), expects="refused", says="data iterator ended after 7"),
    replace(row("gqa", session="mode_around_call"), expects="refused", says="model.train() or"),
    *(
        replace(row("gqa", **values), mode=mode, expects=expects, says=says)
        for says, values in UNLIKE
        for mode, expects in (("on", "refused"), ("auto", "fallback"))
    ),
]


@pytest.mark.parametrize(
    "each", filter(judge.is_possible, (*ROWS, *MTP, *CALLS, *NOT_SHARED)), ids=str
)
def test_a_step_is_the_stock_schedules(each):
    assert judge.complaints(each) == []


RANDOM = (
    *("gqa", "qk_norm", "mla", "gpt-oss", "windows last", "gdn", "mamba", "dsa", "mtp"),
    *("experts both", "experts bias", "experts all"),
)
SEEDS = 3
"""Of a model; HYPOTHESIS_PROFILE=search tries 200."""


@pytest.mark.parametrize("model", RANDOM)
def test_random_trees(model):
    failures = {
        str(each): lines
        for each in (random_row(model, seed) for seed in range(rounds(SEEDS, 200)))
        if (lines := judge.complaints(each))
    }
    assert not failures


def test_long_blocks_of_keys_in_pieces(monkeypatch):
    num, forward = [0], MathKernel.forward

    def counted(*args):
        num[-1] += 1
        return forward(*args)

    monkeypatch.setattr(MathKernel, "forward", counted)
    for most in (payload_map.PIECE_KEYS, 4):
        monkeypatch.setattr(payload_map, "PIECE_KEYS", most)
        assert judge.complaints(row("gqa", "recompute chunks")) == []
        num.append(0)
    assert num[1] > 1.5 * num[0] > 0


OF_STATES = {
    "own inputs in the tail": "chunks of 2", "sums of other rows": "a rollout a wave",
    "the last segment alone": "small packs",
}  # fmt: skip
"""Options in which mistakes with states show that others would hide."""
KINDS = (("mla", mistakes.LATENT), ("gpt-oss", mistakes.WINDOWS), ("dsa", mistakes.SPARSE))
OF_DELTA = ("other spans are seen", "gradients into other spans")
WRONG = [
    *(
        wrong("rows for tokens", "gradient auxiliary", name)
        for name in ("experts aux", "experts seq", "experts global", "experts z")
    ),
    wrong("rows for tokens", "state", "experts bias alone", tree="groups", form="rows"),
    wrong("rows for tokens", "gradient auxiliary", "experts both", recompute="full",
          returns="per_token"),
    wrong("waves for microbatches", "gradient auxiliary", "experts aux", "whole"),
    wrong("counts in no order", "gradient auxiliary", "experts global"),
    *(
        wrong(mistake, "gradient", model, OF_STATES.get(mistake, "whole"))
        for model in ("gdn", "mamba", "own delta global")
        for mistake in mistakes.STATES
        if (mistake in OF_DELTA) <= (model != "mamba")
        and (mistake == "padding makes steps") <= (model == "mamba")
        and (mistake == "sums of other rows") <= (model in ("gdn", "mamba"))
    ),
    *(
        wrong(mistake, "gradient", model, "chunks of 7")
        for model, table in KINDS
        for mistake in table
    ),
    wrong("suffixes send nothing", "gradient", "gqa", "joined"),
]  # fmt: skip


@pytest.mark.parametrize("each", WRONG, ids=str)
def test_a_mistake_shows(each):
    assert judge.complaints(each) == []
