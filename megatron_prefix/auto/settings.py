"""[pure] A PrefixConfig from variables of the environment, a TOML file, or flags.

A flag wins over a variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from megatron_prefix import features
from megatron_prefix.config import PrefixConfig, check_type, types_of, wanted
from megatron_prefix.errors import UserError, shown
from megatron_prefix.plan.files import read_text

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

PREFIX = "MEGATRON_PREFIX_"
FILE = PREFIX + "CONFIG"
"""Variable: the TOML file."""
_OTHERS = (FILE, PREFIX + "DATA", PREFIX + "RENDEZVOUS")
"""Variables that are not settings: the last two are for tests, and for ranks that verbs start."""

_RENAMED = {"plan_file": "plan"}
FIELDS = {_RENAMED.get(field.name, field.name): field for field in fields(PrefixConfig)}
"""Name of a setting -> field of PrefixConfig."""
DEFAULT_MODE = "auto"
"""Not PrefixConfig's: who turns the schedule on for a whole trainer wants steps that it cannot
share to run nevertheless."""


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """The flag of a setting, for `python -m megatron_prefix.run`."""
    return "--prefix-" + {"mode": "schedule"}.get(name, name).replace("_", "-")


def read_config(
    environ: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> PrefixConfig:
    """The configuration that the environment and the flags give.

    Args:
        environ: variables (default: the process's); an empty one counts as not set.

    Raises:
        UserError: a variable, key or flag that is not known or whose value is not allowed, a file
            that cannot be read, or a plan that cannot run; the line says where it was given.
    """
    environ = os.environ if environ is None else environ
    settings = {"mode": ("the default", DEFAULT_MODE)}
    if path := environ.get(FILE):
        settings |= {name: (f"{path}: {name}", value) for name, value in _read_file(path).items()}
    names = {variable(name): name for name in FIELDS}
    for key, text in environ.items():
        if key in names and text:
            settings[names[key]] = key, _parsed(names[key], text, key)
        elif key.startswith(PREFIX) and key not in (*names, *_OTHERS):
            raise UserError(f"{key} is not a setting; known are {', '.join([*names, FILE])}")
    for name, text in (flags or {}).items():
        settings[name] = flag(name), _parsed(name, text, flag(name))
    mode = settings["mode"][1]
    for name, (where, value) in settings.items():  # the mode first, which others may need
        _checked({"mode": mode, name: value}, where)
    return _checked({name: value for name, (_, value) in settings.items()}, f"{PREFIX}*")


def names_a_mode() -> bool:
    """Whether a variable or the file sets the mode.

    Raises:
        UserError: a file that cannot be read.
    """
    path = os.environ.get(FILE)
    return bool(os.environ.get(variable("mode")) or (path and "mode" in _read_file(path)))


def _checked(values: dict[str, Any], where: str) -> PrefixConfig:
    try:
        config = PrefixConfig(**{FIELDS[name].name: value for name, value in values.items()})
        if config.plan_file is not None:
            features.load(features.PLAN_FILE)(config.plan_file, config.memory)
        if config.cost_file is not None:
            features.load(features.COST_FILE)(config.cost_file)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def _read_file(path: str) -> dict[str, Any]:
    try:
        values = toml.loads(read_text(path))
    except OSError as error:
        raise UserError(f"{FILE}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # ValueError: of a number without end, too
        raise UserError(f"{path} is not valid TOML: {' '.join(str(error).split())}") from None
    for name, value in values.items():
        if name not in FIELDS:
            raise UserError(f"{path}: {name} is not a setting; known are {', '.join(FIELDS)}")
        try:
            check_type(name, types_of(FIELDS[name]) - {"None"}, value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return values


def _parsed(name: str, text: str, where: str) -> Any:
    kinds = types_of(FIELDS[name])
    if "bool" in kinds and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    for kind, number in (("int", int), ("float", float)):
        if kind in kinds:
            try:
                return number(text)
            except ValueError:
                continue
    if "str" in kinds:
        return text
    raise UserError(f"{where} is {shown(text)}: give {wanted(kinds)}")


def described_config(config: PrefixConfig) -> str:
    """The mode and what is not at its default, on one line."""
    changed = [
        f"{name} {getattr(config, field.name)}"
        for name, field in FIELDS.items()
        if name != "mode" and field.default is not MISSING
        and getattr(config, field.name) != field.default
    ]  # fmt: skip
    return ", ".join([f"mode {config.mode}", *changed])
