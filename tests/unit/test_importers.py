"""Importers: groups, spans and prompts come out right, and what cannot be right is refused."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_prefix.data import tokenizer as tokenizers
from megatron_prefix.data.importers import KINDS, add_arguments, import_file, run
from megatron_prefix.data.rollouts import Group, Rollout, read_groups
from megatron_prefix.errors import UserError

BOS = 7
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Characters:
    """A tokenizer with one id a character and a ChatML-like template, `<` and `>` for its marks."""

    def __init__(self, *, forgets: bool = False, end: str = ">\n") -> None:
        self.forgets = forgets
        self.end = end

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        parts = [f"[{tool['name']}]" for tool in tools or []]
        for index, message in enumerate(messages):
            if message["role"] == "robot":
                raise KeyError("robot")
            body = message["content"] or ""
            if self.forgets and message["role"] == "assistant" and index < len(messages) - 1:
                body = body.split("THINK")[-1]
            for call in message.get("tool_calls", []):
                body += repr(call["function"]["arguments"])
            parts.append(f"<{message['role']} {body}{self.end}")
        return "".join(parts) + ("<assistant " if add_generation_prompt else "")


def text_of(rollout: Rollout) -> str:
    return "".join(map(chr, rollout.tokens.tolist()))


def trained(rollout: Rollout) -> list[str]:
    return [text_of(rollout)[start:end] for start, end in rollout.loss]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def names(groups: list[Group]) -> dict[str, list[str]]:
    return {group.name: [rollout.uid for rollout in group.rollouts] for group in groups}


def refused(path: Path, kind: str, tokenizer: Any = None, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(import_file(path, kind, tokenizer, **options))
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}:")


# verl ---------------------------------------------------------------------------------------------


def test_verl(source: Path) -> None:
    """Rows of one prompt are a group wherever they stand; another step is another group."""
    rows = [
        {"input": "ab", "output": "xyz", "gts": "3", "score": 1.0, "step": 1, "acc": True},
        {"input": "cd", "output": "x", "gts": "3", "score": 0, "step": 1},
        {"input": "ab", "output": "", "gts": "3", "score": -1, "step": 1},
        {"input": "ab", "output": "q", "gts": "3", "score": 0.5, "step": 2},
    ]
    groups = list(import_file(write(source, *rows), "verl", Characters()))
    assert names(groups) == {"prompt-0000": ["0", "1"], "prompt-0001": ["0"], "prompt-0002": ["0"]}
    first, second = groups[0].rollouts
    assert first.tokens.tolist() == [BOS, ord("a"), ord("b"), ord("x"), ord("y"), ord("z")]
    assert first.tokens.dtype == np.int32
    assert (first.prompt_len, first.loss, first.reward) == (3, ((3, 6),), 1.0)
    assert (second.prompt_len, second.loss, second.reward) == (3, (), -1.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": 3}, "2: input: not a string (3)"),
        ({"output": None}, "2: output: not a string (None)"),
        ({"score": None}, "2: reward: missing"),
        ({"score": "1"}, "2: score: not a number ('1')"),
        ({"output": chr(99)}, "2: tokens: token 3 is not in the vocabulary of 99 (99)"),
    ],
)
def test_verl_refuses(source: Path, changes: dict[str, Any], said: str) -> None:
    good = {"input": "ab", "output": "b", "score": 1.0}
    write(source, good, good | changes)
    assert refused(source, "verl", Characters(), vocab_size=99).startswith(said)


# Messages -----------------------------------------------------------------------------------------


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def conversation(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [say("user", "hi"), *turns], "reward": 1.0, **more}


def test_messages_train_the_assistant(source: Path) -> None:
    row = conversation(say("assistant", "one"), say("tool", "42"), say("assistant", "two"))
    row["tools"] = [{"name": "add"}]
    ((group),) = import_file(write(source, row), "messages", Characters())
    (rollout,) = group.rollouts
    expected = "[add]<user hi>\n<assistant one>\n<tool 42>\n<assistant two>"
    assert text_of(rollout) == expected
    assert trained(rollout) == ["one>", "two>"]
    assert rollout.prompt_len == len("[add]<user hi>\n<assistant ")


def test_messages_end_with_the_last_turn_and_skip_weight_zero(source: Path) -> None:
    row = conversation(
        say("assistant", "no", weight=0), say("user", "?"), say("assistant", "yes", weight=1),
        say("user", "bye"),
    )  # fmt: skip
    ((group),) = import_file(write(source, row), "messages", Characters())
    assert trained(group.rollouts[0]) == ["yes>"]
    assert text_of(group.rollouts[0]).endswith("<assistant yes>")
    assert group.rollouts[0].prompt_len == text_of(group.rollouts[0]).index("yes")


def test_messages_groups_and_names(source: Path) -> None:
    rows = [
        conversation(say("assistant", "a"), group="g", id="task"),
        conversation(say("assistant", "b"), id="x"),
        conversation(say("assistant", "c"), group="g", id="task"),
        conversation(say("assistant", "d"), id="x", advantage=0.25),
        conversation(say("assistant", "e"), group_id=4, uid="u", score=3),
    ]
    for row in rows[4:]:
        del row["reward"]
    groups = list(import_file(write(source, *rows), "messages", Characters()))
    assert names(groups) == {"g": ["task", "task#1"], "prompt-0000": ["x", "x#1"], "4": ["u"]}
    assert [r.advantage for r in groups[1].rollouts] == [None, 0.25]
    assert groups[2].rollouts[0].reward == 3.0


def test_messages_of_the_chat_api(source: Path) -> None:
    """Text parts are joined and arguments of tool calls become objects, broken ones stay text."""
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"a": 1}', "{broken", {"b": 2})
    ]
    row = conversation(
        say("user", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]),
        say("assistant", None, tool_calls=calls),
    )
    ((group),) = import_file(write(source, row), "messages", Characters())
    assert "<user xy>" in text_of(group.rollouts[0])
    assert trained(group.rollouts[0]) == ["{'a': 1}'{broken'{'b': 2}>"]


def test_an_empty_turn_trains_nothing(source: Path) -> None:
    row = conversation(say("assistant", ""), say("assistant", "x"))
    ((group),) = import_file(write(source, row), "messages", Characters(end=""))
    assert trained(group.rollouts[0]) == ["x"]
    assert text_of(group.rollouts[0]) == "<user hi<assistant <assistant x"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"reward": 1}, "messages: missing"),
        ({"messages": "hi", "reward": 1}, "messages: not a list"),
        ({"messages": ["hi"], "reward": 1}, "messages: message 0 has no role ('hi')"),
        ({"messages": [{"content": "x"}], "reward": 1}, "messages: message 0 has no role"),
        (conversation(), "messages: no turn of the assistant (1 messages)"),
        (
            {"messages": [say("assistant", "x")], "reward": 1},
            "messages: nothing before the first turn of the assistant",
        ),
        (
            conversation(say("robot", ""), say("assistant", "")),
            "messages: the chat template refuses",
        ),
        (
            conversation(say("user", [{"type": "image_url"}]), say("assistant", "")),
            "messages: message 1 is not text alone",
        ),
        (
            conversation(say("assistant", "x")) | {"reward": float("nan")},
            "reward: not finite (nan)",
        ),
    ],
)
def test_messages_refuse(source: Path, row: dict[str, Any], said: str) -> None:
    write(source, conversation(say("assistant", "fine")), row)
    assert refused(source, "messages", Characters()).startswith(f"2: {said}")


def test_a_template_that_forgets_is_refused(source: Path) -> None:
    """Templates that drop earlier reasoning show the model a sequence no single row can hold."""
    once = conversation(say("assistant", "hmTHINKyes"))
    twice = conversation(say("assistant", "hmTHINKyes"), say("user", "?"), say("assistant", "ok"))
    write(source, once, twice)
    message = refused(source, "messages", Characters(forgets=True))
    assert message.startswith("2: messages: message 3: the chat template changes what")
    assert "import kind tokens" in message


# Token ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6], "loss_mask": [1, 0, 1, 1]},
        {"prompt_token_ids": [1, 2], "completion_ids": [3, 4, 5, 6], "response_mask": [1, 0, 1, 1]},
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 0, 1, 1]},
        {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, 3, -100, 5, 6]},
        {"tokens": [1, 2, 3, 4, 5, 6], "response_length": 4, "loss_mask": [1, 0, 1, 1]},
        {"tokens": [1, 2, 3, 4, 5, 6], "prompt_len": 2, "labels": [3, -100, 5, 6]},
    ],
)
@pytest.mark.parametrize("logprobs", [[-1.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0]])
def test_tokens(source: Path, row: dict[str, Any], logprobs: list[float]) -> None:
    write(source, row | {"reward": 1, "rollout_log_probs": logprobs})
    ((group),) = import_file(source, "tokens")
    (rollout,) = group.rollouts
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (rollout.prompt_len, rollout.loss) == (2, ((2, 3), (4, 6)))
    assert rollout.old_logprobs is not None
    assert rollout.old_logprobs.tolist() == [-1.0, -3.0, -4.0]


def test_tokens_without_a_mask_train_the_response(source: Path) -> None:
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [3, 4], "score": 0.5, "group_index": 0},
        {"tokens": [1, 2, 5], "response_length": 1, "score": 1, "group_index": 0},
        {"prompt_ids": [1, 2], "response_ids": [], "score": 1, "group_index": 0},
    ]
    ((group),) = import_file(write(source, *rows), "tokens")
    assert [r.loss for r in group.rollouts] == [((2, 4),), ((2, 3),), ()]
    assert names([group]) == {"0": ["0", "1", "2"]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "tokens: missing"),
        ({"prompt_ids": [1, 2]}, "response_ids: missing"),
        ({"input_ids": [1, 2, 3]}, "loss_mask: missing (nothing tells what is trained)"),
        ({"input_ids": [1, -2, 3], "prompt_len": 1}, "input_ids: token 1 is negative (-2)"),
        ({"input_ids": [1, 2, 3], "prompt_len": 0}, "prompt_len: outside 1..3"),
        ({"input_ids": [1, 2, 3], "response_length": 4}, "prompt_len: outside 1..3"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}, "prompt_len: outside 1..3"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss_mask: neither as long as"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}, "loss_mask: holds something else than"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "prompt_len": 2}, "loss: span over the"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels: differ from the tokens"),
        ({"input_ids": [1, 9, 3], "prompt_len": 1}, "tokens: token 1 is not in the vocabulary"),
        (
            {"input_ids": [1, 2, 3], "prompt_len": 1, "old_logprobs": [-1.0]},
            "old_logprobs: not one for each of 2 trained tokens (1)",
        ),
    ],
)
def test_tokens_refuse(source: Path, row: dict[str, Any], said: str) -> None:
    write(source, {"input_ids": [1, 2], "prompt_len": 1, "reward": 1}, row | {"reward": 1})
    assert refused(source, "tokens", vocab_size=9).startswith(f"2: {said}")


# Options and command line -------------------------------------------------------------------------


def test_options_are_named(source: Path) -> None:
    write(source, {"input": "ab", "output": "b", "score": 1.0})
    assert refused(source, "chat").startswith("KIND: unknown ('chat')")
    for kind in ("verl", "messages"):
        assert refused(source, kind).startswith(f"--tokenizer: missing for {kind}")


def test_a_missing_package_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    write(source, {"input": "ab", "output": "b", "score": 1.0})
    monkeypatch.setattr(tokenizers.importlib, "import_module", absent)
    assert "pip install tokenizers" in refused(source, "verl", "tokenizer.json")
    assert "pip install transformers" in refused(source, "verl", "some/name")


def test_command_line(source: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = tmp_path / "out.jsonl.gz"
    write(source, {"input_ids": [1, 2, 3], "prompt_len": 1, "reward": 1})
    args = parser.parse_args(["tokens", str(source), str(out), "--vocab-size", "4"])
    assert run(args) == {"path": str(out), "groups": 1, "rollouts": 1, "tokens": 3}
    assert [len(group.rollouts) for group in read_groups(out)] == [1]
    args = parser.parse_args(["tokens", str(source), str(tmp_path / "no.gz"), "--vocab-size", "3"])
    with pytest.raises(UserError, match="vocabulary of 3"):
        run(args)
    assert not (tmp_path / "no.gz").exists()
    assert set(KINDS) == {"verl", "messages", "tokens"}


# Real tokenizers, where installed -----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small tokenizer in the files of a model folder: one token a byte, and ChatML's marks."""
    package = pytest.importorskip("tokenizers")
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    model = package.models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[])
    fast = package.Tokenizer(model)
    fast.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = package.decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    fast.post_processor = package.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 258)]
    )
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    fast.save(str(model_folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model_folder


def test_a_tokenizer_file(source: Path, folder: Path) -> None:
    write(source, {"input": "é", "output": "ab", "score": 1.0})
    file = folder / "tokenizer.json"
    ((group),) = import_file(source, "verl", str(file))
    (rollout,) = group.rollouts
    assert rollout.tokens[0] == 258
    assert (len(rollout), rollout.prompt_len, rollout.loss) == (5, 3, ((3, 5),))
    write(source, conversation(say("assistant", "one")))
    assert "no chat template" in refused(source, "messages", str(file))
    for path, said in ((folder / "no.json", "no such file"), (source, "cannot be loaded")):
        assert said in refused(source, "verl", str(path))
    file.write_text("{}")
    assert "cannot be loaded" in refused(source, "verl", str(file))


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "jinja2")),
    reason="transformers and jinja2 are not installed",
)
def test_a_model_folder(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    row = conversation(
        say("assistant", "one", tool_calls=calls), say("tool", "42"), say("assistant", "two")
    )
    ((group),) = import_file(write(source, row), "messages", str(folder))
    (rollout,) = group.rollouts
    pieces = [
        fast.decode(rollout.tokens[start:end].tolist(), skip_special_tokens=False)
        for start, end in ((0, rollout.prompt_len), *rollout.loss)
    ]
    assert pieces == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        'one{"a": 1}<|im_end|>',
        "two<|im_end|>",
    ]
    assert "cannot be loaded" in refused(source, "messages", str(folder / "missing"))
