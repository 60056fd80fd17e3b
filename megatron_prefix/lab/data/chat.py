"""Finds what a model wrote in a conversation: renders its beginnings with the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.data.dropped import check_messages, check_tools
from megatron_prefix.lab.data.jsonl import Fault, Row
from megatron_prefix.lab.data.messages import is_empty, is_trained, messages_of, tools_of
from megatron_prefix.lab.data.tokenizer import Message, Tokenizer

_NOT_THE_MODEL = (
    "system", "developer", "user", "tool", "function", "observation", "environment", "ipython",
)  # fmt: skip
"""Roles of messages that a model answers."""


def conversation_pieces(row: Row, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Cut the rendered `messages` of `row` into (text, trained), up to the last assistant turn.

    An assistant's turn is what the template adds after the generation prompt, without white space
    at the end, which is the template's. An empty turn is not trained. Where the last turn is empty
    or missing, the text ends with the generation prompt.

    Errors: `Fault`, also when the template leaves out a message or a part of one, or renders an
    earlier turn differently once others follow (as templates that drop earlier reasoning do): then
    no sequence holds what the model saw at every turn.
    """
    template = _Template(tokenizer, tools_of(row))
    messages = messages_of(row)
    turns = _turns(messages)
    done, num_checked = "", 0
    for turn in turns:
        before = template.prompt(messages[:turn])
        if not num_checked:
            check_tools(_Template(tokenizer, None).prompt, messages[:turn], template.tools, before)
        if turn == turns[-1] and (turn == len(messages) or is_empty(messages[turn])):
            check_messages(template.prompt, messages[:turn], num_checked, before)
            _check_unchanged(turn, done, before)
            yield before[len(done) :], False
            return
        after = template.conversation(messages[: turn + 1])
        check_messages(template.conversation, messages[: turn + 1], num_checked, after)
        _check_unchanged(turn, done, before)
        _check_unchanged(turn, before, after)
        end = max(len(before), len(after.rstrip()))
        yield before[len(done) :], False
        yield after[len(before) : end], is_trained(turn, messages[turn])
        done, num_checked = after[:end], turn + 1


def _turns(messages: Sequence[Message]) -> list[int]:
    """Where the assistant speaks; the end if it never does but could have."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if turns and turns[0] > 0:
        return turns
    if not turns and messages and messages[-1]["role"] in _NOT_THE_MODEL:
        return [len(messages)]
    where = "nothing before the first turn" if turns else "no turn"
    text = f"{where} of the assistant ({len(messages)} messages)"
    raise Fault("messages", f"{text}; give a prompt and an answer")


def _check_unchanged(turn: int, start: str, text: str) -> None:
    if not text.startswith(start):
        problem = f"message {turn}: the chat template changes what it rendered before it"
        fix = "use a template that keeps earlier turns, or import token ids (`import tokens`)"
        raise Fault("messages", f"{problem} ({shown(start[-24:])}); {fix}")


class _Template:
    """The tokenizer's chat template with the tools of a row; what it raises is a `Fault`."""

    def __init__(self, tokenizer: Tokenizer, tools: Any) -> None:
        self._tokenizer = tokenizer
        self.tools = tools

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that a model answers."""
        return self._rendered(messages, add_generation_prompt=True)

    def conversation(self, messages: Sequence[Message]) -> str:
        """The text of the messages alone."""
        return self._rendered(messages, add_generation_prompt=False)

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.render(messages, self.tools, add_generation_prompt)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  (a template may raise anything)
            text = f"the chat template refuses them ({shown(str(error), 120)})"
            raise Fault("messages", f"{text}; correct them or use another template") from None
