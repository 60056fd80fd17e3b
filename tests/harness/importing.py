"""Files to import, a tokenizer that needs no package, and the imported rollouts."""

import json

import jinja2
import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.importers import import_file

BOS = 7


class Characters:
    """A tokenizer with one id a character and a ChatML-like template, `<` and `>` for its marks."""

    def __init__(self, *, forgets=False, end=">\n"):
        self.forgets = forgets
        self.end = end

    def encode(self, text, *, add_special_tokens=False):
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def render(self, messages, tools, add_generation_prompt):
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


class Jinja:
    """A tokenizer of one id a character with a template in Jinja, as models have it."""

    def __init__(self, template):
        def refuse(text):
            raise jinja2.TemplateError(text)

        self.template = jinja2.Environment(trim_blocks=True).from_string(template)
        self.template.globals["raise_exception"] = refuse
        self.num_renders = 0

    def encode(self, text, *, add_special_tokens=False):
        return [ord(letter) for letter in text]

    def render(self, messages, tools, add_generation_prompt):
        self.num_renders += 1
        return self.template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
        )


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def imported(path, row, kind, tokenizer=None):
    """The rollout of a row, which is alone in its file."""
    ((group),) = import_file(write(path, row), kind, tokenizer)
    (rollout,) = group.rollouts
    return rollout


def names(groups):
    return {group.name: [rollout.uid for rollout in group.rollouts] for group in groups}


def refused(path, kind, tokenizer=None, **options):
    with pytest.raises(UserError) as caught:
        list(import_file(path, kind, tokenizer, **options))
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}:")
