"""What of a conversation a model wrote, found by rendering its beginnings with its template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_prefix.data import jsonl
from megatron_prefix.data.jsonl import Fault, Row
from megatron_prefix.data.tokenizer import Message, Tokenizer
from megatron_prefix.errors import UserError, shown


def conversation_pieces(row: Row, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Cut the rendered `messages` of `row` into (text, is it trained), to the last assistant turn.

    A turn of the assistant is what the template adds to the generation prompt that stands before
    it, white space at the end aside: the template's, not the model's. Errors: `Fault`, also when
    the template renders a turn differently once others follow (as those do that drop earlier
    reasoning), since then no one sequence holds what the model saw at every turn.
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
    except Exception as error:  # noqa: BLE001  (a template is a program, it raises what it likes)
        text = f"the chat template refuses them ({shown(str(error), 120)})"
        raise Fault("messages", f"{text}; correct them or use another template") from None


def _messages(row: Row) -> list[Message]:
    messages = jsonl.required(row, "messages")
    if not isinstance(messages, list):
        raise Fault("messages", f"not a list ({shown(messages)}); give [{{role, content}}, ...]")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> Message:
    """One message in the form templates read: text content, arguments of tool calls as objects."""
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
    """A tool call; the chat API gives its arguments as JSON in a string, templates want the object.

    What is no JSON stays a string: models do write broken calls, and these are what was trained.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
