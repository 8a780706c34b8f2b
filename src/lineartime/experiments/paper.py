"""The paper's numbers, from paper_tables.json: the tables of arXiv 2202.10447, as data."""

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from lineartime.choices import Task

SOURCE = "Transformer Quality in Linear Time (Hua, Dai, Liu and Le), arXiv 2202.10447"


@cache
def paper_tables() -> dict[str, Any]:
    """All tables by name."""
    tables: dict[str, Any] = json.loads((files(__package__) / "paper_tables.json").read_text(encoding="utf-8"))
    return tables


def paper_numbers(tables: Sequence[str], row: str, context: int, task: Task = "clm") -> dict[str, float]:
    """What the paper reports of a row at a context: "pplx", "latency_ms", "speedup", as far as it does.

    Args:
        tables: where to look, in order.
        row: the name of the row.
        context: in tokens; tables of ablations have a single one.
        task: the column of ablations to take.
    """
    for name in tables:
        table = paper_tables()[name]
        values = table["rows"].get(row)
        if values is None:
            continue
        if "columns" in table:
            return {"pplx": values[table["columns"].index("pplx_lm" if task == "clm" else "pplx_mlm")]}
        contexts = values.get("context", table.get("context"))
        if context not in contexts:
            return {}
        place = contexts.index(context)
        found = {key: values[key][place] for key in ("pplx", "latency_ms", "speedup") if key in values}
        return {key: value for key, value in found.items() if value is not None}
    return {}


def paper_loss(tables: Sequence[str], row: str, context: int, task: Task = "clm") -> float | None:
    """The paper's loss in nats, from its perplexity; None if it has none."""
    perplexity = paper_numbers(tables, row, context, task).get("pplx")
    return None if perplexity is None else math.log(perplexity)
