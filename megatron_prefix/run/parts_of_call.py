"""Which features take part in a call: asked of the table of features, and imported only then."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_prefix import features
from megatron_prefix.errors import CANNOT_RUN, CannotShare, named, refused
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.parts import Around, Run, StepPart
from megatron_prefix.refusals.table import FEATURE_MISSING

if TYPE_CHECKING:
    from megatron_prefix.config import PrefixConfig
    from megatron_prefix.plan.actions import Plan
    from megatron_prefix.run.calls import Callbacks, ModelCall
    from megatron_prefix.run.rank import Rank
    from megatron_prefix.run.report import Reports
    from megatron_prefix.run.request import Request

logger = logging.getLogger(__name__)


def chosen(
    config: PrefixConfig,
    rank: Rank,
    callbacks: Callbacks,
    kept: dict[str, dict[str, Any]] | None = None,
) -> tuple[StepPart, ...]:
    """The parts that features take in a call, in the order of the table.

    One that only makes steps faster is left out where it cannot be imported; mode "on" raises.

    Raises:
        CannotShare: one without which the step would be wrong cannot be imported, or refuses the
            model.
    """
    requested = [feature for feature in features.PARTS if feature.wanted(config, rank)]
    return made(requested, config, rank, callbacks, kept)


def optional(config: PrefixConfig, rank: Rank) -> list[features.Feature]:
    """The features that only make a call faster; the same on all ranks."""
    return [f for f in features.PARTS if not f.needed and f.wanted(config, rank)]


def needed_of(parts: Sequence[StepPart]) -> tuple[StepPart, ...]:
    """The parts without which a call would be wrong."""
    paths = {feature.path for feature in features.PARTS if not feature.needed}
    return tuple(part for part in parts if _path(part) not in paths)


def missing(calls: Sequence[ModelCall], parts: Sequence[StepPart]) -> list[features.Feature]:
    """Features that answer for keywords of calls and have no part in them yet."""
    names = {name for call in calls for name in features.TAKEN if call.keyword(name) is not None}
    return without_part((f for f in features.PARTS if names.intersection(f.takes)), parts)


def without_part(
    taken: Iterable[features.Feature], parts: Sequence[StepPart]
) -> list[features.Feature]:
    """Those of some features that are not among the parts of a call."""
    paths = {*map(_path, parts)}
    return [feature for feature in taken if feature.path not in paths]


def _path(part: StepPart) -> str:
    return f"{type(part).__module__}:{type(part).__name__}"


def made(
    requested: Sequence[features.Feature],
    config: PrefixConfig,
    rank: Rank,
    callbacks: Callbacks,
    kept: dict[str, dict[str, Any]] | None = None,
) -> tuple[StepPart, ...]:
    """The parts of some features; see `chosen`."""
    parts = []
    for feature in requested:
        make = loaded(feature, config.mode)
        if make is None:
            continue
        part: StepPart = make(config, rank, callbacks)
        if kept is not None:
            part.kept = kept.setdefault(feature.name, part.kept)
        for reason in part.refusals():
            raise reason.error(CANNOT_RUN)
        parts.append(part)
    return tuple(parts)


def needed_by(
    plan: Plan, config: PrefixConfig, request: Request, parts: Sequence[StepPart]
) -> tuple[StepPart, ...]:
    """The parts of features that answer for policies of a plan's segments, but for those that are
    among `parts`.

    Raises:
        CannotShare: as of `chosen`.
    """
    policies = {*plan.policies}
    taken = (feature for feature in features.PARTS if policies.intersection(feature.policies))
    return made(without_part(taken, parts), config, request.rank, request.callbacks)


def loaded(feature: features.Feature | features.FeatureAround, mode: str) -> Any:
    """The class of a feature; None if it cannot be imported, and is not needed in this mode.

    Raises:
        CannotShare: it cannot be imported, and is.
    """
    try:
        return features.load(feature.path)
    except ImportError as error:
        if feature.needed or mode == "on":
            raise refused(FEATURE_MISSING, feature.name, named(error)) from None
        _warn(f"{feature.name} is left out: {named(error)}")
        return None


class _Missing(Around):
    """A feature that is needed and cannot be imported: calls are the stock schedule's."""

    def __init__(self, config: PrefixConfig, reports: Reports, reason: CannotShare) -> None:
        super().__init__(config, reports)
        self._reason = reason

    def shared(self, run: Run, request: Request) -> list[Any]:
        if request.stock is not None:  # what runs it reports it
            return request.stock()
        self.reports.refused(copy.copy(self._reason))
        return run_stock(request.arguments)


def around_calls(config: PrefixConfig, reports: Reports, *, looks_first: bool) -> list[Around]:
    """The features that these options ask for, imported now; the first is the innermost."""
    objects: list[Around] = []
    for feature in features.AROUND:
        if not feature.wanted(config, looks_first):
            continue
        try:
            make = loaded(feature, config.mode)
        except CannotShare as reason:
            objects.append(_Missing(config, reports, reason.with_traceback(None)))
        else:
            objects += [] if make is None else [make(config, reports)]
    return objects


@functools.cache
def _warn(text: str) -> None:
    logger.warning(text)
