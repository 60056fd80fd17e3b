"""Files with something changed: imported or planned, or refused in one line and nothing written."""

import gzip
import itertools
import json
import random

import pytest

from megatron_prefix.lab.data import importers
from megatron_prefix.lab.data.rollouts import read_groups, write_rollouts
from megatron_prefix.lab.data.shorten import shorten
from tests.harness import fuzzing
from tests.harness.data import BUNDLED
from tests.harness.importing import Jinja

NUM_CASES = fuzzing.rounds(40, 3000)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role }} {{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}"
    "{% endfor %}>{% endfor %}{% if add_generation_prompt %}<assistant {% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}}
MORE = {"score": 1.0, "step": 1, "advantage": 0.5, "loss": True, "train": 1}
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
    {"role": "tool", "content": "1", "tool_call_id": "3"},
    {"role": "assistant", "content": "one", "weight": 1, "step_loss_mask": 1},
]
ROWS = {
    "verl": [
        {"input": "ab", "output": "xyz", "uid": "s_0_0"} | MORE,
        {"input": "ab", "output": "xz", "uid": "s_0_1", "remove_sample": False} | MORE,
        {"input": "cd", "output": "", "uid": "t"} | MORE,
    ],
    "messages": [
        {"messages": CONVERSATION, "tools": [{"name": "f"}], "group": group, "id": "x"} | MORE
        for group in ("a", "b", "a")
    ],
    "tokens": [
        {"prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1], "response_ids": [7, 8]} | MORE,
        {
            "input_ids": [0, 1, 2, 3, 4, 0], "attention_mask": [0, 1, 1, 1, 1, 0], "group": 1,
            "loss_mask": [0, 0, 0, 1, True, 0.0], "old_logprobs": [-0.5, -0.25],
        } | MORE,
        {"tokens": [1, 2, 3], "response_length": 1, "labels": [-100, -100, 3], "uid": 3} | MORE,
        {"tokens": [1, 2, 3], "prompt_len": 2, "response_mask": [1]} | MORE,
    ],
}  # fmt: skip


def changed(rng, kind):
    text = "\n".join(map(json.dumps, ROWS[kind]))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = fuzzing.changed_json_lines(rng, text)
        try:
            text = content.decode("utf-8")
            rows = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return content
        if not rows or not all(row and isinstance(row, dict) for row in rows):
            break
    content = text.encode("utf-8")
    how = rng.randrange(12)
    if how == 0:
        return b"\xef\xbb\xbf" + content
    if how == 1:
        return content.replace(b"\n", b"\r\n") + b"\r\n"
    if how == 2:
        packed = gzip.compress(content, mtime=0)
        return packed[: rng.randrange(len(packed))]
    if how == 3:
        return content.replace(b'"', b'"\\udc00', rng.randrange(9))
    if how == 4:
        return content + b"\n" + content
    return content


@pytest.mark.parametrize("kind", [*ROWS])
def test_a_changed_file_is_imported_or_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(importers, "load_tokenizer", lambda name: Jinja(TEMPLATE))
    path, folder = tmp_path / "in.jsonl", tmp_path / "out"
    folder.mkdir()
    out, bad, num_written = folder / "out.jsonl.gz", {}, 0
    for seed in range(NUM_CASES):
        path.write_bytes(changed(random.Random(seed), kind))
        fault = fuzzing.fault("import", kind, str(path), str(out), "--tokenizer", "any")
        if out.exists():
            num_written += 1
            fault = fault or ("" if [*read_groups(out)] else "no group")
            out.unlink()
        bad[seed] = fault or ", ".join(file.name for file in folder.iterdir())
    assert not {seed: fault for seed, fault in bad.items() if fault}
    assert NUM_CASES // 10 < num_written < NUM_CASES * 9 // 10


NUM_ROLLOUT_FILES = 300


def test_a_changed_file_is_planned_or_refused_in_one_line(tmp_path):
    path, bad = tmp_path / "rollouts.jsonl", {}
    groups = [shorten(group, 30)[0] for group in itertools.islice(read_groups(BUNDLED), 3)]
    write_rollouts(path, [group for group in groups if group])
    text = path.read_text("utf-8")
    for seed in range(NUM_ROLLOUT_FILES):
        rng = random.Random(seed)
        content = fuzzing.changed_json_lines(rng, text)
        if seed % 10 == 0:
            content = fuzzing.changed_bytes(rng, gzip.compress(content, mtime=0))
        path.write_bytes(content)
        options = ("--pp", "2", "--max-tokens", "20") if seed % 2 else ("--min-gain", "0")
        bad[seed] = fuzzing.fault("plan", str(path), "--json", *options)
    assert not {seed: fault for seed, fault in bad.items() if fault}
