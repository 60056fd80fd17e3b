"""`--max-tokens`: the head of the shared prompt first, then tails, and what is left is counted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.lab.data.checks import check_rollout
from megatron_prefix.lab.data.rollouts import Group, Rollout, common_prefix
from megatron_prefix.lab.data.shorten import shorten


def rollout(uid, tokens, prompt_len, *loss):
    trained = sum(end - start for start, end in loss)
    return Rollout(
        group="g", uid=uid, tokens=np.array(tokens, dtype=np.int32), prompt_len=prompt_len,
        loss=loss, reward=1.0, old_logprobs=-np.arange(1.0, trained + 1),
    )  # fmt: skip


def test_head_then_tail():
    prompt = list(range(10))
    group = Group(
        "g",
        (
            rollout("0", [*prompt, 20, 21, 22, 23, 24, 25], 10, (10, 12), (13, 16)),
            rollout("1", [*prompt, 30, 31], 10, (10, 12)),
            rollout("2", [*prompt, 40, 41, 42, 43, 44], 10, (14, 15)),
        ),
    )
    shorter, dropped = shorten(group, 8)
    assert dropped == 1
    first, second = shorter.rollouts
    assert first.tokens.tolist() == [6, 7, 8, 9, 20, 21, 22, 23]
    assert (first.prompt_len, first.loss) == (4, ((4, 6), (7, 8)))
    assert first.old_logprobs.tolist() == [-1, -2, -3]
    assert second.tokens.tolist() == [6, 7, 8, 9, 30, 31]
    assert (second.prompt_len, second.loss) == (4, ((4, 6),))
    assert second.old_logprobs.tolist() == [-1, -2]


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
def test_any_group(group, max_tokens):
    """Trained tokens keep their log-probs, what was shared stays so, rollouts stay valid."""
    shorter, dropped = shorten(group, max_tokens)
    kept = {r.uid: r for r in shorter.rollouts} if shorter else {}
    assert dropped == len(group.rollouts) - len(kept)
    heads = set()
    for old in group.rollouts:
        new = kept.get(old.uid)
        if new is None:
            continue
        check_rollout(new)
        assert len(new) <= max_tokens
        head = old.prompt_len - new.prompt_len
        heads.add(head)
        assert np.array_equal(new.tokens, old.tokens[head : head + len(new)])
        assert np.array_equal(new.loss_mask, old.loss_mask[head : head + len(new)])
        assert new.old_logprobs is not None
        assert np.array_equal(new.old_logprobs, old.old_logprobs[: new.num_trained])
        assert all(
            old.tokens[:head].tolist() == other.tokens[:head].tolist() for other in group.rollouts
        )
        assert all(head <= other.prompt_len for other in group.rollouts)
    assert len(heads) <= 1
    longest = max(len(r) for r in group.rollouts)
    assert (shorter is group) == (longest <= max_tokens)
    if heads and longest > max_tokens:
        first = group.rollouts[0]
        shared = min(common_prefix(first.tokens, other.tokens) for other in group.rollouts)
        shared = min(shared, *(r.prompt_len for r in group.rollouts), shared)
        assert heads == {max(0, shared - max_tokens // 2)}
