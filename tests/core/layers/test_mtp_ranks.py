"""Multi-token prediction in layouts of several ranks: what all of them refuse together."""

import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from tests.harness import calls
from tests.harness.calls import Form, Trainer
from tests.harness.one_group import schedule_with
from tests.harness.ranks import run_ranks


def refused_on(layout, change, form):
    """Why each rank of a step in mode "on" does not run it."""

    def rank_of():
        runtime.initialize(layout)
        trainer = Trainer(form, 3, layout)
        change(trainer, torch.distributed.get_rank())
        spec = resolve("tiny-llama", num_layers=2, mtp_num_layers=1).with_vocab(64)
        chunks = build_model(spec, layout=layout, dtype="float64")
        try:
            calls.run_step(schedule_with(), trainer, chunks)
        except CannotShare as error:
            return str(error)
        return ""

    return run_ranks(layout.world_size, rank_of, timeout_s=120)


def test_what_one_rank_lacks_is_refused_on_all():
    """A last stage without tokens, where Megatron's own schedule fails; a rank without weights."""

    def change(trainer, rank):
        if rank:
            trainer.batches[1]["loss_mask"].zero_()

    found = refused_on(Layout(pp=2), lambda *_: None, Form(where="ends"))
    assert all("of the last pipeline stage have no input_ids" in why for why in found), found
    found = refused_on(Layout(dp=2), change, Form())
    assert all("no position for the loss of multi-token" in why for why in found), found
