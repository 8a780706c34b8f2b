"""What `benchmarks/gpu.py` writes down: tables, goals with what was measured for them, and what there was no time for."""

import json
import math
import platform
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lineartime.units import markdown_table


class OutOfTimeError(BaseException):
    """The budget is spent; nothing but `Report.attempt` catches it."""


@dataclass
class Goal:
    """A goal, and what was measured.

    Attributes:
        what: the figure.
        limit: what it must reach.
        at_most: whether the limit is an upper one.
        value: what was measured; None if nothing was.
    """

    what: str
    limit: float
    at_most: bool = False
    value: float | None = None

    @property
    def met(self) -> bool:
        """Whether it was measured and is reached."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{self.what}: {value}, goal {'<=' if self.at_most else '>='} {self.limit:g}"


class Report:
    """The results so far. They are written after every row, so that a run that is killed leaves what it measured.

    Args:
        out: the folder of gpu.json and gpu.md.
        goals: by their keys.
        budget: the seconds that all parts may take together.
        facts: of the machine and the run.
    """

    def __init__(self, out: Path, goals: dict[str, Goal], budget: float, **facts: Any) -> None:
        self.out, self.goals, self.tables = out, goals, dict[str, list[dict[str, Any]]]()
        self.facts = {"torch": torch.__version__, "python": platform.python_version(), **facts}
        self.failed: list[str] = []
        self._end = time.monotonic() + budget
        out.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget that are left."""
        return self._end - time.monotonic()

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Run a part until the budget is spent; record its error, if any, so that the parts behind it still run."""
        if self.seconds_left < 1:
            self.add("parts", part=name, result="no time")
            return
        start = time.monotonic()
        before = signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, self.seconds_left)
        result = "done"
        try:
            part()
        except OutOfTimeError:
            result = "stopped, for the budget is spent"
        except Exception as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"[:500]
            self.failed.append(f"{name} failed: {result}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.add("parts", part=name, result=result, seconds=round(time.monotonic() - start, 1))

    def reach(self, key: str, value: float) -> None:
        """Record what was measured for a goal: of several values, the worst. NaN is worse than any number."""
        goal = self.goals[key]
        if math.isnan(value):
            value = math.inf if goal.at_most else -math.inf
        worst = max if goal.at_most else min
        goal.value = value if goal.value is None else worst(goal.value, value)

    def add(self, table: str, **row: Any) -> None:
        """Add a row, print it, and write everything so far."""
        self.tables.setdefault(table, []).append(row)
        print(table, row, flush=True)
        goals = {key: {**asdict(goal), "met": goal.met} for key, goal in self.goals.items()}
        data = {"run": self.facts, "goals": goals, "failed": self.failed, "tables": self.tables}
        (self.out / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")
        text = [json.dumps(self.facts), "## goals\n\n" + "\n".join(f"- {goal}" for goal in self.goals.values())]
        (self.out / "gpu.md").write_text("\n\n".join([*text, *map(self._markdown, self.tables)]) + "\n")

    def _markdown(self, table: str) -> str:
        columns = list(dict.fromkeys(key for row in self.tables[table] for key in row))
        cells = [[str(row.get(key, "")) for key in columns] for row in self.tables[table]]
        return f"## {table}\n\n" + markdown_table(columns, cells, left=len(columns)).rstrip("\n")

    def missed(self) -> list[str]:
        """What is not as it should be: failures, and goals that were missed or not measured."""
        return self.failed + [str(goal) for goal in self.goals.values() if not goal.met]


def _stop(number: int, frame: FrameType | None) -> None:
    raise OutOfTimeError
