"""Messages of the chat API in a row, as chat templates need them."""

from __future__ import annotations

from typing import Any

from megatron_prefix.errors import shown
from megatron_prefix.lab.data import jsonl
from megatron_prefix.lab.data.jsonl import Fault, Row
from megatron_prefix.lab.data.tokenizer import Message

TRAIN_FLAGS = ("loss", "train", "training", "trainable", "step_loss_mask")
"""Names that trainers give to one flag of a message or row: whether it is trained."""
WEIGHT = "weight"
"""The chat API's name of it; messages only."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that servers give to what a model thought; a message may have it twice."""


def messages_of(row: Row) -> list[Message]:
    """The conversation: text as content, tool calls as objects; their `Fault`s name the message."""
    messages = jsonl.required(row, "messages")
    if not isinstance(messages, list):
        raise Fault("messages", f"not a list ({shown(messages)}); give [{{role, content}}, ...]")
    return [_message(number, message) for number, message in enumerate(messages)]


def tools_of(row: Row) -> Any:
    """The tools that the model was offered, or None."""
    try:
        tools = jsonl.embedded(row.get("tools"))
    except ValueError as error:
        raise Fault("tools", f"not JSON ({error}); give a list of tools") from None
    jsonl.check_characters("tools", tools)
    return tools


def is_trained(number: int, message: Message) -> bool:
    """Whether a trainer trains this message of the assistant."""
    for name in (WEIGHT, *TRAIN_FLAGS):
        try:
            if not jsonl.flag(message, name, True):
                return False
        except Fault as fault:
            raise Fault("messages", f"message {number}: {fault}") from None
    return True


def is_empty(message: Message) -> bool:
    """Whether it says nothing: no text and no call."""
    said = ("content", "tool_calls", "function_call", "refusal", *REASONING)
    return not any(message.get(name) for name in said)


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        text = f"message {number} has no role ({shown(message)}); give role and content"
        raise Fault("messages", text)
    # A table's columns are in all its rows: null is absent, but for what all templates read.
    result = {name: value for name, value in message.items() if value is not None}
    result.setdefault("content", None)
    if isinstance(message.get("content"), list):
        result["content"] = "".join(_text(number, part) for part in message["content"])
    calls = _calls(number, result.pop("tool_calls", None))
    if calls:
        result["tool_calls"] = calls
    elif result["content"] is None:
        result["content"] = ""  # an answer that was never given
    jsonl.check_characters("messages", result, f"message {number}: ")
    return result


def _text(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Fault(
            "messages", f"message {number} is not text alone ({shown(part)}); give text parts"
        )
    return text


def _calls(number: int, calls: Any) -> list[Any]:
    """`tool_calls` as a list of objects; a file may have it, or each call, as JSON in a string."""
    place = f"message {number}: tool_calls"
    try:
        calls = jsonl.embedded(calls or None)
        if calls is None:
            return []
        listed = [jsonl.embedded(call) for call in (calls if isinstance(calls, list) else [calls])]
    except ValueError as error:
        text = f"{place} is not JSON ({error}); give a list of objects"
        raise Fault("messages", text) from None
    for call in listed:
        if not isinstance(call, dict):
            raise Fault("messages", f"{place} holds no object ({shown(call)}); give tool calls")
    return [_call(call) for call in listed]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call; the chat API has its arguments as a JSON string, templates need the object.

    Invalid JSON stays a string: models do write broken calls, and they were trained on them.
    """
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _call(function)}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": jsonl.embedded(call["arguments"])}
    except ValueError:
        return call
