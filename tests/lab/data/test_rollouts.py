"""Rollouts that are written read back the same, shortened or not; nothing bad is written."""

import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.checks import check_rollout
from megatron_prefix.lab.data.generate import bundled_rollouts
from megatron_prefix.lab.data.rollouts import (
    Group,
    Rollout,
    common_prefix,
    dense_vocabulary,
    read_groups,
    read_rollouts,
    write_rollouts,
)
from megatron_prefix.lab.data.shorten import shorten
from tests.harness.data import REPOSITORY, files, folder

REAL_FILES = files()
VOCAB = 32


def row(**changes):
    good = {
        "group": "a", "uid": 0, "tokens": [1, 2, 3, 4, 5, 6], "prompt_len": 2,
        "loss": [[2, 4], [5, 6]], "reward": 1.0,
    }  # fmt: skip
    return {name: value for name, value in (good | changes).items() if value is not Ellipsis}


def second(**changes):
    """A file whose second row is `row(uid=1)` with `changes`; `...` takes a field away."""
    return b"\n".join(json.dumps(r).encode() for r in (row(), row(**({"uid": 1} | changes))))


def rows(*names):
    return b"\n".join(json.dumps(row(group=group, uid=uid)).encode() for group, uid in names)


def fields(rollout):
    """The rollout as plain values, exact and comparable."""
    values = dataclasses.asdict(rollout)
    assert values["tokens"].dtype == np.int32
    for name in ("tokens", "old_logprobs"):
        if values[name] is not None:
            values[name] = [repr(value) for value in values[name].tolist()]
    return values


def all_fields(groups):
    return [(group.name, [fields(rollout) for rollout in group.rollouts]) for group in groups]


finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw, group, uid, head):
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
        group=group, uid=uid, tokens=tokens, prompt_len=prompt_len, loss=tuple(spans),
        reward=draw(finite), advantage=draw(st.none() | finite),
        old_logprobs=draw(st.none() | logprobs.map(lambda values: values.astype(np.float64))),
    )  # fmt: skip


@st.composite
def group_lists(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    groups, head = [], []
    for name in names:
        members = []
        for uid in range(draw(st.integers(1, 4))):
            members.append(draw(rollouts(name, str(uid), head)))
            head = members[-1].tokens.tolist()
        groups.append(Group(name, tuple(members)))
    return groups


@given(groups=group_lists(), delta=st.booleans(), suffix=st.sampled_from(["jsonl", "jsonl.gz"]))
def test_what_is_written_reads_back(tmp_path_factory, groups, delta, suffix):
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


def test_the_example_in_the_readme(tmp_path):
    text = (REPOSITORY / "megatron_prefix" / "lab" / "data" / "README.md").read_text(
        encoding="utf-8"
    )
    lines = [line.strip() for line in text.splitlines() if line.startswith("    {")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    read = list(read_rollouts(path))
    assert [rollout.tokens.tolist() for rollout in read] == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 2, 3]]
    assert read[1].tokens[read[1].loss_mask].tolist() == [8, 3]
    assert read[1].num_trained == 2


def one_group(**changes):
    good = Rollout("a", "0", np.array([1, 2, 3], dtype=np.int32), 1, ((1, 3),), 1.0)
    return Group("a", (dataclasses.replace(good, **changes),))


@pytest.mark.parametrize(("changes", "field"), [
    ({"reward": float("nan")}, "reward"), ({"prompt_len": 0}, "prompt_len"),
    ({"loss": ((0, 2),)}, "loss"), ({"tokens": np.array([1, -1, 2], dtype=np.int32)}, "tokens"),
    ({"old_logprobs": np.zeros(3)}, "old_logprobs"),
    ({"old_logprobs": np.array([0.0, np.inf])}, "old_logprobs"), ({"group": "b"}, "group"),
])  # fmt: skip
def test_a_bad_rollout_is_not_written(tmp_path, changes, field):
    path = tmp_path / "out.jsonl.gz"
    path.write_text("what was there", encoding="utf-8")
    first = Group("z", (dataclasses.replace(one_group().rollouts[0], group="z"),))
    with pytest.raises(UserError) as caught:
        write_rollouts(path, [first, one_group(**changes)])
    assert str(caught.value).startswith(f"{path}:2: {field}: ")
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl.gz"]
    assert path.read_text(encoding="utf-8") == "what was there"


def interrupted():
    yield one_group()
    raise KeyboardInterrupt


@pytest.mark.parametrize(("groups", "error"), [
    (lambda: iter([]), UserError),
    (lambda: [one_group(), one_group()], UserError),
    (interrupted, KeyboardInterrupt),
])  # fmt: skip
def test_nothing_is_half_written(tmp_path, groups, error):
    with pytest.raises(error):
        write_rollouts(tmp_path / "out.jsonl", groups())
    assert list(tmp_path.iterdir()) == []


