"""What is valid reads back the same; what is not is refused by file, row and field."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.data.generate import bundled_rollouts
from megatron_prefix.data.rollouts import (
    Group,
    Rollout,
    common_prefix,
    dense_vocabulary,
    read_groups,
    read_rollouts,
    write_rollouts,
)
from megatron_prefix.errors import UserError
from tests.harness.data import REPOSITORY, files, folder

REAL_FILES = files()
VOCAB = 32


# Round trip ---------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw: st.DrawFn, group: str, uid: str, head: list[int]) -> Rollout:
    """Any valid rollout; it may start with some of `head`, tokens of the rollout before it."""
    kept = draw(st.integers(0, len(head)))
    rest = draw(st.lists(st.integers(0, VOCAB - 1), min_size=max(0, 2 - kept), max_size=12))
    tokens = np.array(head[:kept] + rest, dtype=np.int32)
    prompt_len = draw(st.integers(1, len(tokens)))
    trained = draw(
        st.lists(
            st.booleans(), min_size=len(tokens) - prompt_len, max_size=len(tokens) - prompt_len
        )
    )
    spans = [(prompt_len + i, prompt_len + i + 1) for i, is_on in enumerate(trained) if is_on]
    logprobs = st.lists(finite, min_size=len(spans), max_size=len(spans)).map(np.array)
    return Rollout(
        group=group,
        uid=uid,
        tokens=tokens,
        prompt_len=prompt_len,
        loss=tuple(spans),
        reward=draw(finite),
        advantage=draw(st.none() | finite),
        old_logprobs=draw(st.none() | logprobs.map(lambda values: values.astype(np.float64))),
    )


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    groups: list[Group] = []
    head: list[int] = []
    for name in names:
        members = []
        for uid in range(draw(st.integers(1, 4))):
            members.append(draw(rollouts(name, str(uid), head)))
            head = members[-1].tokens.tolist()
        groups.append(Group(name, tuple(members)))
    return groups


def fields(rollout: Rollout) -> dict[str, Any]:
    """The rollout as plain values, exact and comparable."""
    values = dataclasses.asdict(rollout)
    assert values["tokens"].dtype == np.int32
    for name in ("tokens", "old_logprobs"):
        if values[name] is not None:
            values[name] = [repr(value) for value in values[name].tolist()]
    return values


def all_fields(groups: list[Group]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(group.name, [fields(rollout) for rollout in group.rollouts]) for group in groups]


@given(groups=group_lists(), delta=st.booleans(), suffix=st.sampled_from(["jsonl", "jsonl.gz"]))
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, groups: list[Group], delta: bool, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("round") / f"rollouts.{suffix}"
    counts = write_rollouts(path, groups, delta=delta)
    read = list(read_groups(path, vocab_size=VOCAB))
    assert all_fields(read) == all_fields(groups)
    assert counts["rollouts"] == sum(len(group.rollouts) for group in groups)
    assert counts["tokens"] == sum(len(r) for group in groups for r in group.rollouts)
    first = path.read_bytes()
    write_rollouts(path, read, delta=delta)
    assert path.read_bytes() == first
    assert (first[:2] == b"\x1f\x8b") == suffix.endswith(".gz")
    if suffix.endswith(".gz"):
        assert first[3:8] == bytes(5), "neither a name nor a time in the header"


def test_the_example_in_the_readme(tmp_path: Path) -> None:
    text = (REPOSITORY / "megatron_prefix" / "data" / "README.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    {")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    read = list(read_rollouts(path))
    assert [rollout.tokens.tolist() for rollout in read] == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 2, 3]]
    assert read[1].tokens[read[1].loss_mask].tolist() == [8, 3]
    assert read[1].num_trained == 2


def test_blank_lines_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row(source="x", extra=[1])) + "\n\n", encoding="utf-8")
    assert [rollout.uid for rollout in read_rollouts(path)] == ["0"]


def test_gzip_is_told_by_content(tmp_path: Path) -> None:
    packed, plain = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(row()).encode()))
    plain.write_bytes(json.dumps(row()).encode())
    assert [len(rollout) for path in (packed, plain) for rollout in read_rollouts(path)] == [6, 6]


# Bad input ----------------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "group": "a",
        "uid": 0,
        "tokens": [1, 2, 3, 4, 5, 6],
        "prompt_len": 2,
        "loss": [[2, 4], [5, 6]],
        "reward": 1.0,
    }
    return {name: value for name, value in (good | changes).items() if value is not Ellipsis}


def second(**changes: Any) -> bytes:
    """A file whose second row is `row(uid=1)` with `changes`; `...` takes a field away."""
    return b"\n".join(json.dumps(r).encode() for r in (row(), row(**({"uid": 1} | changes))))


def rows(*names: tuple[Any, Any]) -> bytes:
    return b"\n".join(json.dumps(row(group=group, uid=uid)).encode() for group, uid in names)


BAD: dict[str, tuple[bytes, int | None, str, str]] = {
    # name: (bytes, row, field, what the message says); unpacking runs ahead of rows: None is any
    "empty": (b"", 1, "row", "empty"),
    "only blank lines": (b"\n  \n", 1, "row", "empty"),
    "bad json": (second()[:-5], 2, "row", "not JSON"),
    "deep json": (b"[" * 200_000, 1, "row", "JSON"),
    "two objects a line": (b"{}{}", 1, "row", "not JSON"),
    "not an object": (b"[1, 2]", 1, "row", "not an object ([1, 2])"),
    "not utf-8": (second() + b"\n\xff\xfe", 3, "row", "not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf" + second(), 1, "row", "BOM"),
    **{
        f"no {name}": (second(**{name: ...}), 2, name, "missing")
        for name in ("group", "uid", "tokens", "prompt_len", "loss", "reward")
    },
    "group is a list": (second(group=["a"]), 2, "group", "not a name (['a'])"),
    "group is empty": (second(group=""), 2, "group", "not a name"),
    "uid is true": (second(uid=True), 2, "uid", "not a name (True)"),
    "uid twice": (second(uid=0), 2, "uid", "comes twice"),
    "uid twice as text": (second(uid="0"), 2, "uid", "comes twice"),
    "tokens is text": (second(tokens="1 2 3"), 2, "tokens", "not a list"),
    "a float token": (second(tokens=[1, 2.0, 3]), 2, "tokens", "entry 1 is not an integer (2.0)"),
    "a true token": (second(tokens=[1, 2, True]), 2, "tokens", "entry 2 is not an integer (True)"),
    "a null token": (second(tokens=[None, 1]), 2, "tokens", "entry 0 is not an integer (None)"),
    "negative token": (second(tokens=[1, 2, -3, 4, 5, 6]), 2, "tokens", "token 2 is negative (-3)"),
    "token out of vocab": (second(tokens=[1, 2, 3, 4, 5, 32]), 2, "tokens", "of 32 (32)"),
    "bad token after lcp": (second(lcp=4, tokens=[5, 32]), 2, "tokens", "token 5 is not in"),
    "token beyond int32": (second(tokens=[1, 2**40]), 2, "tokens", str(2**40)),
    "token beyond int64": (second(tokens=[1, 10**30]), 2, "tokens", "beyond 64 bits"),
    "no tokens": (second(tokens=[], loss=[]), 2, "tokens", "too short (0)"),
    "one token": (second(tokens=[1], prompt_len=1, loss=[]), 2, "tokens", "too short (1)"),
    "prompt_len 0": (second(prompt_len=0), 2, "prompt_len", "outside 1..6"),
    "prompt_len over": (second(prompt_len=7), 2, "prompt_len", "outside 1..6"),
    "prompt_len true": (second(prompt_len=True), 2, "prompt_len", "not an integer (True)"),
    "prompt_len text": (second(prompt_len="2"), 2, "prompt_len", "not an integer ('2')"),
    "loss past the row": (second(loss=[[2, 7]]), 2, "loss", "outside the row of 6 tokens ([2, 7])"),
    "loss over the prompt": (second(loss=[[1, 4]]), 2, "loss", "over the prompt of 2"),
    "negative loss": (second(loss=[[-4, -2]]), 2, "loss", "over the prompt"),
    "empty span": (second(loss=[[3, 3]]), 2, "loss", "empty span ([3, 3])"),
    "span backwards": (second(loss=[[4, 3]]), 2, "loss", "empty span ([4, 3])"),
    "spans overlap": (second(loss=[[2, 4], [3, 5]]), 2, "loss", "overlaps"),
    "spans unsorted": (second(loss=[[4, 5], [2, 3]]), 2, "loss", "precedes"),
    "a flat span": (second(loss=[2, 4]), 2, "loss", "not a list of spans"),
    "a span of three": (second(loss=[[2, 3, 4]]), 2, "loss", "not a list of spans"),
    "a span of bools": (second(loss=[[False, True]]), 2, "loss", "not a list of spans"),
    "loss is null": (second(loss=None), 2, "loss", "not a list of spans"),
    "lcp beyond the row before": (second(lcp=7), 2, "lcp", "outside 0..6"),
    "lcp on the first row": (json.dumps(row(lcp=1)).encode(), 1, "lcp", "outside 0..0"),
    "negative lcp": (second(lcp=-1), 2, "lcp", "(-1)"),
    "lcp is a float": (second(lcp=1.0), 2, "lcp", "not an integer"),
    "n does not match": (second(n=7), 2, "n", "not the row's 6 tokens (7)"),
    "n counts new tokens only": (second(n=2, lcp=4, tokens=[5, 6]), 2, "n", "6 tokens (2)"),
    "mixed groups": (rows(("a", 0), ("b", 0), ("a", 1)), 3, "group", "mixed group order"),
    "nan reward": (second(reward=float("nan")), 2, "reward", "not finite (nan)"),
    "infinite reward": (second(reward=-float("inf")), 2, "reward", "not finite (-inf)"),
    "huge reward": (second(reward=10**400), 2, "reward", "not finite"),
    "true reward": (second(reward=True), 2, "reward", "not a number (True)"),
    "null reward": (second(reward=None), 2, "reward", "not a number (None)"),
    "nan advantage": (second(advantage=float("nan")), 2, "advantage", "not finite"),
    "advantage is text": (second(advantage="1"), 2, "advantage", "not a number"),
    "short logprobs": (second(old_logprobs=[-1.0, -2.0]), 2, "old_logprobs", "3 trained tokens"),
    "nan logprob": (
        second(old_logprobs=[-1.0, float("nan"), -1.0]), 2, "old_logprobs", "entry 1 is not"
    ),
    "logprobs is a number": (second(old_logprobs=-1.0), 2, "old_logprobs", "not a list"),
    "truncated gzip": (gzip.compress(second())[:-10], None, "gzip", "truncated or corrupt"),
    "gzip header alone": (gzip.compress(b"")[:10], None, "gzip", "truncated or corrupt"),
    "gzip with a bad sum": (gzip.compress(second())[:-8] + b"8 bytes!", None, "gzip", "corrupt"),
    "gzip and more": (gzip.compress(second() + b"\n") + b"more", None, "gzip", "corrupt"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_file_row_and_field(tmp_path: Path, name: str) -> None:
    content, number, field, said = BAD[name]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    for read in (read_rollouts, read_groups):
        with pytest.raises(UserError) as caught:
            list(read(path, vocab_size=VOCAB))
        message = str(caught.value)
        place = re.match(rf"{re.escape(str(path))}:(\d+): (\w+): ", message)
        assert place is not None
        assert place[2] == field
        assert int(place[1]) == number or number is None
        assert said in message
        assert ";" in message, "the message says how to mend"
        assert "\n" not in message
        assert len(message) < len(str(path)) + 250


def test_the_rows_that_bad_input_starts_from_are_good(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    good = second(advantage=0.5, old_logprobs=[-1, -2, -3.5], n=6, lcp=2, tokens=[3, 4, 5, 31])
    path.write_bytes(good)
    (group,) = read_groups(path, vocab_size=VOCAB)
    assert group.rollouts[1].tokens.tolist() == [1, 2, 3, 4, 5, 31]
    logprobs = group.rollouts[1].old_logprobs
    assert logprobs is not None
    assert logprobs.tolist() == [-1, -2, -3.5]


@pytest.mark.parametrize(
    "content",
    [
        rows(("a", 0)),
        rows(("a", 0), ("a", 1)),
        second(lcp=6, tokens=[]),
        second(loss=[]),
        second(prompt_len=6, loss=[]),
        second(loss=[[2, 3], [3, 6]]),
        second(advantage=None, old_logprobs=None),
        rows((3, "x"), ("b", "x")),
    ],
    ids=["one", "identical", "copy", "untrained", "prompt", "touching", "null", "names"],
)
def test_unusual_but_valid(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    read = list(read_groups(path))
    assert sum(len(group.rollouts) for group in read) == content.count(b"\n") + 1
    copy = tmp_path / "copy.jsonl"
    write_rollouts(copy, read)
    assert all_fields(list(read_groups(copy))) == all_fields(read)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such.jsonl"
    for path, said in ((missing, "No such file"), (tmp_path, "directory")):
        with pytest.raises(UserError, match=said) as caught:
            list(read_rollouts(path))
        assert str(caught.value).startswith(f"{path}: file: ")
    with pytest.raises(UserError, match="no file"):
        list(read_groups([]))


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser reads every file"
)
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(second())
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        list(read_rollouts(path))


def test_rows_are_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(second() + b"\nbroken")
    stream = read_rollouts(path)
    assert [next(stream).uid, next(stream).uid] == ["0", "1"]
    with pytest.raises(UserError, match=":3: row: "):
        next(stream)


def test_several_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(rows(("a", 0), ("a", 1), ("b", 0)))
    two.write_bytes(rows(("c", 0)))
    assert [group.name for group in read_groups([one, two])] == ["a", "b", "c"]
    two.write_bytes(rows(("b", 5)))
    with pytest.raises(UserError, match="mixed group order") as caught:
        list(read_groups([one, two]))
    assert str(caught.value).startswith(f"{two}:1: group: ")


# Writing ------------------------------------------------------------------------------------------


def one_group(**changes: Any) -> Group:
    good = Rollout("a", "0", np.array([1, 2, 3], dtype=np.int32), 1, ((1, 3),), 1.0)
    return Group("a", (dataclasses.replace(good, **changes),))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": float("nan")}, "reward"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"loss": ((0, 2),)}, "loss"),
        ({"tokens": np.array([1, -1, 2], dtype=np.int32)}, "tokens"),
        ({"old_logprobs": np.zeros(3)}, "old_logprobs"),
        ({"old_logprobs": np.array([0.0, np.inf])}, "old_logprobs"),
        ({"group": "b"}, "group"),
    ],
)
def test_a_bad_rollout_is_not_written(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    path = tmp_path / "out.jsonl.gz"
    path.write_text("what was there")
    first = Group("z", (dataclasses.replace(one_group().rollouts[0], group="z"),))
    with pytest.raises(UserError) as caught:
        write_rollouts(path, [first, one_group(**changes)])
    assert str(caught.value).startswith(f"{path}:2: {field}: ")
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl.gz"]
    assert path.read_text() == "what was there"


def interrupted() -> Iterator[Group]:
    yield one_group()
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        (lambda: iter([]), UserError),
        (lambda: [one_group(), one_group()], UserError),
        (interrupted, KeyboardInterrupt),
    ],
)
def test_nothing_is_half_written(
    tmp_path: Path, groups: Callable[[], Any], error: type[BaseException]
) -> None:
    with pytest.raises(error):
        write_rollouts(tmp_path / "out.jsonl", groups())
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "out.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be written"):
            write_rollouts(path, [one_group()])
    assert list(tmp_path.iterdir()) == []


def test_writing_a_file_from_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(second())
    before = all_fields(list(read_groups(path)))
    write_rollouts(path, read_groups(path))
    assert all_fields(list(read_groups(path))) == before


# Tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [2, 2], 0), ([1, 2, 3], [1, 2, 4], 2)],
)
def test_common_prefix(left: list[int], right: list[int], shared: int) -> None:
    assert common_prefix(np.array(left, np.int32), np.array(right, np.int32)) == shared


def test_dense_vocabulary_is_one_to_one() -> None:
    groups = list(read_groups(bundled_rollouts()))
    dense, size, ids = dense_vocabulary(iter(groups))
    assert ids.dtype == np.int32
    assert (
        size == len(ids) == len({t for g in groups for r in g.rollouts for t in r.tokens.tolist()})
    )
    for group, mapped in zip(groups, dense, strict=True):
        for old, new in zip(group.rollouts, mapped.rollouts, strict=True):
            assert new.tokens.max() < size
            assert fields(dataclasses.replace(new, tokens=ids[new.tokens])) == fields(old)
    assert dense_vocabulary([])[1] == 0


# Real data ----------------------------------------------------------------------------------------


def plain_read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file by the shortest independent reading of the format."""
    result: list[dict[str, Any]] = []
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            raw = json.loads(line)
            head = result[-1]["tokens"][: raw["lcp"]] if result else []
            result.append(raw | {"tokens": head + raw["tokens"]})
    return result


@pytest.mark.skipif(not REAL_FILES, reason=f"no rollout files in {folder()}")
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_real_files_are_valid_as_they_are(path: Path) -> None:
    expected = plain_read(path)
    read = [rollout for group in read_groups(path) for rollout in group.rollouts]
    assert len(read) == len(expected) > 0
    for rollout, raw in zip(read, expected, strict=True):
        assert rollout.tokens.dtype == np.int32
        assert np.array_equal(rollout.tokens, raw["tokens"])
        assert len(rollout) == raw["n"]
        assert (rollout.group, rollout.uid) == (raw["group"], str(raw["uid"]))
        assert [list(span) for span in rollout.loss] == raw["loss"]
        assert (rollout.prompt_len, rollout.reward) == (raw["prompt_len"], raw["reward"])
        assert rollout.loss_mask.sum() == sum(end - start for start, end in raw["loss"])
