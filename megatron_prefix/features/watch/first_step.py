"""A trainer's step with the stock schedule, watched before any of its steps is shared.

The prefix schedule runs what all forward steps do before their model calls first, then the
segments, and then what follows the calls.  Stock takes turns: forward step, loss, forward step,
loss.  To most trainers that is the same.  It is not to one that draws random numbers in both parts,
reads in a loss what a later forward step has written by then, exchanges with other data-parallel
ranks, switches parts of the model for its call, or calls it more than once or not at all; and only
outputs show whether a head returns something per position.  So mode "auto" runs the first step of a
kind as stock does, bit for bit, and looks.  What nothing here can see is in
docs/limits.md.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix import trainers
from megatron_prefix.errors import Reason, UserError
from megatron_prefix.features.watch import traces
from megatron_prefix.megatron.install import installed, intercepted
from megatron_prefix.refusals.table import (
    AHEAD_HEAD,
    BESIDE_LOGITS,
    CALL_IN_BACKWARD,
    CALL_IN_LOSS,
    DATA_EXCHANGE,
    DRAWN_AGAIN,
    FILLED,
    FP8_INSIDE,
    LOSS_LEAVES,
    LOSS_READS,
    MODEL_DRAWS,
    NO_CALL,
    OTHER_OUTPUT,
    OTHER_SENT,
    OTHER_SHAPE,
    OVERWRITTEN,
    RANDOM_IN_BOTH,
    STRAY_GRADIENT,
    SWITCHED,
    TORCH_MODES,
    TRAINING_MODE,
    TWO_CALLS,
)
from megatron_prefix.run.calls import FILLED_BY_MODEL
from megatron_prefix.run.execute.call_outputs import CHECKED_ROWS, largest
from megatron_prefix.run.rank import default_groups
from megatron_prefix.run.read import heads, random_numbers
from megatron_prefix.run.read.data_iterators import observed
from megatron_prefix.run.read.forward_step_state import fixed, quantises
from megatron_prefix.run.read.loss_variables import Place, code_of, places, used_names
from megatron_prefix.run.read.model_state import ModelState, outer_modules
from megatron_prefix.run.read.suspend import is_beside, takes_beside
from megatron_prefix.run.request import Request

HELD = 256
"""Values that one loss may read, and places of them, that are looked at."""
DRAWN = 4
"""Things drawn last that are looked for again."""
LIKE_BATCHES = 2
"""Dimensions of what a trainer may keep of all microbatches: [samples, positions], no logits."""
_READS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CONST"}
_NUMBERS = (bool, int, float, str, bytes, type(None))


class _Marks(NamedTuple):
    random: dict[str, bytes]
    exchanges: list[int]
    bound: list[dict[str, Any]]


@dataclass
class _RunningStep:
    """A forward step, or its loss, that runs.

    Attributes:
        number: of its microbatch on this model chunk's rank, in the order in which they begin.
        start: marks at its begin; None once it has called the model.
        resumed: marks when the model had returned, or at the begin of a loss.
        depth: of calls in one another: wrappers, and the model in them.
        before: what the microbatch before it reads, as it was when this one began.
        held: lists, dicts and tensors that it may write in place, as they were when it began.
        modes: torch's, and transformer-engine's quantisation, when it began; None in a loss.
        state: of the models, when it began; None in a loss, and where it is suspended, which looks
            itself (run/read/suspend.py).
        after: of the models, when one had returned, or at the begin of a loss.
        sent: what the model returned for the next pipeline stage: its place, shape and version.
    """

    number: int
    start: _Marks | None = None
    resumed: _Marks | None = None
    num_calls: int = 0
    depth: int = 0
    before: traces.Values | None = None
    held: traces.Values | None = None
    modes: tuple[Any, bool] | None = None
    state: ModelState | None = None
    after: ModelState | None = None
    sent: tuple[Any, ...] | None = None


_running: ContextVar[_RunningStep | None] = ContextVar("running", default=None)
# A suspended forward step has a context of its own (run/read/suspend.py).


class FirstStep:
    """Watches a step; its microbatches run one after another, or are suspended in their calls.

    Args:
        suspended: whether forward steps are suspended in their calls, which stock does not run.

    Attributes:
        losses_exchange: whether losses, or what follows a model call, exchange with other
            data-parallel ranks; only where the stock schedule runs, which calls them in order.
    """

    def __init__(self, request: Request, *, suspended: bool) -> None:
        self.rank = rank = request.rank
        self._function = function = request.arguments["forward_step_func"]
        self.suspended, self._masks_tell_loss = suspended, not request.callbacks.masks_tokens
        self._takes_beside, self._runs_outside = takes_beside(request), request.runs_outside
        self.reason: Reason | None = None
        self.losses_exchange = False
        self._places = [*places(function, *rank.scale_functions)]
        self._restored = {id(_dict_of(place)) for place in self._places}
        groups = rank.groups
        ranks_of = dist.get_process_group_ranks
        inside = {r for group in (groups.tp, groups.pp, groups.cp) for r in ranks_of(group)}
        data = rank.data_ranks or default_groups().dp_cp
        self._groups = traces.groups_beyond(inside, ranks_of(data))
        self._iterators: dict[int, Any] = {}
        self._drawn: dict[int, traces.Values] = {}
        self._seen: list[tuple[str, Any]] = []
        self._written: dict[int, Any] = {}
        self._random: tuple[set[str], set[str]] = set(), set()
        self._reads: set[str] = set()
        self._strays: list[Tensor] = []
        self._modes = [m.training for model in rank.models for m in model.modules()]
        self._number, self._called_always = 0, True
        generators = dict(traces.held_generators(rank.language_models))
        counts = random_numbers.counts_taken(rank.device)
        self._random_use = random_numbers.RandomUse(
            rank.language_models,
            lambda: random_numbers.not_counted(rank.device) | traces.other_states(generators),
            (lambda: random_numbers.taken(rank.device)) if counts else None,
        )
        self._graphs: dict[int, traces.CallGraph] = {}

    @property
    def error(self) -> UserError | None:
        return None if self.reason is None else self.reason.error()

    def check(self) -> None:
        """Raises what is in the way.

        Raises:
            CannotShare: see `reason`.
        """
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(self._iterators.clear)  # a circle, which would wait for the collector
            for model in self.rank.models:
                stack.enter_context(intercepted(model, self._intercepting))
                for hook in (
                    model.register_forward_pre_hook(self._enter, prepend=True),
                    model.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.callback(hook.remove)
            yield
        if not self._called_always:  # a reentrant checkpoint around the call has told by now
            self._note(NO_CALL.given())
        if self._strays and bool(torch.stack(self._strays).any()):
            self._note(STRAY_GRADIENT.given())

    def forward_step(self, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's forward step; items that it draws are noted."""
        key = id(data_iterator)
        if key not in self._iterators:  # the same one each time, as the trainer's
            self._iterators[key] = observed(data_iterator, self._drew)
        seen, self._seen = self._seen, []
        own = (  # what it may write in place, as that is bound under no name that is restored
            (str(name), value)
            for place in self._places
            for name, value in place.read().items()
            if isinstance(value, list | deque | set | np.ndarray | Tensor)
        )
        step = _RunningStep(
            self._number, self._marks(), before=traces.Values(seen),
            held=traces.Values(itertools.islice(own, HELD)), modes=(fixed(), quantises()),
            state=None if self.suspended else self._state(),
        )  # fmt: skip
        self._number += 1
        with self._as_running(step):
            returned = self._function(self._iterators[key], *args, **kwargs)
        if step.num_calls > 1:
            self._note(TWO_CALLS.given())
        self._called_always &= step.num_calls > 0
        if (
            step.sent is not None
            and isinstance(returned, tuple)
            and _passed_on(returned[0]) != step.sent
        ):
            self._note(OTHER_SENT.given())
        for function in self.rank.scale_functions:
            self._reads_later(function, step)
        if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
            return returned
        self._reads_later(returned[1], step)
        return returned[0], functools.partial(self._loss, returned[1], step.number)

    def _reads_later(self, function: Callable[..., Any], step: _RunningStep) -> None:
        """Of a function that is called behind the forward step: what it may read."""
        read = [*itertools.islice(_read_by(function, self._restored), HELD)]
        for name, value in read:
            if id(value) in self._written:
                self._note(OVERWRITTEN.given(name, step.number))
        self._seen += read

    @contextlib.contextmanager
    def _as_running(self, step: _RunningStep) -> Iterator[None]:
        token = _running.set(step)
        try:
            yield
            self._ended(step)
        finally:
            _running.reset(token)

    def _loss(self, function: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        loss = _RunningStep(number, resumed=self._marks(), after=self._state())
        with self._as_running(loss):
            returned = function(*args, **kwargs)
        if loss.num_calls:
            self._note(CALL_IN_LOSS.given())
        graph = self._graphs.pop(number, None)
        value = returned[0] if isinstance(returned, tuple) else returned
        if graph is not None and isinstance(value, Tensor) and graph.is_read_inside(value):
            self._note(LOSS_READS.given())
            if self.suspended:  # what it reads is of segments: its backward would fail
                self.check()
        return returned

    # The model call -------------------------------------------------------------------------------

    def _intercepting(self, model: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            step, hooks = _running.get(), installed(model)
            if step is None or (hooks is not None and hooks.current is not None):
                if hooks is None or hooks.current is None:  # no segment: a checkpoint runs again
                    self._note(CALL_IN_BACKWARD.given())
                return stock(*args, **kwargs)
            if self._is_beside(step):
                with contextlib.nullcontext() if step.state is None else step.state.own():
                    output = stock(*args, **kwargs)
                if _is_large(output):
                    self._note(BESIDE_LOGITS.given())
                return output
            step.num_calls += 1
            self._compare_modes(step)
            self._compare_state(step, inner=self._runs_outside)
            self._seen += [("an argument of the model", argument) for argument in (*args, kwargs)]
            begin, brought = traces.next_number(), dict(_filled(kwargs))
            self._enter()
            try:
                output = self._drawing(lambda: stock(*args, **kwargs))
            finally:
                self._leave()
            if getattr(model, "post_process", True):
                self._graphs[step.number] = traces.CallGraph.of(begin, output)
                tokens = args[0] if args else kwargs.get("input_ids")
                if not all(map(heads.is_shared, heads.added(_filled(kwargs), brought).values())):
                    self._note(FILLED.given(FILLED_BY_MODEL))
                self._look_at(output, self._shape_of_call(model, tokens), kwargs)
                if self._masks_tell_loss:
                    self._watch_gradient(output, kwargs.get("loss_mask"))
            elif not self.suspended:
                step.sent = _passed_on(output)
            return output

        return forward

    def _drawing(self, call: Callable[[], Any]) -> Any:
        if self.suspended:  # segments answer it (run/read/random_numbers.py)
            return call()
        with self._random_use.watching(), self._random_use.calling() as names:
            output = call()
        if names:
            self._note(MODEL_DRAWS.given(", ".join(names)))
        return output

    def _enter(self, *_: Any) -> None:
        step = _running.get()
        if step is None or self._is_beside(step):
            return
        step.depth += 1
        if step.start is None:
            return
        before, now, step.start = step.start, self._marks(), None
        self._compare_state(step)
        if self._modes != [m.training for model in self.rank.models for m in model.modules()]:
            self._note(TRAINING_MODE.given())
        self._random[0].update(_values_differ(before.random, now.random))
        if before.exchanges != now.exchanges:
            self._note(DATA_EXCHANGE.given())
        for name, _ in step.before.changed() if step.before else ():
            self._note(OVERWRITTEN.given(name, step.number - 1))
        # Not what a later step may write to once more: with one microbatch nothing is wrong.
        if step.held and step.number:
            self._written |= {id(value): value for _, value in step.held.changed()}
        self._reads |= _loads(self._function)

    def _leave(self, *_: Any) -> None:
        step = _running.get()
        if step is None or self._is_beside(step):
            return
        step.depth -= 1
        if not step.depth and step.resumed is None:
            step.resumed, step.after = self._marks(), self._state()

    def _is_beside(self, step: _RunningStep) -> bool:
        if not self._takes_beside or step.modes is None:  # or it is in a loss
            return False
        return is_beside(self.rank.language_models[0], called=step.num_calls > 0)

    def _shape_of_call(self, model: Any, tokens: Any) -> tuple[int, int] | None:
        """Samples and positions of a call that stock runs; None if nothing says them.

        Off the first stage a trainer may give any tokens (SkyRL: those of another layout).
        """
        if not getattr(model, "pre_process", True):
            if self.suspended:  # the segments' outputs are checked
                return None
            received = model.decoder.input_tensor
            if not isinstance(received, Tensor):
                return None
            parts = self.rank.groups.tp.size() if self.rank.config.sequence_parallel else 1
            return received.shape[1], received.shape[0] * parts
        if not isinstance(tokens, Tensor) or tokens.is_nested or tokens.dim() != 2:
            return None
        return tokens.shape[0], tokens.shape[1]

    def _look_at(
        self, output: Any, shape: tuple[int, int] | None, arguments: dict[str, Any]
    ) -> None:
        if shape is None:
            return
        if self.rank.model.looks_ahead and not isinstance(output, Tensor):  # Megatron's gives one
            self._note(AHEAD_HEAD.given())
        rows, num = shape[0], shape[1] - heads.moves_labels(arguments)
        shares = (num // self.rank.model.sequence_ranks, rows)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, _NUMBERS):
                continue
            if not isinstance(leaf, Tensor):
                self._note(OTHER_OUTPUT.given(type(leaf).__name__))
            elif leaf.shape[:2] not in ((rows, num), (num, rows), shares) and (
                leaf.shape != (rows * num,)
            ):
                self._note(OTHER_SHAPE.given(list(leaf.shape), rows * num))

    def _watch_gradient(self, output: Any, mask: Any) -> None:
        """Looks for gradients of positions that the call's loss_mask leaves out."""
        if not isinstance(mask, Tensor):
            return

        def look(gradient: Tensor) -> None:
            if gradient.shape[:2] == mask.shape:
                rows, left_out = gradient.flatten(0, 1), (mask == 0).flatten().nonzero()[:, 0]
                for part in left_out.split(CHECKED_ROWS) if len(left_out) else ():
                    self._strays.append(largest(rows.index_select(0, part)))

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(look)

    # What was changed -----------------------------------------------------------------------------

    def _marks(self) -> _Marks:
        return _Marks(
            traces.random_states(self.rank.device), traces.exchanges(self._groups),
            [place.read() for place in self._places],
        )  # fmt: skip

    def _drew(self, item: Any) -> None:
        if isinstance(item, (*_NUMBERS, tuple)):
            return
        values = self._drawn.get(id(item))
        if values is not None and values.changed():
            self._note(DRAWN_AGAIN.given(type(item).__name__))
        # It holds the item, so that no other gets its id; not all of a step's, for their memory.
        self._drawn[id(item)] = traces.Values([("", item)])
        if len(self._drawn) > DRAWN:
            del self._drawn[next(iter(self._drawn))]

    def _ended(self, step: _RunningStep) -> None:
        if step.resumed is None:
            return
        if step.after is not None:
            for change in step.after.changes()[:1]:
                self._note(SWITCHED.given(step.after.path(change)))
        now = self._marks()
        self._random[1].update(_values_differ(step.resumed.random, now.random))
        if step.resumed.exchanges != now.exchanges:
            self.losses_exchange = True
            if self.suspended:  # perhaps in another order than other ranks'
                self._note(DATA_EXCHANGE.given())
        if kinds := sorted(self._random[0] & self._random[1]):
            self._note(RANDOM_IN_BOTH.given(", ".join(kinds)))
        trainer = trainers.running_trainer()
        # Names of which is known that no forward step reads them.
        is_tried = trainer is not None and trainer.version in trainer.tried
        unread_names = trainer.losses_set if trainer and is_tried else frozenset()
        for old, new in zip(step.resumed.bound, now.bound, strict=True):
            changed = {str(n) for n, value in new.items() if old.get(n, self) is not value}
            for name in sorted(changed & self._reads - unread_names):
                self._note(LOSS_LEAVES.given(name))

    def _compare_modes(self, step: _RunningStep) -> None:
        if step.modes is None:
            return
        before, quantised = step.modes
        if quantises() and not quantised:
            self._note(FP8_INSIDE.given())
        elif fixed() != before:
            self._note(TORCH_MODES.given())

    def _state(self) -> ModelState:
        models = [*self.rank.language_models, *self.rank.models]
        outer = outer_modules(self._places, models)
        return ModelState(models, len(self.rank.models), outer, samples=not self.suspended)

    def _compare_state(self, step: _RunningStep, *, inner: bool = False) -> None:
        """Notes what a forward step has changed of the models before its call.

        Not of the first, which may set once what stays; what it sets back shows in `_ended`, and
        what another step sets in that step.
        """
        if step.state is not None and step.number:
            for change in step.state.changes(inner=inner)[:1]:
                self._note(SWITCHED.given(step.state.path(change)))

    def _note(self, reason: Reason) -> None:
        self.reason = self.reason or reason


def _passed_on(output: Any) -> tuple[Any, ...] | None:
    """What tells the tensor that goes to the next pipeline stage from another, and from itself
    changed in place."""
    if not isinstance(output, Tensor):
        return None
    version = None if output.is_inference() else output._version
    return output.data_ptr(), output.shape, version


def _values_differ(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name, state in after.items() if before.get(name) != state}


def _read_by(loss: Callable[..., Any], restored: set[int]) -> Iterator[tuple[str, Any]]:
    """What a loss function may read and a later forward step may write, by name.

    Args:
        restored: identities of dicts whose items are set again for a loss (see
            run/read/loss_variables.py).
    """
    used = used_names(loss)
    while isinstance(loss, functools.partial):
        by_number = (*((f"argument {n}", value) for n, value in enumerate(loss.args)),)
        named = (*by_number, *loss.keywords.items())
        yield from ((name, value) for name, value in named if _has_part(value))
        loss = loss.func
    for place in itertools.islice(places(loss), HELD):
        if isinstance(items := _dict_of(place), dict) and id(items) not in restored:
            yield "a dict", items
        for name, value in place.read().items():
            if _has_part(value) and (used is None or name in used):
                yield str(name), value


def _dict_of(place: Place) -> Any:
    return getattr(place.write, "__self__", None)


def _has_part(value: Any) -> bool:
    """Whether a value can be written in place, and is not a model, function or module."""
    if isinstance(value, (*_NUMBERS, type, nn.Module, types.ModuleType)):
        return False
    return isinstance(value, Tensor) or not callable(value)


def _is_large(output: Any) -> bool:
    """Whether a call's output is too large to be there for all microbatches at once, as what a
    suspended forward step holds is; the stock schedule has one at a time."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return any(tensor.squeeze(-1).dim() > LIKE_BATCHES for tensor in tensors)


def _loads(function: Any) -> set[str]:
    """Names that a forward step has read by now, in its own code: it is on the stack."""
    code, frame = code_of(function), sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return set()
    steps = [i for i in dis.get_instructions(frame.f_code) if i.offset <= frame.f_lasti]
    reads = set()
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        stored = after is not None and after.opname.startswith("STORE_SUBSCR")
        if step.opname in _READS and isinstance(step.argval, str) and not stored:
            reads.add(step.argval)
    return reads


def _filled(arguments: Mapping[str, Any]) -> dict[Any, Any]:
    filled: dict[Any, Any] = arguments[FILLED_BY_MODEL] if heads.fills(arguments) else {}
    return filled