def test_dense_vocabulary_is_one_to_one():
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


def plain_read(path):
    """The rows of a file by the shortest independent reading of the format."""
    result = []
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            raw = json.loads(line)
            head = result[-1]["tokens"][: raw["lcp"]] if result else []
            result.append(raw | {"tokens": head + raw["tokens"]})
    return result


@pytest.mark.skipif(not REAL_FILES, reason=f"no rollout files in {folder()}")
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_real_files_are_valid_as_they_are(path):
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


def rollout(uid, tokens, prompt_len, *loss):
    trained = sum(end - start for start, end in loss)
    return Rollout(
        group="g", uid=uid, tokens=np.array(tokens, dtype=np.int32), prompt_len=prompt_len,
        loss=loss, reward=1.0, old_logprobs=-np.arange(1.0, trained + 1),
    )  # fmt: skip


@st.composite
def groups(draw):
    shared = draw(st.lists(st.integers(0, 2), max_size=16))
    members = []
    for uid in range(draw(st.integers(1, 4))):
        tokens = shared + draw(st.lists(st.integers(0, 2), min_size=2, max_size=16))
        prompt_len = draw(st.integers(1, len(tokens)))
        starts = [i for i in range(prompt_len, len(tokens)) if draw(st.booleans())]
        members.append(rollout(str(uid), tokens, prompt_len, *((i, i + 1) for i in starts)))
    return Group("g", tuple(members))


