"""`benchmarks.peers` on the CPU: values are compared, and one peer does not stop the others."""

import functools
import json

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import peers, peers_flex
from benchmarks.bench_kernels import parse_shapes
from benchmarks.peers_attention import pairs
from benchmarks.peers_flex import PADDING, documents, packed_attention
from megatron_prefix.lab.numerics import assert_close

SMALL = "--device cpu --dtype float32 --heads 4 --kv-heads 2 --dim 16 --repeats 1 --warm-up 1"
SMALL += " --shapes 3x48x16 --check-shape 3x40x16 --segment-tokens 32 --dense-tokens 130"
PEERS = ["ours", "dense-flash_cpu", "dense-math", "flex", "repeated-math", "grouper-math"]


def run(tmp_path, *arguments):
    path = tmp_path / "out.json"
    code = peers.main([*SMALL.split(), "--json", str(path), *arguments])
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_every_peer_computes_the_same(tmp_path, capsys):
    code, report = run(tmp_path, "--peers", ",".join(PEERS))
    assert code == 0
    wrong = report["wrong"]
    missing = (wrong.pop("grouper-math") or "").removeprefix("cannot run: ")
    assert not missing or missing.startswith("ModuleNotFoundError")  # the package is optional
    assert wrong == dict.fromkeys(PEERS[:-1])
    rows = {row["peer"]: row for row in report["rows"]}
    assert list(rows) == PEERS
    assert all(rows[name]["total_ms"] > 0 for name in PEERS[:-1])
    (summary,) = report["summary"]
    assert summary["flop_ratio"] == pytest.approx(1.6)
    fastest = min(rows["dense-math"]["total_ms"], rows["dense-flash_cpu"]["total_ms"])
    assert summary["speedup"] == pytest.approx(fastest / rows["ours"]["total_ms"])
    assert "1.00x ours" in capsys.readouterr().out


def test_a_peer_that_differs_is_not_timed_and_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_flex, "PROMPT", 1)  # answers see the first answer
    packed_attention.cache_clear()
    code, report = run(tmp_path, "--peers", "flex,ours")
    packed_attention.cache_clear()
    assert code == 1
    assert report["wrong"]["flex"].startswith("DIFFERS: out: relative error")
    flex, ours = report["rows"]
    assert flex["total_ms"] is None and flex["reason"].startswith("DIFFERS")
    assert ours["total_ms"] > 0


def test_a_peer_that_cannot_run_says_why_and_others_go_on(tmp_path, capsys):
    code, report = run(tmp_path, "--peers", "dense-cudnn,nobody,ours")
    assert code == 0
    cudnn, nobody, ours = report["rows"]
    assert cudnn["reason"].startswith("cannot run: UserError: attention kernel 'cudnn'")
    assert nobody["reason"] == "cannot run: UserError: peer 'nobody': give some of those in --help"
    assert ours["total_ms"] > 0
    assert nobody["reason"] in capsys.readouterr().out


def test_the_run_fails_without_ours(tmp_path):
    code, report = run(tmp_path, "--peers", "dense-math", "--kernel", "cudnn")
    assert code == 1 and report["wrong"]["ours"].startswith("cannot run: UserError")


def test_flop_ratios_of_dualkvs_shapes():
    shapes = parse_shapes(peers.DUALKV)
    assert [round(pairs(s, True) / pairs(s, False), 2) for s in shapes] == [1.75, 4.2, 5.9]


def test_documents_are_padded_one_by_one():
    assert documents(3, [2, 1]).tolist() == [0, 0, 0, 1, 1, 2]
    padded = [0, 0, 0, PADDING, 1, 1, 1, 1, 2, 2, 2, 2]
    assert documents(3, [3, 1], 4).tolist() == padded


def test_flex_attention_computes_what_the_whole_mask_does():
    """Its forward, not compiled; it has no backward on the CPU."""
    packed = packed_attention(200, (70, 90), 128, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(512, heads, 16, generator=draw) for heads in (4, 2, 2))
    assert packed.block_mask.sparsity() > 40
    expected = packed(q, k, v, 0.25)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    by_flex = functools.partial(packed.flex, flex_attention)
    found = by_flex(*heads, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
    assert_close(found, expected, 512)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        by_flex(*(x.requires_grad_() for x in heads), scale=0.25, enable_gqa=True)
