"""Routes of model calls of every form: rows and packs of several samples, which ranks cut."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.features.replay.routes import ToldRoutes
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_model_calls import Case, built, compare_with
from tests.harness.calls import ROWS, Form, Trainer
from tests.harness.ranks import check_cases

EXPERTS = 8
OVERRIDES = {"moe_enable_routing_replay": True}
CASES = {
    "packed": Case(Form(), model="tiny-moe", overrides=OVERRIDES),
    "packed, no mask, forward only": Case(
        Form(mask=False), model="tiny-moe", overrides=OVERRIDES, forward_only=True
    ),
    "rows": Case(ROWS, model="tiny-moe", overrides=OVERRIDES),
    "recomputed": Case(
        ROWS, model="tiny-moe", overrides=OVERRIDES, build={"recompute": "full"},
        prefix={"memory": "recompute", "segment_tokens": 8},
    ),
}  # fmt: skip
PADDED = {
    name: replace(CASES[name], form=replace(CASES[name].form, pad=2)) for name in ("packed", "rows")
}
JOBS = {
    "one rank": (Layout(), CASES),
    "CP2": (Layout(cp=2), {name: CASES[name] for name in ("packed", "rows")}),
    "TP2 SP": (Layout(tp=2, sequence_parallel=True), PADDED),
}


class Routed(Trainer):
    """Positions follow their own tokens; one sample in three leaves the others in its prompt."""

    routers: Sequence[Any] = ()

    def batch_of(self, members, number, multiple):
        """See `Trainer.batch_of`."""
        batch = super().batch_of(members, number, multiple)
        codes = []
        for place, (tokens, *_) in enumerate(members):
            length = batch["lengths"][place]
            known = np.pad(tokens[:-1], (0, length - len(tokens) + 1)).astype(np.int64)
            code = np.cumsum(known * 31 + 7) % 9973
            code[11:] += (number + place) % 3 == 0
            codes.append(code)
        mine = self.cut(codes)
        batch["codes"] = np.concatenate(mine)[None] if self.form.packed else np.stack(mine)
        return batch

    def arguments(self, batch, given):
        """Tells the routers what follows, as trainers do before the model call."""
        code = torch.from_numpy(batch["codes"]).transpose(0, 1).flatten()
        for router in self.routers:
            first = code * router.layer_number % EXPERTS
            second = (first + 1 + code // 7 % (EXPERTS - 1)) % EXPERTS
            parts = torch.stack([first, second], 1).chunk(
                router.tp_group.size() if router.config.sequence_parallel else 1
            )
            mine = parts[router.tp_group.rank() if len(parts) > 1 else 0]
            router.router_replay.set_target_indices(mine)
        return {}


def compare(case, layout):
    """Ours against the stock schedule with the same routes."""
    chunks = built(case, layout)
    compare_with(case, layout, chunks, following(Routed, chunks))


def following(kind, chunks):
    """A trainer of these chunks, whose routers replay."""
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    found = [one for chunk in chunks for one in routers_in(unwrap(chunk)).values()]
    return type("Following", (kind,), {"routers": found})


@pytest.mark.parametrize("job", JOBS)
def test_routes_are_read_in_the_layout_of_the_calls(job):
    check_cases(*JOBS[job], compare)


def test_rows_in_the_order_of_positions_are_seen(monkeypatch):
    stock = ToldRoutes.gathered

    def as_packs(self, layouts, *where):
        return stock(self, [one._replace(packed=True) for one in layouts], *where)

    monkeypatch.setattr(ToldRoutes, "gathered", as_packs)
    with pytest.raises((AssertionError, runtime.RankError)):
        check_cases(Layout(cp=2), {"rows": CASES["rows"]}, compare)