@given(group=groups(), max_tokens=st.integers(2, 40))
def test_a_shared_prompt_loses_its_head_and_rollouts_their_tails(group, max_tokens):
    """Trained tokens keep their log-probs; who has none left is dropped; what fits stays."""
    shorter, dropped = shorten(group, max_tokens)
    fits = max(map(len, group.rollouts)) <= max_tokens
    assert (shorter is group) == fits
    first = group.rollouts[0]
    shared = min(common_prefix(first.tokens, other.tokens) for other in group.rollouts)
    shared = min(shared, *(r.prompt_len for r in group.rollouts), shared)
    head = 0 if fits else max(0, shared - max_tokens // 2)
    window = slice(head, head + max_tokens)
    kept = {r.uid: r for r in shorter.rollouts} if shorter else {}
    assert dropped == len(group.rollouts) - len(kept)
    for old in group.rollouts:
        assert old.tokens[:head].tolist() == first.tokens[:head].tolist()
        new = kept.get(old.uid)
        if new is None:
            assert not old.loss_mask[window].any()
            continue
        check_rollout(new)
        assert new.prompt_len == min(old.prompt_len - head, len(new))
        assert np.array_equal(new.tokens, old.tokens[window])
        assert np.array_equal(new.loss_mask, old.loss_mask[window])
        assert np.array_equal(new.old_logprobs, old.old_logprobs[: new.num_trained])


# What is not valid is refused by file, row and field ----------------------------------------------


BAD = {
    # name: (bytes, row, field, what the message says); unpacking runs ahead of rows: None is any
    "empty": (b"", 1, "row", "empty"),
    "bad json": (second()[:-5], 2, "row", "not JSON"),
    "deep json": (b"[" * 200_000, 1, "row", "JSON"),
    "not an object": (b"[1, 2]", 1, "row", "not an object ([1, 2])"),
    "not utf-8": (second() + b"\n\xff\xfe", 3, "row", "not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf" + second(), 1, "row", "BOM"),
    **{
        f"no {name}": (second(**{name: ...}), 2, name, "missing")
        for name in ("group", "uid", "tokens", "prompt_len", "loss", "reward")
    },
    "group is a list": (second(group=["a"]), 2, "group", "not a name (['a'])"),
    "uid is true": (second(uid=True), 2, "uid", "not a name (True)"),
    "uid twice": (second(uid=0), 2, "uid", "occurs twice"),
    "a float token": (second(tokens=[1, 2.0, 3]), 2, "tokens", "entry 1 is not an integer (2.0)"),
    "negative token": (second(tokens=[1, 2, -3, 4, 5, 6]), 2, "tokens", "token 2 is negative (-3)"),
    "token out of vocab": (second(tokens=[1, 2, 3, 4, 5, 32]), 2, "tokens", "of 32 (32)"),
    "bad token after lcp": (second(lcp=4, tokens=[5, 32]), 2, "tokens", "token 5 is not in"),
    "token beyond int32": (second(tokens=[1, 2**40]), 2, "tokens", str(2**40)),
    "token beyond int64": (second(tokens=[1, 10**30]), 2, "tokens", "beyond 64 bits"),
    "one token": (second(tokens=[1], prompt_len=1, loss=[]), 2, "tokens", "too short (1)"),
    "prompt_len 0": (second(prompt_len=0), 2, "prompt_len", "outside 1..6"),
    "prompt_len over": (second(prompt_len=7), 2, "prompt_len", "outside 1..6"),
    "loss past the row": (second(loss=[[2, 7]]), 2, "loss", "[2, 7] ends after the row's 6 tokens"),
    "loss over the prompt": (second(loss=[[1, 4]]), 2, "loss", "begins in the 2 prompt tokens"),
    "empty span": (second(loss=[[3, 3]]), 2, "loss", "empty span ([3, 3])"),
    "spans overlap": (second(loss=[[2, 4], [3, 5]]), 2, "loss", "begins before the one before"),
    "spans unsorted": (second(loss=[[4, 5], [2, 3]]), 2, "loss", "begins before the one before"),
    "a flat span": (second(loss=[2, 4]), 2, "loss", "not a list of spans"),
    "lcp beyond the row before": (second(lcp=7), 2, "lcp", "outside 0..6"),
    "lcp on the first row": (json.dumps(row(lcp=1)).encode(), 1, "lcp", "outside 0..0"),
    "negative lcp": (second(lcp=-1), 2, "lcp", "(-1)"),
    "n does not match": (second(n=7), 2, "n", "not the row's 6 tokens (7)"),
    "mixed groups": (rows(("a", 0), ("b", 0), ("a", 1)), 3, "group", "are not next to each other"),
    "nan reward": (second(reward=float("nan")), 2, "reward", "not finite (nan)"),
    "true reward": (second(reward=True), 2, "reward", "not a number (True)"),
    "nan advantage": (second(advantage=float("nan")), 2, "advantage", "not finite"),
    "short logprobs": (second(old_logprobs=[-1.0, -2.0]), 2, "old_logprobs", "3 trained tokens"),
    "nan logprob": (
        second(old_logprobs=[-1.0, float("nan"), -1.0]), 2, "old_logprobs", "entry 1 is not"
    ),
    "truncated gzip": (gzip.compress(second())[:-10], None, "gzip", "truncated or corrupt"),
    "gzip with a bad sum": (gzip.compress(second())[:-8] + b"8 bytes!", None, "gzip", "corrupt"),
    "gzip and more": (gzip.compress(second() + b"\n") + b"more", None, "gzip", "corrupt"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_file_row_and_field(tmp_path, name):
    content, number, field, said = BAD[name]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    for read in (read_rollouts, read_groups):
        with pytest.raises(UserError) as caught:
            list(read(path, vocab_size=VOCAB))
        message = str(caught.value)
        place = re.match(rf"{re.escape(str(path))}:(\d+): (\w+): ", message)
        assert place[2] == field
        assert int(place[1]) == number or number is None
        assert said in message
        assert ";" in message, "the message says how to fix"
        assert "\n" not in message
        assert len(message) < len(str(path)) + 250


@pytest.mark.parametrize("content", [
    rows(("a", 0)), rows(("a", 0), ("a", 1)), second(lcp=6, tokens=[]), second(loss=[]),
    second(prompt_len=6, loss=[]), second(loss=[[2, 3], [3, 6]]),
    second(advantage=None, old_logprobs=None), rows((3, "x"), ("b", "x")),
], ids="one identical copy untrained prompt touching null names".split())  # fmt: skip
def test_unusual_but_valid(tmp_path, content):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    read = list(read_groups(path))
    assert sum(len(group.rollouts) for group in read) == content.count(b"\n") + 1
    copy = tmp_path / "copy.jsonl"
    write_rollouts(copy, read)
    assert all_fields(list(read_groups(copy))) == all_fields(read)


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "no" / "such.jsonl"
    for path, said in ((missing, "No such file"), (tmp_path, "directory")):
        with pytest.raises(UserError, match=said) as caught:
            list(read_rollouts(path))
        assert str(caught.value).startswith(f"{path}: cannot be read (")
    with pytest.raises(UserError, match="no file"):
        list(read_groups([]))


def test_several_files(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(rows(("a", 0), ("a", 1), ("b", 0)))
    two.write_bytes(rows(("c", 0)))
    assert [group.name for group in read_groups([one, two])] == ["a", "b", "c"]
    two.write_bytes(rows(("b", 0), ("c", 0), ("b", 5)))
    with pytest.raises(UserError, match="are not next to each other") as caught:
        list(read_groups([one, two]))
    assert str(caught.value).startswith(f"{two}:3: group: ")


def test_names_that_come_again_in_another_file_are_that_files(tmp_path):
    """`generate` gives the groups of every file the same names."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(rows(("a", 0), ("b", 0)))
    two.write_bytes(rows(("b", 0), ("b", 1), ("c", 0)))
    read = list(read_groups([one, two, two]))
    assert [group.name for group in read] == [
        "a", "b", "two.jsonl:b", "c", f"{two}:b", "two.jsonl:c"
    ]  # fmt: skip
    assert [len(group.rollouts) for group in read] == [1, 1, 2, 1, 2, 1]
    assert {rollout.group == group.name for group in read for rollout in group.rollouts} == {True}
