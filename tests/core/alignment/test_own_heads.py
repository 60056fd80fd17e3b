"""Heads of trainers' own, on models whose calls are answered as the stock schedule's are."""

import pytest

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_model_calls import CONFIG, Case, built, compare_with
from tests.harness.calls import run_step
from tests.harness.cases import check_cases
from tests.harness.own_heads import HEADS, HeadForm, HeadTrainer, put_into
from tests.harness.ranks import run_ranks


def forms(*heads, **fields):
    """A case for each head."""
    return {head: Case(HeadForm(head=head, **fields)) for head in heads or HEADS}


ONE = {
    **forms(),
    **{f"{name}, rows": case for name, case in forms(packed=False).items()},
    "kernels, no mask": Case(HeadForm(mask=False, pad=4)),
    "filled, forward only": Case(HeadForm(head="filled"), forward_only=True),
    "filled, recomputed": Case(
        HeadForm(head="filled"), build={"recompute": "full"}, prefix={"memory": "recompute"}
    ),
    "filled, which says something": Case(HeadForm(head="filled", scale=0.5)),
    "moved, experts": Case(HeadForm(head="moved"), model="tiny-moe"),
}
JOBS = {
    "one rank": (Layout(), ONE),
    "TP2": (Layout(tp=2), forms("filled")),
    "TP2 SP": (Layout(tp=2, sequence_parallel=True), forms(pad=2)),
    "PP2": (Layout(pp=2), forms(where="ends")),
    "CP2": (Layout(cp=2), forms("kernels", "filled")),
}


class NoLoss(HeadTrainer):
    """No rollout carries loss, and all of them begin alike: next to nothing is computed."""

    def samples(self, seed, num):
        found = super().samples(seed, num)
        for tokens, trained in found:
            tokens[:2], trained[:] = 5, False
        return found


def without_loss(head, packed):
    """Logs of a step without loss, and whether anything has a gradient."""
    runtime.initialize(Layout())
    form = HeadForm(head=head, packed=packed)
    chunks = built(Case(form), Layout())
    put_into(chunks[0], head)
    logs, gradients = run_step(PrefixSchedule(CONFIG), NoLoss(form, 0, Layout()), chunks)
    runtime.shutdown()
    return len(logs), any(bool(gradient.any()) for gradient in gradients.values())


@pytest.mark.parametrize(("head", "packed"), zip(HEADS, (True, False, True), strict=True))
def test_a_step_without_loss_is_answered_in_the_shapes_of_heads(head, packed):
    assert run_ranks(1, without_loss, head, packed) == [(len(HeadForm().sizes), False)]


def compare(case, layout):
    """Ours against the stock schedule on the same calls of the same model."""
    chunks = built(case, layout)
    for chunk in chunks:
        put_into(chunk, case.form.head)
    compare_with(case, layout, chunks, HeadTrainer)


@pytest.mark.parametrize("job", JOBS)
def test_heads_run_where_their_output_is_asked_for(job):
    check_cases(*JOBS[job], compare)
