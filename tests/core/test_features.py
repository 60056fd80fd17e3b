"""The features: the core names none of them, and loads none before a step needs it."""

import ast
import contextlib
import functools
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix import features, parts
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.run import parts_of_call
from megatron_prefix.run.calls import Callbacks, ModelCall
from tests.core.test_rooms import in_fresh_interpreter
from tests.harness import data
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import assert_bitwise

RANK = SimpleNamespace()
PACKAGE = data.REPOSITORY / "megatron_prefix"
APART = ("lab/", "features/")
WORDS = {
    "across": r"across_step|[cC]ommunicator$|Crossing|Exchange(s$|M)|FinalStates|SpanSums|Carried",
    "context_parallel": r"ShardedA|Gathered[AK]|ExchangedL|key_sums|own_sums|runs_in_view",
    "chunk_lengths": r"ChunkChooser|_chunk_lengths|_FINALISTS",
    "dealing": r"\bDealt|[Cc]osts_of_length|_balance_batch|deal_whole", "dsa": r"dsa|DSA|indexer",
    "experts": r"[lL]edger|LogicalTokens|GroupCounts|sums_behind|TopKRouter|aux_loss_coeff",
    "graphs": r"graph_tokens|Graphs|(?i:graphed|cuda.?graph(?!able))",
    "overlap": r"Reductions|start_grad_sync",
    "mtp": r"StepAhead|LooksAhead|multi_token|eh_proj|mtp_kwargs",
    "replay": r"[rR]outer_?[rR]eplay|routing_replay|may_replay",
    "plan_files": r"PlanFile|(to|from)_csv|check_segments",
    "host": r"[oO]ffload(?!ing)|[hH]ost_?([lL]ayers|[aA]rena)|HostMemory",
    "qat": r"QUANTISER|[qQ]uantiser|bmm_quantizer|TensorQuantizer",
    "vision": r"[iI]mages|\b[vV]ision|[tT]ower|visual|deepstack",
    "recompute_act": r"ActivatedAgain|activates_again|recompute_act",
    "mla": r"\bMLA|[lL]atents|multi_latent|kv_up_proj|lora_rank",
    "windows": r"WindowKeys|window_keys|WINDOW_|window_attn",
    "kda": r"[kK]imi|\bkda\b|KIMI", "streams": r"hyper_?[cC]onnections|residual_streams",
    "recurrent": r"Recurrent|Mamba2|GatedDelta|gated_delta|LayerStates|_ssm_",
    "own_dsa": r"own_dsa|OwnDSA|OwnSparse|SparseMLA|PoolAttention|lighting_indexer",
    "own_gdn": r"own_gdn|own_delta|OwnGated|linear_attn|hf_forward", "verify": r"[Vv]erif|VERIF",
    "measure": r"[sS]topwatch|\b_?[mM]eters?\b|(Cost|Byte)Meter|Evidence|[oO]utlines",
    "totals": r"\bTotals?\b|\bPASSES\b",
    "watchdog": r"[Ww]atchdog", "watch": r"FirstStep|first_step|CallGraph|groups_beyond|WATCHED",
}  # fmt: skip
"""By feature what only it says: in a name, or in a string that is a value."""
STAYS = {
    "dsa": {"refusals/table.py"},
    "experts": {"layers/model.py", "refusals/table.py"},
    "graphs": {"config.py", "refusals/table.py"},
    "kda": {"refusals/table.py"},
    "host": {
        "config.py", "parts.py", "plan/actions.py", "plan/memory.py", "plan/memory_policy.py",
        "plan/sizes.py", "plan/step_planner.py", "refusals/table.py",
        "run/execute/memory_control.py",
    },
    "mla": {"megatron/families.py", "refusals/table.py"},
    "mtp": {"run/execute/auxiliary.py"},
    "recompute_act": {
        "config.py", "plan/actions.py", "plan/cost.py", "plan/memory.py", "plan/memory_policy.py",
        "plan/sizes.py",
    }, "qat": {"layers/attention.py", "refusals/table.py"}, "recurrent": {"refusals/table.py"},
    "replay": {"refusals/table.py", "run/read/model_walk.py"},
    "verify": {"config.py", "refusals/table.py", "trainers/versions.py"},
    "vision": {"refusals/table.py"}, "watchdog": {"config.py"}, "windows": {"refusals/table.py"},
}  # fmt: skip
"""Files of the core that name a feature all the same: refusals, options and what trainers can do
have one place each, policies of segments are words of a plan that planning prices and predicts, a
walk of a model passes by attributes that other files look at, all auxiliary losses get their scales
in one place, planning asks a model's options whether routers count tokens, and whoever runs a
version of a trainer that was not tested is told what to set."""


