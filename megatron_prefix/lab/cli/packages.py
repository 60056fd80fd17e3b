"""Compares installed packages with the requirements in setup.cfg."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DISTRIBUTION = "megatron_prefix"


def version(package: str) -> str | None:
    """The installed version; None: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def asked_for() -> tuple[list[str], list[str]]:
    """Requirements and extras of this package; none if it is not installed."""
    try:
        asked = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return [], []
    return asked.get_all("Requires-Dist") or [], asked.get_all("Provides-Extra") or []


def missing(
    requirements: Iterable[str],
    extras: Iterable[str],
    version_of: Callable[[str], str | None] = version,
) -> tuple[list[str], dict[str, Any]]:
    """What of `requirements`, lines of package metadata, is not installed or has a wrong version.

    Returns:
        What is needed in any case; and by name `{"missing": [...], "command": how to get them}` for
        each of `extras` that lacks something.
    """
    lacking = []
    for line in requirements:
        one = Requirement(line)
        if canonicalize_name(one.name) == canonicalize_name(DISTRIBUTION):
            continue  # an extra that is made of others
        installed = version_of(one.name)
        if installed is None or not one.specifier.contains(installed, prereleases=True):
            lacking.append(one)

    def of(extra: str) -> list[str]:
        there = (
            one for one in lacking if one.marker is None or one.marker.evaluate({"extra": extra})
        )
        return [_plain(one) for one in there]

    needed = of("")
    by_extra = {extra: [name for name in of(extra) if name not in needed] for extra in extras}
    return needed, {
        extra: {"missing": names, "command": " ".join(["pip install", *map(_quoted, names)])}
        for extra, names in by_extra.items()
        if names
    }


def _plain(one: Requirement) -> str:
    """A requirement as pip takes it, without its marker."""
    extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
    return f"{one.name}{extras}{one.specifier}"


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if re.search(r"[<>\[!~]", requirement) else requirement
