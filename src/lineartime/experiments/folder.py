"""The folder of an experiment: plan.json holds the options on which its runs depend, so that they are not mixed with others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lineartime.choices import Device
from lineartime.errors import ArgumentError
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.plan import Plan, folder_of
from lineartime.files import read_file, write_file
from lineartime.machine import choose_device, choose_precision

PLAN_FILE = "plan.json"


PLAN_OPTIONS = (
    *(*TEXT_OPTIONS, "budget", "tuning", "optimizers", "compile", "precision", "threads", "rates", "device", "add"),
    *("steps", "longer"),  # of memory
)
"""The options on which runs depend, besides the experiment and the scale, which name the folder."""


def plan_options(config: ReproduceConfig) -> dict[str, Any]:
    """The options on which runs depend."""
    return {name: getattr(config, name) for name in PLAN_OPTIONS}


def with_saved_options(config: ReproduceConfig) -> ReproduceConfig:
    """Complete the options with those of the runs in the folder. Raises ArgumentError if a given one differs."""
    file = folder_of(config) / PLAN_FILE
    if not file.exists():
        return config
    usual, values = ReproduceConfig(), dict(vars(config))
    for name, found in _read(file).items():
        if name == "add":  # others can join the comparison later
            values[name] = tuple(dict.fromkeys([*found, *values[name]]))
        elif values[name] == getattr(usual, name):
            values[name] = found
        elif values[name] != found:
            raise _differs(name, values[name], found, file.parent)
    return ReproduceConfig(**values)


def with_device(config: ReproduceConfig) -> ReproduceConfig:
    """Replace "auto" by the device and the precision that it means on this machine, so that no other continues in another one.

    Raises:
        ArgumentError: if there is no such device.
    """
    device = choose_device(config.device)
    return replace(config, device=cast("Device", device.type), precision=choose_precision(config.precision, device))


def write_plan(plan: Plan) -> None:
    """Write the options on which the runs depend. Raises ArgumentError if the folder holds runs of other options."""
    file, wanted = plan.folder / PLAN_FILE, plan_options(plan.config)
    found = _read(file) if file.exists() else {}
    for name, value in found.items():
        unknown = name in ("device", "precision") and value == "auto"  # of an earlier version
        if name != "add" and wanted[name] != value and not unknown:
            raise _differs(name, wanted[name], value, plan.folder)
    if not found or found["add"] != wanted["add"]:
        write_file(file, json.dumps(wanted, indent=1) + "\n")


def _differs(name: str, value: object, found: object, folder: Path) -> ArgumentError:
    there = f"the runs in {folder} were made with {_shown(found)}: use that, or give another "
    return ArgumentError(name, f"is {_shown(value)}, but {there}`out`.")


def _read(file: Path) -> dict[str, Any]:
    advice = "restore it from a copy, or delete it if all runs beside it were made with the current options"
    return plan_options(read_file(file, ReproduceConfig, advice))  # what earlier versions did not write is the default


def _shown(value: object) -> str:
    if value in (None, ()):
        return "the default"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
