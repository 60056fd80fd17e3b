"""Imports rollouts: verl's rollout dump, chat messages, token ids (all JSON lines).

Rows of a group may be anywhere in such a file, so a file is read whole before the first group is
returned. Rows of different steps are never a group, since a later step has another policy; a row
without a group is grouped with rows of the same prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.data import jsonl, pads, verl
from megatron_prefix.lab.data.chat import conversation_pieces
from megatron_prefix.lab.data.checks import check_ids, check_rollout
from megatron_prefix.lab.data.grouping import Gathered
from megatron_prefix.lab.data.jsonl import Fault, PathLike, Row
from megatron_prefix.lab.data.messages import TRAIN_FLAGS
from megatron_prefix.lab.data.rollouts import Group, Rollout, Spans
from megatron_prefix.lab.data.tokenizer import Tokenizer, load_tokenizer, token_ids

KINDS = ("verl", "messages", "tokens")
_NOT_TRAINED = -100  # torch's ignore_index, what training code writes into labels

# Names that files use for one field; the first is ours.
GROUP_FIELDS = ("group", "group_id", "group_index", "prompt_id")
UID_FIELDS = ("uid", "id")
REWARD_FIELDS = ("reward", "score")
PROMPT_FIELDS = ("prompt_ids", "prompt_token_ids", "prompt_tokens")
RESPONSE_FIELDS = ("response_ids", "response_token_ids", "completion_ids", "output_ids")
WHOLE_FIELDS = ("tokens", "input_ids", "token_ids")
MASK_FIELDS = ("loss_mask", "response_mask", "completion_mask", "assistant_masks")
LOGPROBS_FIELDS = ("old_logprobs", "old_log_probs", "rollout_log_probs")
_LENGTHS = ("prompt_len", "response_length")
_STEP = ("step", "global_step", "global_steps")
_REMOVED = "remove_sample"  # slime: the loss mask is zero, the reward still counts in its group

_names = "|".join
FIELDS = f"""\
  verl      input, output
  messages  messages (of OpenAI's chat API), [tools]
  tokens    {_names(PROMPT_FIELDS)},
            {_names(RESPONSE_FIELDS)};
            or {_names(WHOLE_FIELDS)} with one of
            {_names((*MASK_FIELDS, "labels"))},
            {_names(_LENGTHS)};
            [{"], [".join(pads.FIELDS)}],
            [{_names(LOGPROBS_FIELDS)}]
  in all    {_names(REWARD_FIELDS)}, [advantage],
            [{_names(GROUP_FIELDS)}], [{_names(UID_FIELDS)}],
            [{_names(_STEP)}],
            [{_names((*TRAIN_FLAGS, _REMOVED))}]
"""
"""The fields of each kind's rows, for people."""


def import_file(
    path: PathLike,
    kind: str,
    tokenizer: Tokenizer | str | None = None,
    *,
    vocab_size: int | None = None,
) -> Iterator[Group]:
    """Yield the groups of a file of `kind`, in the order in which their first rows come.

    Kinds (`reward` may be called `score`; `group`, `uid`, `advantage` are optional in all):
    - "verl": `input, output, score`, what verl writes to `trainer.rollout_data_dir`. The output is
      trained. verl dumps text without special tokens, so ids come back as far as text holds them.
      Of a `uid` like `{sample}_{rollout}_{output}` the sample is the group.
    - "messages": `messages` as in OpenAI's chat API, optional `tools`. What the assistant says is
      trained, but for messages of `weight` 0, `loss` false, `train` false or `step_loss_mask` 0.
    - "tokens": `prompt_ids, response_ids`, or `input_ids` with `loss_mask`, `labels` (-100 is not
      trained), `prompt_len` or `response_length`; a mask may leave out the prompt. Other names for
      these are at the top of this file. Tokens outside `attention_mask` are dropped.

    A row of `loss` false, `train` false, `step_loss_mask` 0 or `remove_sample` true is a rollout
    without trained tokens, and so is an empty answer: their rewards still count in their group.

    `tokenizer` is one, or what `load_tokenizer` takes; "tokens" needs none. Errors: `UserError`,
    naming file, row and field, or the option.
    """
    rows = jsonl.read_rows(path)
    decode = _decoder(kind, tokenizer)
    gathered = Gathered()
    for number, row in rows:
        with jsonl.at_row(path, number):
            rollout = _labelled(decode(row), row)
            if kind == "verl" and not rollout.group:
                rollout = replace(rollout, group=verl.sample_of(rollout.uid))
            check_rollout(rollout, vocab_size=vocab_size)
            gathered.add(rollout, _step(row))
    for group in gathered.groups():
        yield verl.with_shared_advantages(group) if kind == "verl" else group


def _decoder(kind: str, tokenizer: Tokenizer | str | None) -> Callable[[Row], Rollout]:
    if kind not in KINDS:
        raise UserError(f"KIND: unknown ({kind!r}); give one of {', '.join(KINDS)}")
    if kind == "tokens":
        return _from_tokens
    if tokenizer is None:
        raise UserError(
            f"--tokenizer: missing for {kind}; give a tokenizer.json, a folder or a name"
        )
    ready = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return functools.partial(_from_verl if kind == "verl" else _from_messages, tokenizer=ready)


# Fields of all kinds ------------------------------------------------------------------------------


def _labelled(rollout: Rollout, row: Row) -> Rollout:
    """`rollout` with the fields of all kinds; group and uid stay empty if the row has none."""
    group, uid = _first(row, GROUP_FIELDS), _first(row, UID_FIELDS)
    if not _is_trained(row):
        no_logprobs = None if rollout.old_logprobs is None else rollout.old_logprobs[:0]
        rollout = replace(rollout, loss=(), old_logprobs=no_logprobs)
    return replace(
        rollout,
        group=jsonl.name(row, group) if group else "",
        uid=jsonl.name(row, uid) if uid else "",
        reward=jsonl.number(row, _one_of(row, REWARD_FIELDS)),
        advantage=jsonl.number(row, "advantage") if _first(row, ("advantage",)) else None,
    )


def _is_trained(row: Row) -> bool:
    flags = [jsonl.flag(row, name, True) for name in TRAIN_FLAGS]
    return all(flags) and not jsonl.flag(row, _REMOVED, False)


def _step(row: Row) -> str:
    """The step of the policy that wrote a row, or ""."""
    field = _first(row, _STEP)
    if field is None:
        return ""
    value = row[field]
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_whole else jsonl.name(row, field)


def _first(row: Row, names: Sequence[str]) -> str | None:
    """The first of `names` that the row has."""
    return next((name for name in names if row.get(name) is not None), None)


def _one_of(row: Row, names: Sequence[str]) -> str:
    name = _first(row, names)
    if name is None:
        raise Fault(names[0], f"missing (the row has {sorted(row)}); give {' or '.join(names)}")
    return name


def _rollout(tokens: NDArray[Any], prompt_len: int, loss: Spans) -> Rollout:
    return Rollout("", "", tokens.astype(np.int32), prompt_len, loss, reward=0.0)


# verl and messages --------------------------------------------------------------------------------


def _from_verl(row: Row, tokenizer: Tokenizer) -> Rollout:
    prompt, response = verl.decoded(row, tokenizer)
    whole = len(prompt) + len(response)
    loss = ((len(prompt), whole),) if response else ()
    return _rollout(np.array(prompt + response, dtype=np.int64), len(prompt), loss)


def _from_messages(row: Row, tokenizer: Tokenizer) -> Rollout:
    """Pieces are encoded one by one: equal pieces get equal ids, and spans end at tokens."""
    tokens: list[int] = []
    loss: list[tuple[int, int]] = []
    for text, trained in conversation_pieces(row, tokenizer):
        ids = token_ids(tokenizer, text, "messages", continues=bool(tokens))
        if trained and ids:
            loss.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    prompt_len = loss[0][0] if loss else len(tokens)
    return _rollout(np.array(tokens, dtype=np.int64), prompt_len, tuple(loss))


# Token ids ----------------------------------------------------------------------------------------


def _from_tokens(row: Row) -> Rollout:
    tokens, prompt_len = _sequence(row)
    attended = pads.attended(row, len(tokens), prompt_len if _first(row, PROMPT_FIELDS) else None)
    mask = _trained(row, tokens, prompt_len) & attended
    _check_length(row, attended)
    if prompt_len is None:
        prompt_len = int(mask.argmax()) if mask.any() else len(tokens)
    logprobs = _logprobs(row, mask[prompt_len:], attended[prompt_len:])
    tokens, mask, prompt_len = tokens[attended], mask[attended], int(attended[:prompt_len].sum())
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    loss = tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))
    return replace(_rollout(tokens, prompt_len, loss), old_logprobs=logprobs)


