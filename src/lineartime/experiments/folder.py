"""The folder of an experiment: plan.json holds the options on which its runs depend, so that they are not mixed with others."""

import json
from pathlib import Path
from typing import Any

from lineartime.errors import Argument, ArgumentError, LineartimeError, reporting
from lineartime.experiments.config import IDENTITY, ReproduceConfig
from lineartime.experiments.plan import Plan, folder_of
from lineartime.files import write_atomically

PLAN_FILE = "plan.json"


def adopted(config: ReproduceConfig) -> ReproduceConfig:
    """The options, with those of the runs in the folder where none are given; ArgumentError if a given one differs."""
    file = folder_of(config) / PLAN_FILE
    if not file.exists():
        return config
    usual, values = ReproduceConfig(), dict(vars(config))
    for name, found in _read(file).items():
        if values[name] == getattr(usual, name):
            values[name] = found
        elif values[name] != found:
            raise _differs(name, values[name], found, file.parent)
    return ReproduceConfig(**values)


def begin(plan: Plan) -> None:
    """Write the options on which the runs depend; ArgumentError if the folder holds runs of others."""
    file, wanted = plan.folder / PLAN_FILE, identity(plan)
    if file.exists():
        for name, found in _read(file).items():
            if wanted[name] != found:
                raise _differs(name, wanted[name], found, plan.folder)
        return
    with reporting("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(wanted, indent=1) + "\n")


def identity(plan: Plan) -> dict[str, Any]:
    """The options on which the runs depend, with the values that defaults stand for in this version."""
    given = {name: getattr(plan.config, name) for name in IDENTITY}
    return {**given, "budget": plan.budget, "tuning": plan.tuning, "optimizers": plan.optimizers, "compile": plan.compile}


def _differs(name: str, value: object, found: object, folder: Path) -> ArgumentError:
    there = f"the runs in {folder} were made with {_shown(found)}: use that, or give another "
    return ArgumentError(name, f"is {_shown(value)}, but {there}", Argument("out"), ".")


def _read(file: Path) -> dict[str, Any]:
    try:
        with reporting("read", file):
            found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or sorted(found) != sorted(IDENTITY):
        raise LineartimeError(f"{file} is damaged: delete it if all runs beside it were made with the options of now.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _shown(value: object) -> str:
    if value in (None, ()):
        return "the default"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
