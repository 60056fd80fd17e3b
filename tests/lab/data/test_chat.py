"""Importing conversations: what is trained, what is refused, and real tokenizers."""

import importlib
import importlib.util
import json

import pytest

from megatron_prefix.lab.data.importers import import_file
from tests.harness.importing import Characters, imported, refused, write

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_of(rollout):
    return "".join(map(chr, rollout.tokens.tolist()))


def trained(rollout):
    return [text_of(rollout)[start:end] for start, end in rollout.loss]


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def conversation(*turns, **more):
    return {"messages": [say("user", "hi"), *turns], "reward": 1.0, **more}


def test_messages_train_the_assistant(source):
    row = conversation(say("assistant", "one"), say("tool", "42"), say("assistant", "two"))
    row["tools"] = [{"name": "add"}]
    rollout = imported(source, row, "messages", Characters())
    expected = "[add]<user hi>\n<assistant one>\n<tool 42>\n<assistant two>"
    assert text_of(rollout) == expected
    assert trained(rollout) == ["one>", "two>"]
    assert rollout.prompt_len == len("[add]<user hi>\n<assistant ")


def test_messages_end_with_the_last_turn_that_is_trained(source):
    row = conversation(
        say("assistant", "no", weight=0), say("user", "?"), say("assistant", "nor", loss=False),
        say("user", "?"), say("assistant", "not", step_loss_mask=0), say("user", "?", loss=False),
        say("assistant", "yes", weight=1, train=None), say("user", "bye"),
    )  # fmt: skip
    rollout = imported(source, row, "messages", Characters())
    assert trained(rollout) == ["yes>"]
    assert text_of(rollout).endswith("<assistant yes>")
    assert rollout.prompt_len == text_of(rollout).index("yes")


def test_messages_of_the_chat_api(source):
    """Text parts are joined and arguments of tool calls become objects, broken ones stay text."""
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"a": 1}', "{broken", {"b": 2})
    ]
    row = conversation(
        say("user", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]),
        say("assistant", None, tool_calls=calls),
    )
    rollout = imported(source, row, "messages", Characters())
    assert "<user xy>" in text_of(rollout)
    assert trained(rollout) == ["{'a': 1}'{broken'{'b': 2}>"]


@pytest.mark.parametrize(("row", "said"), [
    ({"reward": 1}, "messages: missing"),
    ({"messages": "hi", "reward": 1}, "messages: not a list"),
    ({"messages": [{"content": "x"}], "reward": 1}, "messages: message 0 has no role"),
    (conversation(say("model", "x")), "messages: no turn of the assistant (2 messages)"),
    ({"messages": [say("assistant", "x")], "reward": 1},
     "messages: nothing before the first turn of the assistant"),
    (conversation(say("robot", ""), say("assistant", "")), "messages: the chat template refuses"),
    (conversation(say("user", [{"type": "image_url"}]), say("assistant", "")),
     "messages: message 1 is not text alone"),
])  # fmt: skip
def test_messages_refuse(source, row, said):
    write(source, conversation(say("assistant", "fine")), row)
    assert refused(source, "messages", Characters()).startswith(f"2: {said}")


def test_a_template_that_forgets_is_refused(source):
    """Templates that drop earlier reasoning show the model a sequence no single row can hold."""
    once = conversation(say("assistant", "hmTHINKyes"))
    twice = conversation(say("assistant", "hmTHINKyes"), say("user", "?"), say("assistant", "ok"))
    write(source, once, twice)
    message = refused(source, "messages", Characters(forgets=True))
    assert message.startswith("2: messages: message 3: the chat template changes what")
    assert "import tokens" in message


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small tokenizer in the files of a model folder: one token a byte, and ChatML's marks."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


def test_a_tokenizer_file(source, folder):
    file = folder / "tokenizer.json"
    rollout = imported(source, {"input": "é", "output": "ab", "score": 1.0}, "verl", str(file))
    assert rollout.tokens[0] == 258
    assert (len(rollout), rollout.prompt_len, rollout.loss) == (5, 3, ((3, 5),))
    write(source, conversation(say("assistant", "one")))
    assert "no chat template" in refused(source, "messages", str(file))
    for path, said in ((folder / "no.json", "no such file"), (source, "cannot be loaded")):
        assert said in refused(source, "verl", str(path))
    file.write_text("{}", encoding="utf-8")
    assert "cannot be loaded" in refused(source, "verl", str(file))


HUB = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "jinja2")),
    reason="transformers and jinja2 are not installed",
)
FORMS = pytest.mark.parametrize("form", ["tokenizer.json", pytest.param("", marks=HUB)])


@FORMS
def test_stored_truncation_and_padding_are_not_applied(source, folder, capfd, form):
    cut = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    for name, changes in (
        ("tokenizer.json", {"truncation": cut, "padding": pad}),
        ("tokenizer_config.json", {"model_max_length": 16}),
    ):
        values = json.loads((folder / name).read_text("utf-8")) | changes
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    row = {"input": "a" * 51, "output": "b", "score": 1.0}
    rollout = imported(source, row, "verl", str(folder / form))
    assert (len(rollout), rollout.prompt_len, rollout.loss) == (53, 52, ((52, 53),))  # with BOS
    assert capfd.readouterr().err == ""


@FORMS
def test_nothing_is_put_between_prompt_and_answer(source, folder, form):
    """BOS begins a text, EOS ends it; a prompt that says BOS has it once."""
    fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.post_processor = importlib.import_module("tokenizers").processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 258), ("<|im_end|>", 257)]
    )
    fast.save(str(folder / "tokenizer.json"))
    ids = fast.encode("abcd", add_special_tokens=False).ids
    rows = [
        {"input": text, "output": "cd", "score": 1.0} for text in ("ab", "<s>ab", "ab<|im_end|>")
    ]
    ((first, second, third)) = [
        rollout.tokens.tolist()
        for group in import_file(write(source, *rows), "verl", str(folder / form))
        for rollout in group.rollouts
    ]
    assert first == second == [258, *ids]
    assert third == [258, *ids[:2], 257, *ids[2:]]


@HUB
def test_no_space_is_put_between_pieces(source, folder):
    """SentencePiece puts one before a text, so a piece of a conversation must not be one."""
    package = importlib.import_module("tokenizers")
    letters = [*map(chr, range(33, 127)), "\u2581", "\n"]
    model = package.models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[])
    fast = package.Tokenizer(model)
    fast.pre_tokenizer = package.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.save(str(folder / "tokenizer.json"))
    template = CHAT_TEMPLATE.replace("<|im_end|>", " </s>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    row = conversation(say("assistant", "one"), say("user", "?"), say("assistant", " two"))
    rollout = imported(source, row, "messages", str(folder))
    text = "".join(letters[token] for token in rollout.tokens)
    start, end = "<|im_start|>", "\u2581</s>"
    assert text == (
        f"\u2581{start}user\nhi{end}\n{start}assistant\none{end}\n"
        f"{start}user\n?{end}\n{start}assistant\n\u2581two{end}"
    )


@HUB
def test_a_model_folder(source, folder):
    fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    row = conversation(
        say("assistant", "one", tool_calls=calls), say("tool", "42"), say("assistant", "two")
    )
    rollout = imported(source, row, "messages", str(folder))
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