def _sequence(row: Row) -> tuple[NDArray[np.int64], int | None]:
    """The whole sequence int64 [n], pads included, and the prompt's length if the row has it."""
    prompt = _first(row, PROMPT_FIELDS)
    if prompt is not None:
        head, tail = _ids(row, prompt), _ids(row, _one_of(row, RESPONSE_FIELDS))
        return np.concatenate([head, tail]), len(head)
    tokens = _ids(row, _one_of(row, (*WHOLE_FIELDS, *PROMPT_FIELDS)))
    field = _first(row, _LENGTHS)
    if field is None:
        return tokens, None
    length, is_prompt = jsonl.integer(row, field), field == "prompt_len"
    least, most = (1, len(tokens)) if is_prompt else (0, len(tokens) - 1)
    if not least <= length <= most:
        text = f"outside {least}..{most} in a row of {len(tokens)} tokens ({shown(length)})"
        raise Fault(field, f"{text}; count the tokens of the {'prompt' if is_prompt else 'answer'}")
    return tokens, length if is_prompt else len(tokens) - length


def _ids(row: Row, field: str) -> NDArray[np.int64]:
    ids = jsonl.integers(row, field)
    check_ids(ids, 0, None, field)
    return ids


def _trained(row: Row, tokens: NDArray[np.int64], prompt_len: int | None) -> NDArray[np.bool_]:
    """Which tokens are trained, bool [n]: by mask, by labels, else the whole response."""
    field = _first(row, (*MASK_FIELDS, "labels"))
    if field is None:
        if prompt_len is None:
            names = " or ".join((*MASK_FIELDS, "labels", *_LENGTHS))
            raise Fault("loss_mask", f"missing (nothing says what is trained); give {names}")
        return np.arange(len(tokens)) >= prompt_len
    values = jsonl.integers(row, field) if field == "labels" else jsonl.flags(row, field)
    num_prompt = len(tokens) - len(values)
    if num_prompt not in (0, prompt_len):
        text = f"neither as long as the row of {len(tokens)} tokens nor as its response"
        raise Fault(field, f"{text} ({len(values)}); give one entry a token")
    mask = values != (_NOT_TRAINED if field == "labels" else 0)
    if field == "labels" and (values[mask] != tokens[num_prompt:][mask]).any():
        text = "differ from the tokens at their places (shifted?); give each token its own id"
        raise Fault(field, text)
    return np.concatenate([np.zeros(num_prompt, dtype=bool), mask])


def _logprobs(
    row: Row, mask: NDArray[np.bool_], attended: NDArray[np.bool_]
) -> NDArray[np.float64] | None:
    """Those of the trained tokens; a row may have them for every token of its response.

    Args:
        row: of the file.
        mask, attended: bool [response with its pads].
    """
    field = _first(row, LOGPROBS_FIELDS)
    if field is None:
        return None
    logprobs = jsonl.numbers(row, field)
    for trained in (mask, mask[attended]):
        if len(logprobs) == len(trained):
            return logprobs[trained]
    return logprobs


def _check_length(row: Row, attended: NDArray[np.bool_]) -> None:
    """Refuse a length that may or may not count the pads on its side of the row.

    A mask of the response alone settles it: it has an entry for each pad.
    """
    field, mask = _first(row, _LENGTHS), _first(row, (*MASK_FIELDS, "labels"))
    if field is None or _first(row, PROMPT_FIELDS) or (mask and len(row[mask]) < len(attended)):
        return
    if not attended[0 if field == "prompt_len" else -1]:
        side = "left" if field == "prompt_len" else "right"
        text = f"it is not clear whether {row[field]} counts the padding on the {side}"
        raise Fault(field, f"{text}; remove the padding from the row")
