"""`benchmarks.peers_step`: a group as one microbatch trains as its rollouts do."""

import json

import pytest
import torch

from benchmarks import peers_step
from benchmarks.peers_graph_step import packed_graph
from tests.harness.one_rank import one_rank

SMALL = "--device cpu --dtype float64 --model tiny-llama --layers 2 --repeats 1 --block 16"
SMALL += " --shape 40:12:3 --check-shape 24:8:3 --pack-tokens 120"


@pytest.fixture(autouse=True)
def _rank():
    with one_rank():
        yield


def run(tmp_path, *arguments):
    path = tmp_path / "out.json"
    options = peers_step.parse_arguments([*SMALL.split(), "--json", str(path), *arguments])
    code = peers_step.run(options)
    return code, json.loads(path.read_text(encoding="utf-8"))


def item(number, length, shared):
    """A rollout whose first positions are shared."""
    places = torch.arange(length)[None]
    own = (places >= shared) * 100 * number
    return {
        "tokens": places + own, "labels": places + 1 + own, "position_ids": places,
        "loss_mask": (places >= shared).float(), "advantages": (places >= shared).double(),
        "group": "g", "uid": str(number),
    }  # fmt: skip


def test_losses_and_gradients_are_the_stock_schedules(tmp_path):
    code, report = run(tmp_path)
    assert code == 0
    graphs = {name: report["verdicts"][name] for name in ("prefix", "graph", "graph, answers")}
    for verdict in graphs.values():
        assert verdict["passed"] and verdict["compared"]["gradients"] > 10
        assert verdict["compared"]["log-probs"] == 3 * 8
    assert [row["name"] for row in report["rows"]] == report["options"]["rows"].strip("[]'").split(
        "', '"
    )
    assert all(row["ms"] > 0 and row["times_prefix"] > 0 for row in report["rows"])


def test_positions_that_do_not_restart_are_found(tmp_path, monkeypatch):
    def straight(*arguments, **options):
        graph = packed_graph(*arguments, **options)
        graph.item["position_ids"] = torch.arange(graph.item["tokens"].shape[1])[None]
        return graph

    monkeypatch.setattr(peers_step, "packed_graph", straight)
    code, report = run(tmp_path, "--rows", "prefix")
    assert code == 1
    passed = {name: verdict["passed"] for name, verdict in report["verdicts"].items()}
    assert passed == {"prefix": True, "graph": False, "graph, answers": False}


def test_a_row_that_cannot_run_says_why_and_others_go_on(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(peers_step, "packed_attention", broken)
    code, report = run(tmp_path, "--rows", "graph;prefix")
    assert code == 1
    assert report["verdicts"]["graph"] == "cannot run: RuntimeError: no such kernel"
    graph, prefix = report["rows"]
    assert graph["reason"] == "cannot run: RuntimeError: no such kernel" and prefix["ms"] > 0


def test_a_packed_graph_has_one_prompt_and_its_last_token_each():
    items = [item(1, 5, 3), item(2, 6, 3)]
    whole = packed_graph(items, 3)
    assert whole.first == 0 and whole.lengths == (2, 3)
    assert whole.item["tokens"].tolist() == [[0, 1, 2, 103, 104, 203, 204, 205]]
    assert whole.item["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    answers = packed_graph(items, 3, multiple=4, answers_only=True)
    assert answers.first == 4
    assert answers.item["tokens"].tolist() == [[0, 1, 2, 0, 103, 104, 0, 0, 203, 204, 205, 0]]
    assert answers.item["labels"].tolist() == [[104, 105, 0, 0, 204, 205, 206, 0]]
    assert answers.item["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 1, 1, 0]]


def test_a_prompt_that_is_trained_is_refused():
    with pytest.raises(ValueError, match="trains no position of the prompt"):
        packed_graph([item(1, 5, 2), item(2, 6, 2)], 3)
