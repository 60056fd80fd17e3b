"""Reading rollout files: what is not valid is refused by file, row and field."""

import gzip
import json
import re

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import read_groups, read_rollouts, write_rollouts
from tests.harness.rollout_rows import VOCAB, all_fields, row, rows, second

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


@pytest.mark.parametrize(
    "content",
    [
        rows(("a", 0)), rows(("a", 0), ("a", 1)), second(lcp=6, tokens=[]), second(loss=[]),
        second(prompt_len=6, loss=[]), second(loss=[[2, 3], [3, 6]]),
        second(advantage=None, old_logprobs=None), rows((3, "x"), ("b", "x")),
    ],
    ids=["one", "identical", "copy", "untrained", "prompt", "touching", "null", "names"],
)  # fmt: skip
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
