"""Files with something changed: imported or planned, or refused in one line and nothing written;
and chat templates that leave something out: the conversation that they render never was."""

import gzip
import itertools
import json
import random

import pytest

from megatron_prefix.lab.data import importers
from megatron_prefix.lab.data.importers import import_file
from megatron_prefix.lab.data.rollouts import read_groups, write_rollouts
from megatron_prefix.lab.data.shorten import shorten
from tests.harness import fuzzing
from tests.harness.data import BUNDLED
from tests.harness.importing import Jinja, imported, refused, write
from tests.lab.data.test_chat import say

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


HEAD = "{% for m in messages %}<{{ m.role }}>"
TAIL = "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
REASONING = "{% if m.reasoning_content %}[{{ m.reasoning_content | trim }}]{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
WHOLE = TOOLS + HEAD + REASONING + "{{ m.content | trim }}" + CALLS + TAIL


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def agent(**changes):
    """A conversation with everything that templates drop."""
    messages = [
        say("system", "be brief"), say("developer", "use tools"), say("user", "what?"),
        say("assistant", "", reasoning_content="hm ", tool_calls=[call("f", a=1), call("g", b=2)]),
        say("tool", "42"), say("assistant", "it is 42"),
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f"}}]
    return {"messages": messages, "tools": tools, "reward": 1.0, **changes}


def text_of(path, template):
    ((group),) = import_file(path, "messages", Jinja(template))
    return "".join(map(chr, group.rollouts[0].tokens.tolist()))


@pytest.mark.parametrize(("template", "said"), [
    (WHOLE.replace(HEAD, "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>"),
     "messages: message 4 (tool): the chat template drops its content"),
    (WHOLE.replace("{{ m.content | trim }}", "{{ m.content if m.role != 'system' }}"),
     "messages: message 0 (system): the chat template drops its content"),
    (WHOLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
     "messages: message 3 (assistant): the chat template drops its tool call 1"),
    (WHOLE.replace(REASONING, ""),
     "messages: message 3 (assistant): the chat template drops its reasoning"),
    (WHOLE.replace(TOOLS, ""), "tools: the chat template drops them"),
])  # fmt: skip
def test_what_a_template_drops_is_named(source, template, said):
    write(source, {"messages": [say("user", "a"), say("assistant", "b")], "reward": 1}, agent())
    assert refused(source, "messages", Jinja(template)).startswith(f"2: {said}; use the template")


@pytest.mark.parametrize(("template", "message", "said"), [
    # As DeepSeek-R1's, which keeps only what follows the thought.
    ("{{ m.content.split('</think>')[-1] }}", {"content": "<think>hm</think>yes"}, "reasoning"),
    ("{{ m.content[:3] }}", {"content": "yes, of course"}, "content"),
    ("{{ m.content }}", {"content": "yes", "thinking": "hm"}, "reasoning"),
    ("{{ m.content }}", {"content": None, "refusal": "I cannot"}, "refusal"),
    ("{{ m.content }}", {"content": "yes", "function_call": {"name": "f", "arguments": "{}"}},
     "function call"),
])  # fmt: skip
def test_parts_of_an_answer(source, template, message, said):
    row = {"messages": [say("user", "a"), {"role": "assistant", **message}], "reward": 1}
    text = refused(write(source, row), "messages", Jinja(HEAD + template + TAIL))
    place = "1: messages: message 1 (assistant)"
    assert text.startswith(f"{place}: the chat template drops its {said}; use")


@pytest.mark.parametrize(("template", "messages"), [
    # What a template rewrites it does not drop.
    (HEAD + "{{ m.content | upper }}" + TAIL, [say("user", "a"), say("assistant", "b")]),
    # Nor what it refuses to do without.
    (HEAD + "{% if m.role == 'user' and m.content != 'a' %}{{ raise_exception('no') }}{% endif %}"
     + "{{ m.content if m.role != 'user' }}" + TAIL,
     [say("user", "a"), say("assistant", "b")]),
    # A marked answer of a tool looks like a question (Qwen3), after which no thought is kept.
    ("{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and"
     " not m.content.endswith('</tool>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
     + HEAD + "{% if loop.index0 > ns.last %}" + REASONING + "{% endif %}{{ m.content }}" + TAIL,
     [say("user", "a"), say("assistant", "b", reasoning_content="hm"),
      say("user", "<tool>1</tool>"), say("assistant", "c", reasoning_content="so")]),
])  # fmt: skip
def test_what_a_template_keeps(source, template, messages):
    write(source, {"messages": messages, "reward": 1})
    assert text_of(source, template)


@pytest.mark.parametrize("spelling", [
    json.dumps, lambda calls: [json.dumps(part) for part in calls], lambda calls: calls,
], ids=["a string", "strings", "objects"])  # fmt: skip
def test_tool_calls_may_be_json_in_a_string(source, spelling):
    row = agent(tools=json.dumps(agent()["tools"]))
    row["messages"][3]["tool_calls"] = spelling(row["messages"][3]["tool_calls"])
    assert text_of(write(source, row), WHOLE) == text_of(write(source, agent()), WHOLE)


def test_a_null_that_would_be_written(source):
    """GLM-4.6's template writes None for what the chat API gives beside a tool call."""
    row = agent()
    row["messages"][3]["content"] = None
    template = HEAD + REASONING + "{{ m.content }}" + CALLS + TAIL
    write(source, row | {"tools": None})
    text = refused(source, "messages", Jinja(template))
    said = "message 3 (assistant): the chat template writes its null content as None; give an empty"
    assert text.startswith(f"1: messages: {said}")
    asked = template.replace(
        "{{ m.content }}", "{% if m.content is not none %}{{ m.content }}{% endif %}"
    )
    assert "None" not in text_of(source, asked)


@pytest.mark.parametrize("turns", [
    [say("assistant", None)], [{"role": "assistant"}], [say("assistant", "")],
    [say("assistant", "", tool_calls=[])], [],
], ids=str)  # fmt: skip
def test_an_empty_answer_is_a_rollout_that_is_not_trained(source, turns):
    """R1's and QwQ's templates begin a thought; null is a TypeError here."""
    template = HEAD + "{{ '' + m.content }}" + TAIL.replace("<assistant>", "<assistant><think>")
    row = {"messages": [say("user", "a"), *turns], "reward": 0.5}
    rollout = imported(source, row, "messages", Jinja(template))
    assert (rollout.loss, rollout.reward, rollout.prompt_len) == ((), 0.5, len(rollout))
    text = "".join(map(chr, rollout.tokens.tolist()))
    assert text.startswith("<user>a<end><assistant>")


def test_a_null_is_absent(source):
    """Tables have every column in every row; Llama 3.1's template asks for keys."""
    template = HEAD + "{% if 'tool_calls' in m %}{{ raise_exception('no call') }}{% endif %}" + (
        "{% if m.reasoning_content is defined %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}"
    ) + TAIL  # fmt: skip
    nulls = {"tool_calls": None, "reasoning_content": None, "name": None}
    turns = [say("user", "a", **nulls), say("assistant", "b", **nulls)]
    write(source, {"messages": turns, "reward": 1})
    assert text_of(source, template) == "<user>a<end><assistant>b<end>"