@functools.cache
def _core():
    """Names of every file of the core, a line each: of what is neither in the lab nor in a
    feature."""
    paths = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    return {
        name: "\n".join({*_names(ast.parse(path.read_text(encoding="utf-8")))})
        for name, path in paths.items()
        if not name.startswith(APART)
    }


def _names(tree):
    """Every name of a file, and every string that is a value."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}."
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def _naming(pattern):
    return {file for file, names in _core().items() if re.search(pattern, names, re.M)}


def test_every_folder_of_a_feature_is_in_the_table():
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py")}
    table = (*features.KINDS, *features.PARTS, *features.AROUND)
    paths = [
        *(feature.path for feature in table), features.CHUNK_LENGTHS, features.DEALING,
        features.PLAN_FILE, features.COST_FILE,
    ]  # fmt: skip
    assert {path.split(".")[2] for path in paths} == folders == WORDS.keys()


@pytest.mark.parametrize("name", WORDS)
def test_nothing_in_the_core_names_a_feature(name):
    assert _naming(WORDS[name]) == STAYS.get(name, set())


def test_the_core_imports_the_table_of_features_only():
    assert _naming(r"megatron_prefix\.features\.") == set()


def test_the_package_loads_no_feature():
    """And the numbers of a model load its own kinds of layers."""
    in_fresh_interpreter(
        "import sys, megatron_prefix\n"
        "from types import SimpleNamespace\n"
        "from megatron_prefix.layers.model import layers_of\n"
        "def loaded():\n"
        "    prefix = 'megatron_prefix.features.'\n"
        "    return {n.split('.')[2] for n in sys.modules if n.startswith(prefix)}\n"
        "layers_of(SimpleNamespace(num_layers=2))\n"
        "assert loaded() == set(), loaded()\n"
        "layers_of(SimpleNamespace(), 'M-')\n"
        "assert loaded() == {'recurrent'}, loaded()\n"
        "layers_of(SimpleNamespace(num_layers=2, num_moe_experts=4))\n"
        "assert loaded() == {'recurrent', 'experts'}, loaded()\n"
    )


PLAIN_STEPS = """
import dataclasses, sys, tempfile
import megatron_prefix
from benchmarks import step_trace
from megatron.core import parallel_state
def known(*, prefix_config): return megatron_prefix.PrefixSchedule(prefix_config)
megatron_prefix.get_forward_backward_func = known
before = set()
for name, kind in KINDS.items():
    case = step_trace.CASES[name]
    case = dataclasses.replace(case, options={**case.options, "watchdog_minutes": 0})
    with tempfile.TemporaryDirectory() as folder, step_trace.joined(case, 0, folder) as device:
        _, step = step_trace.prepared(case, device, folder)
        step()
    parallel_state.destroy_model_parallel()
    prefix = "megatron_prefix.features."
    loaded = {name.split(".")[2] for name in sys.modules if name.startswith(prefix)}
    assert loaded - before == {*kind.split()}, (name, loaded - before)
    before = loaded

from megatron_prefix import PrefixConfig, PrefixSchedule

def more(looks_first=False, **options):
    PrefixSchedule(PrefixConfig(**options), looks_first=looks_first)
    names = {n.split(".")[2] for n in sys.modules if n.startswith(prefix)}
    return names - before - {"across"}

