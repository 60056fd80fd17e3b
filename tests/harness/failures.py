"""Steps that fail: the places where they can, and two trees on which they do."""

import numpy as np

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.run import step_reader
from megatron_prefix.sidecar import cache as cache_module
from tests.harness import steps
from tests.harness.steps import Contract


class Fault(Exception):
    """Raised in the middle of a step."""


def items():
    """Two trees with inner loss, of five inner segments (two chains) and three waves each."""
    draw = np.random.default_rng(3)
    found = []
    for group in range(2):
        prompt, turn = draw.integers(0, 60, 20), draw.integers(0, 60, 12)
        starts = np.r_[prompt, turn], np.r_[prompt, turn], prompt
        found += steps.answers(draw, starts, 6, 19, group, len(found))
    return found


CONFIG = PrefixConfig(min_gain=0, chunk_tokens=8, segment_tokens=8, kernel="math")


class Countdown:
    """Raises when it has been called `after` times."""

    def __init__(self, error, after):
        self.error, self.left = error, after

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            raise self.error("injected")


def run(schedule, model, contract=None):
    return steps.run(schedule, (contract or Contract()).step, model, items())


def raised(error, function, *args):
    """The message with which `function` fails; its traceback, which holds every local, is gone."""
    try:
        function(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def before_call(owner, name):
    """Fails when `owner.name` is called; `owner` may be a function of the model."""

    def inject(monkeypatch, model, tick):
        target = owner(model) if callable(owner) and not isinstance(owner, type) else owner
        stock = getattr(target, name)

        def failing(*args, **kwargs):
            tick()
            return stock(*args, **kwargs)

        monkeypatch.setattr(target, name, failing)

    return inject


def before_kernel(name, *, causal):
    """Fails in a call of the kernel on runs with a mask, or without one."""

    def inject(monkeypatch, model, tick):
        stock = getattr(KERNELS["math"], name)

        def failing(*args):
            if args[-2].causal == causal:
                tick()
            return stock(*args)

        monkeypatch.setattr(KERNELS["math"], name, failing)

    return inject


def in_backward_of(name):
    """Fails in a hook on the gradient of a module's output, in the middle of a backward."""

    def inject(monkeypatch, model, tick):
        module = unwrap(model).get_submodule(name)
        stock = module.forward

        def forward(*args, **kwargs):
            result = stock(*args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            if output.requires_grad:
                output.register_hook(lambda gradient: tick())
            return result

        monkeypatch.setattr(module, "forward", forward)

    return inject


def in_loss(*, backward):
    """Fails in the trainer's loss function, or in the loss's backward."""

    def inject(monkeypatch, model, tick):
        stock = Contract.loss_func

        def loss_func(contract, batch):
            function = stock(contract, batch)

            def failing(output):
                if backward:
                    output = output * 1.0
                    output.register_hook(lambda gradient: tick())
                else:
                    tick()
                return function(output)

            return failing

        monkeypatch.setattr(Contract, "loss_func", loss_func)

    return inject


def mlp(model):
    return unwrap(model).decoder.layers[1].mlp


def config_of(model):
    return unwrap(model).config


# name: (where, at which call)
PLACES = {
    "the first forward of a layer": (before_call(mlp, "forward"), 1),
    "a later forward of a layer": (before_call(mlp, "forward"), 9),
    "the decoder's forward": (before_call(lambda m: unwrap(m).decoder, "forward"), 4),
    "the output layer": (before_call(lambda m: unwrap(m).output_layer, "forward"), 3),
    "a dense block": (before_kernel("forward", causal=False), 11),
    "a causal block": (before_kernel("forward", causal=True), 7),
    "the backward of a dense block": (before_kernel("backward", causal=False), 7),
    "the backward of a causal block": (before_kernel("backward", causal=True), 9),
    "capture of K/V": (before_call(cache_module.SidecarCache, "capture"), 4),
    "sending gK/gV": (before_call(cache_module.SidecarCache, "add"), 5),
    "taking gK/gV": (before_call(cache_module.SidecarCache, "take"), 2),
    "a backward hook in a layer": (in_backward_of("decoder.layers.0.mlp"), 5),
    "the last backward of the step": (in_backward_of("decoder.layers.0.mlp"), 16),
    "the loss function": (in_loss(backward=False), 3),
    "the backward of the loss": (in_loss(backward=True), 4),
    "the trainer's forward step": (before_call(Contract, "step"), 4),
    "the trainer's forward step after its model call": (before_call(Contract, "loss_func"), 4),
    "reading model calls": (before_call(step_reader, "read_calls"), 1),
    "building the tree": (before_call(step_reader, "read_step"), 1),
    "finalize_model_grads": (before_call(config_of, "finalize_model_grads_func"), 1),
}
