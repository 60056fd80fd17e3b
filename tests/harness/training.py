"""Small training runs in fresh processes, and what is compared of them."""

import itertools
import json
from dataclasses import asdict

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.rl import snapshot
from megatron_prefix.lab.rl.checkpoint import Identity
from megatron_prefix.lab.rl.dataset import RolloutSet
from megatron_prefix.lab.rl.job import ModelOptions, fit_vocabulary
from megatron_prefix.lab.rl.loss import GrpoConfig
from megatron_prefix.lab.rl.run import run
from megatron_prefix.lab.rl.settings import RunOptions, TrainSettings
from megatron_prefix.lab.rl.trainer import Trainer
from megatron_prefix.lab.runtime import Layout
from tests.harness.data import BUNDLED
from tests.harness.ranks import run_ranks

SMALL = ModelOptions("tiny-llama", overrides=(("num_layers", 2),))
TIMES = ("_s", "_per_s", "/old_log_prob", "/ref", "/update_actor", "/step", "/time_per_step",
         "/throughput", "/tflops")  # fmt: skip
"""How the names of metrics end that are times or rates, and so never the same twice."""


def bundled():
    """The first bundled groups, cut short; five, so that two steps of two end in the middle."""
    groups = itertools.islice(read_groups(BUNDLED), 5)
    return [kept for group in groups if (kept := shorten(group, 120)[0])]


def settings(**fields):
    """A run whose every part has something to do."""
    mode = fields.pop("mode", "on")
    values = dict(
        groups_per_step=2, lr=1e-2, warmup_steps=3, grpo=GrpoConfig(kl_coeff=0.05),
        prefix=PrefixConfig(mode=mode, min_gain=8),
    )  # fmt: skip
    return TrainSettings(**{**values, **fields})


def train(
    folder, steps, train_settings, groups=None, *, layout=None, options=SMALL, look=None, **more
):  # fmt: skip
    """Runs a job in fresh processes; per rank the summary, and what `look` found at the end: else
    the parameters."""
    spec, fitted = fit_vocabulary(options, groups or bundled())
    layout = layout or Layout()

    def on_rank():
        world = runtime.initialize(layout, "cpu", options.seed)
        rollouts = RolloutSet(tuple(fitted))
        trainer = Trainer(train_settings, rollouts, options, spec, world)
        distributed = train_settings.distributed_optimizer
        identity = Identity(
            asdict(spec), options.dtype, options.seed, rollouts.fingerprint, distributed
        )
        summary = run(trainer, RunOptions(steps, folder, **more), identity, lambda step: None)
        return summary, look(trainer) if look else snapshot.parameters(trainer.chunks)

    return run_ranks(layout.world_size, on_rank)


def metrics_of(folder):
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [{n: v for n, v in row.items() if not n.endswith(TIMES)} for row in rows]


def whole_state(trainer):
    found = snapshot.parameters(trainer.chunks)
    for chained in trainer.optimizer.chained_optimizers:
        parameters = [p for group in chained.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            for name, value in chained.optimizer.state[parameter].items():
                found[f"{number}.{name}"] = value.clone()
    return found


def assert_same(first, second):
    """Bit by bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