off = dict(watchdog_minutes=1, verify=2, mode="off")
assert more(**off) == more(watchdog_minutes=0) == set()
assert more(watchdog_minutes=0, verify=2, mode="observe") == set()
assert more() == {"watchdog"}
assert more(verify=1) == {"watchdog", "verify"}
assert more(looks_first=True, mode="off") == {"watchdog", "verify"}
assert more(looks_first=True) == {"watchdog", "verify", "watch", "totals"}
"""
KINDS = {
    "dense-tree": "", "experts": "experts", "hybrid-delta": "recurrent", "latent": "mla",
    "windows": "windows",
}  # fmt: skip


def test_a_step_without_a_feature_enters_no_line_of_it():
    """It does not even import it; a model's own kinds of layers it does, and those of options."""
    command = [sys.executable, "-W", "ignore", "-c", f"KINDS = {KINDS}\n{PLAIN_STEPS}"]
    done = subprocess.run(command, cwd=data.REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def feature(path, *, needed):
    return features.Feature("a feature", path, lambda *_: True, needed)


@pytest.mark.parametrize(("mode", "needed"), [("auto", True), ("on", True), ("on", False)])
def test_a_feature_that_cannot_be_imported_is_in_the_way(monkeypatch, mode, needed):
    monkeypatch.setattr(features, "PARTS", (feature("no.such.module:Part", needed=needed),))
    with pytest.raises(CannotShare, match=r"^a feature cannot be imported \(ModuleNotFoundError"):
        parts_of_call.chosen(PrefixConfig(mode=mode), RANK, Callbacks())


def test_what_only_makes_steps_faster_is_left_out(monkeypatch, caplog):
    missing = feature("no.such.module:Part", needed=False)
    overlap = next(one for one in features.PARTS if "overlap" in one.path)
    monkeypatch.setattr(features, "PARTS", (missing, overlap._replace(wanted=lambda *_: True)))
    for _ in range(2):
        (part,) = parts_of_call.chosen(PrefixConfig(mode="auto"), RANK, Callbacks())
        assert type(part).__name__ == "Overlap"
    assert [record.getMessage()[:22] for record in caplog.records] == ["a feature is left out:"]


def test_calls_that_need_a_missing_feature_are_stocks(monkeypatch, caplog):
    def always(*_):
        return True

    missing = features.FeatureAround("a feature", "no.such.module:Around", always)
    optional = missing._replace(name="another", needed=False)
    monkeypatch.setattr(features, "AROUND", (missing, optional))
    with one_rank():
        model = small_model()
        schedule = schedule_with(mode="auto")
        assert_bitwise(run(schedule, model), run(stock_schedule(), small_model()))
        assert schedule.report.decision.reason.startswith("a feature cannot be imported")
        with pytest.raises(CannotShare, match="another cannot be imported"):
            run(schedule_with(), model)
    assert "another is left out" in caplog.text


def test_a_keyword_of_a_call_brings_its_feature():
    """Embeddings of a model without images, too."""
    rank = SimpleNamespace(models=[], language_models=[])
    options = PrefixConfig(), rank, Callbacks()
    plain = ModelCall(0, {"input_ids": None, "extra_block_kwargs": {}})
    assert parts_of_call.missing([plain], ()) == []
    for name in features.TAKEN:
        for arguments in ({name: 1}, {"extra_block_kwargs": {name: 1}}):
            lacking = parts_of_call.missing([plain, ModelCall(1, arguments)], ())
            owner = "multi-token prediction" if name == "mtp_kwargs" else "images"
            assert [feature.name for feature in lacking] == [owner]
            made = parts_of_call.made(lacking, *options)
            assert parts_of_call.missing([ModelCall(1, arguments)], made) == []


def test_parts_around_an_action_are_left_if_one_fails():
    events = []

    class Part(parts.StepPart):
        @contextlib.contextmanager
        def action(self, action):
            events.append("begin")
            yield
            events.append("end")

    class Broken(parts.StepPart):
        def action(self, action):
            raise ValueError

    one = Part(PrefixConfig(), RANK, Callbacks())
    with parts.around([one, one], None):
        assert events == ["begin"] * 2
    assert events == ["begin"] * 2 + ["end"] * 2
    with contextlib.suppress(ValueError):
        parts.around([one, Broken(PrefixConfig(), RANK, Callbacks())], None)
    assert events == ["begin"] * 2 + ["end"] * 2 + ["begin"]
