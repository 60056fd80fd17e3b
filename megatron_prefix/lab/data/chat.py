"""Finds what a model wrote in a conversation: renders its beginnings with the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.data import jsonl
from megatron_prefix.lab.data.jsonl import Fault, Row
from megatron_prefix.lab.data.tokenizer import Message, Tokenizer


def conversation_pieces(row: Row, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Cut the rendered `messages` of `row` into (text, trained), up to the last assistant turn.

    An assistant's turn is what the template adds after the generation prompt, without white space
    at the end, which is the template's. Errors: `Fault`, also when the template renders an earlier
    turn differently once others follow (as templates that drop earlier reasoning do): then no
    sequence holds what the model saw at every turn.
    """
    messages = _messages(row)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        where = "no turn" if not turns else "nothing before the first turn"
        text = f"{where} of the assistant ({len(messages)} messages); give a prompt and an answer"
        raise Fault("messages", text)
    done = ""
    for turn in turns:
        before = _rendered(row, messages[:turn], tokenizer, add_generation_prompt=True)
        after = _rendered(row, messages[: turn + 1], tokenizer, add_generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            text = f"message {turn}: the chat template changes what it rendered before it"
            fix = "use a template that keeps earlier turns, or import kind tokens"
            raise Fault("messages", f"{text} ({shown(before[-24:])}); {fix}")
        end = max(len(before), len(after.rstrip()))
        yield before[len(done) :], False
        yield after[len(before) : end], messages[turn].get("weight") != 0
        done = after[:end]


def _rendered(
    row: Row, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool
) -> str:
    try:
        return tokenizer.render(messages, row.get("tools"), add_generation_prompt)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (a template may raise anything)
        text = f"the chat template refuses them ({shown(str(error), 120)})"
        raise Fault("messages", f"{text}; correct them or use another template") from None


def _messages(row: Row) -> list[Message]:
    messages = jsonl.required(row, "messages")
    if not isinstance(messages, list):
        raise Fault("messages", f"not a list ({shown(messages)}); give [{{role, content}}, ...]")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> Message:
    """One message as templates need it: text content, arguments of tool calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        text = f"message {index} has no role ({shown(message)}); give role and content"
        raise Fault("messages", text)
    result = dict(message)
    if isinstance(message.get("content"), list):
        result["content"] = "".join(_part(index, part) for part in message["content"])
    if isinstance(message.get("tool_calls"), list):
        result["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return result


def _part(index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Fault(
            "messages", f"message {index} is not text alone ({shown(part)}); give text parts"
        )
    return text


def _call(call: Any) -> Any:
    """A tool call; the chat API has its arguments as a JSON string, templates need the object.

    Invalid JSON stays a string: models do write broken calls, and they were trained on them.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
