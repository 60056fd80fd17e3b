"""Refuses a conversation of which the chat template leaves something out.

Such a text is of a conversation that never was: a model that answered a tool would seem to answer
nothing. Everything that was said gets a mark of its own, and the template renders them all at once.
Only what shows no mark is tried again by itself, since a template may rewrite what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_prefix.lab.data.jsonl import Fault
from megatron_prefix.lab.data.messages import REASONING
from megatron_prefix.lab.data.tokenizer import Message

Render = Callable[[Sequence[Message]], str]
_END_OF_THOUGHT = "</think>"
_FIX = "use the template of the model that wrote this"


class _Place(NamedTuple):
    """Where a mark goes: keys to a string or an object, and a position in the string.

    `said` names what is lost if none of its places shows.
    """

    said: str
    keys: tuple[str | int, ...]
    position: int = 0


def check_tools(render: Render, messages: Sequence[Message], tools: Any, text: str) -> None:
    """`Fault` if `text`, rendered with `tools`, is what `render` makes of `messages` without."""
    if tools and _trial(render, messages) == text:
        raise Fault("tools", f"the chat template drops them; {_FIX}")


def check_messages(render: Render, messages: Sequence[Message], first: int, text: str) -> None:
    """`Fault` if `text`, which is `render(messages)`, lacks what a message from `first` on says,
    or has a null in it."""
    stem = "qz"
    while stem in text:
        stem += "qz"
    places = [(n, place) for n in range(first, len(messages)) for place in _places(messages[n])]
    marks = [f"{stem}{index}{stem}" for index in range(len(places))]
    marked = list(messages)
    for (number, place), mark in zip(reversed(places), reversed(marks), strict=True):
        marked[number] = _with_mark(marked[number], place.keys, place.position, mark)
    rendered = _trial(render, marked) or ""
    shows = [mark in rendered for mark in marks]
    kept = {(n, place.said) for (n, place), is_shown in zip(places, shows, strict=True) if is_shown}
    for (number, place), mark in zip(places, marks, strict=True):
        if (number, place.said) not in kept:
            message = _with_mark(messages[number], place.keys, place.position, mark)
            if _trial(render, [*messages[:number], message, *messages[number + 1 :]]) != text:
                kept.add((number, place.said))
    for number, place in places:
        if (number, place.said) not in kept:
            raise _dropped(number, messages[number], f"drops its {place.said}")
    _check_silent(render, messages, first, text)
    _check_null(render, messages, first, text)


def _check_silent(render: Render, messages: Sequence[Message], first: int, text: str) -> None:
    """The same of messages that say nothing; an assistant's may be an answer that never came."""
    for number in range(first, len(messages)):
        message = messages[number]
        if message["role"] == "assistant" or any(_places(message)):
            continue
        if _trial(render, [*messages[:number], *messages[number + 1 :]]) == text:
            raise _dropped(number, message, "adds no text for it")


def _check_null(render: Render, messages: Sequence[Message], first: int, text: str) -> None:
    """Refuse a template that writes "None" for a null, which servers give it as an empty text."""
    for number in range(first, len(messages)):
        message = messages[number]
        if message["content"] is None:
            empty = {**message, "content": ""}
            trial = _trial(render, [*messages[:number], empty, *messages[number + 1 :]])
            if trial is not None and trial.count("None") < text.count("None"):
                problem = "writes its null content as None; give an empty string"
                role = _role(message)
                raise Fault("messages", f"message {number} ({role}): the chat template {problem}")


def _dropped(number: int, message: Message, problem: str) -> Fault:
    place = f"message {number} ({_role(message)})"
    return Fault("messages", f"{place}: the chat template {problem}; {_FIX}")


def _role(message: Message) -> str:
    return " ".join(message["role"][:24].split())


def _trial(render: Render, messages: Sequence[Message]) -> str | None:
    """What they are rendered to; None if the template refuses them."""
    try:
        return render(messages)
    except Fault:
        return None


def _places(message: Message) -> Iterator[_Place]:
    """Of all that a message says, those in one string in the order of their positions."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        thought, _, answer = content.rpartition(_END_OF_THOUGHT)
        if thought.strip():
            yield _Place("reasoning", ("content",), len(thought))
        if answer.strip():
            yield _Place("content", ("content",), len(content.rstrip()))
    for name in ("refusal", *REASONING):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            said = "reasoning" if name in REASONING else name
            yield _Place(said, (name,), len(value.rstrip()))
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield from _places_of_call(f"tool call {index}", ("tool_calls", index), call)
    if isinstance(message.get("function_call"), dict):
        call = message["function_call"]
        yield from _places_of_call("function call", ("function_call",), call)


def _places_of_call(said: str, keys: tuple[str | int, ...], call: Any) -> Iterator[_Place]:
    if isinstance(call.get("function"), dict):
        keys, call = (*keys, "function"), call["function"]
    for name in ("name", "arguments"):
        value = call.get(name)
        if isinstance(value, str | dict):
            yield _Place(said, (*keys, name), len(value) if isinstance(value, str) else 0)


def _with_mark(value: Any, keys: tuple[str | int, ...], position: int, mark: str) -> Any:
    """A copy of `value` with a mark in what is at `keys`."""
    if isinstance(value, str):
        return value[:position] + mark + value[position:]
    copied: Any = list(value) if isinstance(value, list) else dict(value)
    if keys:
        copied[keys[0]] = _with_mark(copied[keys[0]], keys[1:], position, mark)
    else:
        copied[mark] = mark
    return copied
