"""The only file that hooks Megatron.

Hooks on a built model; none replaces a module or changes a checkpoint key:

1. a pre-hook on the decoder gives every token the rotary embedding of its position in its rollout;
2. the *instance's* `core_attention.forward` runs the segment's blocks; from there on the last layer
runs on the positions whose output is read (`linear_proj`, `self_attn_bda`, `mlp`);
3. the *instances'* methods that other kinds of layers name (`Kind.overrides`), such as the first
operation of a layer that begins spans with their parents' states;
4. the *instance's* `forward` of the decoder lets an offloaded segment take what it saves, and a
hook on every layer says where one ends; its output is kept for other ranks, and what another rank
has computed is its output, without a layer;
5. the *instance's* `compute_language_model_loss` does not wait for the device (cross_entropy.py);
6. what a part of the step has in the place of methods (`Hooks.keep`);
7. for the time of a step, the *instance's* `forward` of the language model is where the trainer's
forward steps are suspended (`intercepted`); where that calls its parent class's for the language
model, it is the parent's (parents.py).

Outside of segments they do nothing, so the stock schedule works on an installed model. The running
segment is an attribute, not thread-local: on CUDA backward runs on another thread, and activation
recomputation runs the forward there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from megatron_prefix.device.modules import modules_of
from megatron_prefix.errors import refused
from megatron_prefix.layers import table
from megatron_prefix.layers.attention import window_of
from megatron_prefix.layers.blocks.kernels import Kernel, choose_kernel
from megatron_prefix.layers.blocks.merge import prepare
from megatron_prefix.layers.blocks.rotary import Rotary
from megatron_prefix.layers.blocks.unread import picked, skipped
from megatron_prefix.layers.kind import Override, Part, Slot, Tap
from megatron_prefix.layers.precision import is_fp8
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.megatron import families, features, parents
from megatron_prefix.megatron.cross_entropy import without_waiting
from megatron_prefix.refusals.table import NO_LANGUAGE_MODEL, ROTARY_TABLES
from megatron_prefix.tree.payload_map import Form

logger = logging.getLogger(__name__)
_INSTALLED = "_megatron_prefix_hooks"
WALK = "_megatron_prefix_walk"
"""The attribute of a language model that keeps a walk of it (run/read/model_walk.py), so that both
go together."""


class Kept(Protocol):
    """What a part of a step keeps with a model until the next step."""

    @property
    def device_bytes(self) -> int:
        """Allocated on the device in between."""
        ...

    def give_back(self) -> None:
        """Frees that at once; nothing reads it any more, though hooks may still refer to it."""
        ...


class Hooks:
    """The hooks of one model chunk.

    Attributes:
        parts: what leaves a payload in its layers, in the order in which it runs; the sidecar has
            their numbers.
        keys_only: the layer of which a segment without loss needs K and V only: the last one of the
            last stage; None elsewhere, and where it cannot end early.
        rotary_slice: (the table that the model has made from positions of its call, how many
            positions) -> the running segment's, in this step; None where tables are ours.
        angles: what its decoder is given of rotary embeddings, while a segment runs.
        turn: of modules that run several times in a pass, with a number in the sidecar each time,
            how often the one that runs has run before.
    """

    turn = 0
    mlp_tap: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] | None = None

    def __init__(self, model: nn.Module, kernel: str) -> None:
        self.model = language_model(model)
        features.check(self.model, model)
        self.parts = table.payload_parts(self.model)
        # Kinds do not know modules whose methods are overridden.
        self.slots = [*zip(*(table.parts(self.model, slot) for slot in Slot), strict=True)]
        self._forms, self._windows = table.forms(self.parts), _module_windows(self.parts)
        of_decoder = [mixer for mixer, _ in self.slots[: len(self.model.decoder.layers)]]
        self._decoder_forms = table.forms(of_decoder)
        self._reads_all = hasattr(self.model, "mtp")  # behind the decoder
        self.mask_use = features.mask_use(self.parts)
        config = self.model.config
        self._sequence_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        # A stage for the loss alone has no layer.
        last = next(reversed(self.model.decoder.layers), None)
        ends_early = self.model.post_process and last is not None and _can_end_early(last)
        ends_early = ends_early and not self._reads_all
        self.keys_only = len(self.parts) - 1 if ends_early else None
        self.use(kernel)
        self.current: SegmentContext | None = None
        self.packed = False
        self.rotary = Rotary()
        self.rotary_slice: Callable[[Any, int], Any] | None = None
        has_own = families.has_mrope(self.model)
        self._rope = None if has_own else getattr(self.model, "rotary_pos_emb", None)
        self._calls_parent = families.calls_parent(self.model)
        if self._rope is not None:
            self.rotary.add(self._rope)
        self.predicts_further = False
        self.tap: Tap | None = None
        self.kept: dict[Any, Any] = {}
        self._undo_kept: dict[Any, list[Callable[[], None]]] = {}
        self.angles: Tensor | None = None
        self._undo: list[Callable[[], None]] = []
        try:
            self._install()
        except BaseException:
            self.uninstall()
            raise

    def _install(self) -> None:
        decoder = self.model.decoder
        handle = decoder.register_forward_pre_hook(self._entering, with_kwargs=True)
        self._undo.append(handle.remove)
        self._override(decoder, "forward", self._saving(decoder.forward))
        self._override_parts(self.parts)
        self._override_parts([mlp for _, mlp in self.slots])
        if self.keys_only is not None:
            last = decoder.layers[-1]
            projection = last.self_attention.linear_proj
            projecting = self._skipping(projection, self._sequence_ranks, picks=True)
            self._override(projection, "forward", projecting)
            self._override(last, "self_attn_bda", self._adding(last.self_attn_bda))
            self._override(last.mlp, "forward", self._skipping(last.mlp, 1))
        self._override_loss()
        setattr(self.model, _INSTALLED, self)
        self._undo.append(lambda: delattr(self.model, _INSTALLED))

    def keep(self, part: Any, kept: Kept | None, overrides: Iterable[Override] = ()) -> None:
        """Lets a part keep something with the model until it keeps something else, or a step with
        gradients runs without it."""
        for undo in self._undo_kept.pop(part, ()):
            undo()
            self._undo.remove(undo)  # it holds what was kept, with its memory
        if (earlier := self.kept.pop(part, None)) is not None:
            earlier.give_back()
        if kept is not None:
            self.kept[part], before = kept, len(self._undo)
            for override in overrides:
                self._override(*override)
            self._undo_kept[part] = self._undo[before:]

    def keep_only(self, parts: Collection[Any]) -> None:
        for part in self.kept.keys() - parts:
            self.keep(part, None)

    def _override_parts(self, parts: Sequence[Part]) -> None:
        by_module: dict[int, list[list[Override]]] = {}
        for number, (kind, module) in enumerate(parts):
            if kind is not None:
                overrides = [*kind.overrides(module, number, self)]
                by_module.setdefault(id(module), []).append(overrides)
        for turns in by_module.values():
            for (module, name, method), *others in zip(*turns, strict=True):
                methods = [method, *(other for *_, other in others)]
                self._override(module, name, self._in_turn(methods) if others else method)

    def _in_turn(self, methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            return methods[self.turn](*args, **kwargs)

        return method

    def _override_loss(self) -> None:
        stock = getattr(self.model, "compute_language_model_loss", None)
        in_segments = without_waiting(stock, self.model.config)
        if stock is None or in_segments is None:
            return

        def loss(*args: Any, **kwargs: Any) -> Tensor:
            losses: Tensor = (stock if self.current is None else in_segments)(*args, **kwargs)
            return losses

        self._override(self.model, "compute_language_model_loss", loss)

    @property
    def forms(self) -> list[Form]:
        """Of the payloads that its layers leave in this step."""
        unused = self._reads_all and not self.predicts_further
        return self._decoder_forms if unused else self._forms

    def is_current(self) -> bool:
        """Whether its layers have the windows that they had: else all of it is made anew."""
        return self._windows == _module_windows(self.parts)

    def use(self, kernel: str) -> None:
        """Chooses the kernel by name; see megatron_prefix/layers/blocks/kernels.py."""
        self._kernel_name = kernel
        # Those of other stages, too, so that all of them refuse a kernel that has no window.
        windows = {
            *(part.kind.window(part.module) for part in self.parts if part.kind),
            *table.windows(self.model.config),
        }
        num_layers = self._forms.count(Form.POSITIONS)
        self.kernels: dict[int | None, Kernel] = {
            window: _kernel_for(kernel, self.model, num_layers, window)
            for window in {None, *windows}
        }

    @property
    def forward(self) -> Callable[..., Any]:
        if self._calls_parent is None:
            return self.model.forward  # type: ignore[no-any-return]
        return parents.forward(self.model, self._calls_parent)

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    @contextlib.contextmanager
    def running(self, context: SegmentContext, *, scored: bool = True) -> Iterator[None]:
        """Makes `context` the running segment; used around its forward and its backward.

        Args:
            scored: False stops the last stage's forward after the decoder: no logits.
        """
        head = self.model.post_process
        self.current = context
        self.model.post_process = head and scored
        try:
            yield
        finally:
            self.current = self.angles = None
            self.model.post_process = head

    def prepare(self, max_position: int) -> None:
        """Begins a step: informs the kernel, and makes the rotary table long enough.

        It also tells transformer-engine that no backward of this step is the first to write
        main_grad, and makes it quantise weights once more. The first forward is an inner
        segment's, and its backward comes last: with the
        flag True at that forward it would overwrite what every wave has accumulated
        (`is_first_microbatch` in megatron/core/extensions/transformer_engine.py). With it False
        weights in FP8 are what is kept of an earlier step, unless nothing is
        (`get_weight_workspace` in transformer_engine/pytorch/module/base.py).
        """
        for kernel in self.kernels.values():
            kernel.begin_step()
        fp8 = is_fp8(self.model.config)
        for module in modules_of(self.model):
            # Of its own: `getattr` takes long where there is none.
            if (own := vars(module)).get("is_first_microbatch"):
                module.is_first_microbatch = False
            if fp8 and (workspaces := own.get("_fp8_workspaces")):
                workspaces.clear()
        self.rotary.prepare(max_position)

    def end_step(self) -> None:
        self.rotary_slice = None

    def _entering(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """The decoder's arguments: every token's own position, and an input with a gradient.

        Under frozen layers (adapters) K and V would have none, and gK/gV would go no further.
        """
        if self.current is None:
            return None
        kwargs = {**kwargs, "packed_seq_params": None}
        hidden = kwargs.get("hidden_states")
        if hidden is not None and torch.is_grad_enabled() and not hidden.requires_grad:
            kwargs["hidden_states"] = hidden.detach().requires_grad_()
        call_angles = kwargs.get("rotary_pos_emb")
        if self.rotary_slice is not None:
            kwargs["rotary_pos_emb"] = self.rotary_slice(call_angles, len(self.current.positions))
        elif self._rope is not None:
            angles = self.rotary.of(self._rope, self.current.positions)[0]
            if not isinstance(call_angles, Tensor) or call_angles.shape[1:] != angles.shape[1:]:
                raise refused(ROTARY_TABLES, described(call_angles))
            kwargs["rotary_pos_emb"] = angles
        call_angles = kwargs.get("rotary_pos_emb")
        self.angles = call_angles if isinstance(call_angles, Tensor) else None
        return args, kwargs

    def _saving(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = self.current
            if current is not None and current.decoded is not None:
                hidden = current.decoded
                return hidden if self._reads_all else self.read(hidden, current.rows)
            if current is None or current.saving is None:
                hidden = stock(*args, **kwargs)
            else:
                with current.saving():
                    hidden = stock(*args, **kwargs)
            if current is None:
                return hidden
            if current.on_decoded is not None:
                current.on_decoded(hidden)
            is_picked = self._early_rows() is not None or self._reads_all
            return hidden if is_picked else self.read(hidden, current.rows)

        return forward

    def _early_rows(self) -> Tensor | None:
        """The positions on which the end of the last layer runs; None: all."""
        current = self.current
        early = self.keys_only is not None and current is not None and current.on_decoded is None
        return current.rows if early else None  # type: ignore[union-attr]

    def _skipping(self, module: Any, ranks: int, *, picks: bool = False) -> Callable[..., Any]:
        """A module's forward, [positions, 1, hidden_size] and a bias, that computes neither where
        nobody reads them.

        Args:
            ranks: sequence-parallel ranks whose positions its input has.
            picks: whether it gets all positions, and computes those that are read.
        """
        stock, width = module.forward, self.model.config.hidden_size

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            rows = self._early_rows() if picks else None
            if rows is not None:
                x = self._picked(x, rows)
            if self.current is None or self.current.keys_only is None:
                return stock(x, *args, **kwargs)
            return skipped(x, (x.shape[0] // ranks, x.shape[1], width)), None

        return forward

    def _adding(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def self_attn_bda(*args: Any) -> Callable[..., Any]:
            add = stock(*args)
            return lambda x, residual, *extra: add(
                x, self.read(residual, self._early_rows()), *extra
            )

        return self_attn_bda

    def read(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """The positions of hidden states [positions on this rank, 1, hidden_size] that are read; of
        sequence-parallel ranks each gets as many."""
        if rows is None:
            return hidden
        if self._sequence_ranks > 1:
            group = self.model.pg_collection.tp
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
            rows = rows.chunk(self._sequence_ranks)[group.rank()]
        return self._picked(hidden, rows)

    def _picked(self, x: Tensor, rows: Tensor) -> Tensor:
        return picked(x, rows, repeats=self.current.repeats)  # type: ignore[union-attr]

    def _override(self, module: Any, name: str, method: Callable[..., Any]) -> None:
        before = module.__dict__.get(name)
        setattr(module, name, method)

        def undo() -> None:
            if module.__dict__.get(name) is not method:
                return  # it has been replaced since
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)

        self._undo.append(undo)


def language_model(model: nn.Module) -> Any:
    """The language model inside its wrappers: the module that owns the decoder.

    A wrapper may show the decoder of the model inside it (vision-language models do), and it has
    neither its embedding nor its rotary tables.

    Raises:
        CannotShare: there is none of Megatron's, or more than one.
    """
    while isinstance(inside := getattr(model, "module", None), nn.Module):
        model = inside
    if _is_language_model(model):
        return model
    language_models = [module for module in model.modules() if _is_language_model(module)]
    if len(language_models) != 1:
        raise refused(NO_LANGUAGE_MODEL, len(language_models) or "no")
    return language_models[0]


def _is_language_model(module: nn.Module) -> bool:
    return isinstance(module, LanguageModule) and "decoder" in module._modules


def installed(model: nn.Module) -> Hooks | None:
    """The hooks of a model chunk, if it has them; the model may be any."""
    every = (vars(module).get(_INSTALLED) for module in modules_of(model))
    return next(filter(None, every), None)


def give_back(models: nn.Module | Sequence[nn.Module]) -> None:
    """Drops what parts keep with model chunks, where that has memory."""
    chunks = models if isinstance(models, Sequence) else [models]
    for hooks in filter(None, map(installed, chunks)):
        if any(kept.device_bytes for kept in hooks.kept.values()):
            hooks.keep_only({part for part, kept in hooks.kept.items() if not kept.device_bytes})
            torch.cuda.empty_cache()


def install(model: nn.Module, kernel: str = "auto") -> Hooks:
    """Installs the hooks on a model chunk, once: a second call only changes the kernel.

    Raises:
        UserError: the model uses a feature that the schedule cannot run; the message names it.
    """
    hooks = installed(model)
    if hooks is None:
        return Hooks(model, kernel)
    if kernel != hooks._kernel_name:
        hooks.use(kernel)
    return hooks


def uninstall(model: nn.Module) -> None:
    """Removes the hooks of a model chunk, if there are any."""
    if (hooks := installed(model)) is not None:
        hooks.uninstall()
    vars(language_model(model)).pop(WALK, None)


def intercepted(
    model: nn.Module, replacement: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
) -> contextlib.AbstractContextManager[None]:
    """Replaces the `forward` of a language model for the time of a step; it keeps its signature,
    which trainers ask (SkyRL since 0.4).

    Args:
        replacement: (language model, its present `forward`) -> what replaces it.
    """
    inner = language_model(model)
    owner = families.calls_parent(inner)
    if owner is None:
        return replaced(inner, functools.wraps(inner.forward)(replacement(inner, inner.forward)))
    return parents.replaced(inner, owner, replacement(inner, parents.forward(inner, owner)))


@contextlib.contextmanager
def replaced(
    module: nn.Module, method: Callable[..., Any], name: str = "forward"
) -> Iterator[None]:
    """Replaces a method of one module."""
    before = vars(module).get(name)  # some trainers put their own here
    setattr(module, name, method)
    try:
        yield
    finally:
        vars(module).pop(name, None)
        if before is not None:
            setattr(module, name, before)


def _module_windows(parts: Sequence[Part]) -> list[Any]:
    return [window_of(part.module) for part in parts if hasattr(part.module, "core_attention")]


def _can_end_early(layer: Any) -> bool:
    """Whether what follows attention in a layer can run on some positions: not where a router
    counts all of them, and not in a layer that is put together differently from Megatron's."""
    # mcore-bridge's class of the same name runs its parts as Megatron's does.
    if not families.forward_owner(layer).endswith(".TransformerLayer"):
        return False
    # In a hybrid model the MLP is another layer; and a module cannot be overridden.
    absent = isinstance(layer.mlp, IdentityOp) or isinstance(layer.self_attn_bda, nn.Module)
    has_projection = isinstance(getattr(layer.self_attention, "linear_proj", None), nn.Module)
    return has_projection and not absent and not hasattr(layer.mlp, "router")


def described(rotary: Any) -> str:
    """What a decoder's argument is, for people."""
    shape = f" of shape {[*rotary.shape]}" if isinstance(rotary, Tensor) else ""
    return f"{type(rotary).__name__}{shape}"


def _kernel_for(name: str, model: Any, num_layers: int, window: int | None) -> Kernel:
    parameter, heads = next(model.parameters()), table.heads(model.config)
    kernel = choose_kernel(
        name, parameter.device, parameter.dtype, heads.width, heads.value_width, num_layers,
        heads.group, window=window,
    )  # fmt: skip
    logger.info("attention blocks run on kernel %s", kernel.name)
    prepare(parameter.device, parameter.dtype, heads.num, heads.value_width)
    return kernel
