"""The paper's numbers, from paper_tables.json: the tables of arXiv 2202.10447, as data."""

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from lineartime.choices import Task
from lineartime.experiments.definitions import Setting

TEXTS = {"lm_wiki40b": "wikipedia", "lm_pg19": "books"}
"""The kind of text of a table. Tables that are not listed, of ablations and of C4, are shown for any text."""
DESCRIPTIONS = {
    "lm_wiki40b": "Wiki-40B, models of 110 M parameters, perplexity per token, 125,000 steps of 2^18 tokens",
    "lm_pg19": "PG-19, models of 490 M parameters, perplexity per word, 125,000 steps of 2^18 tokens",
    "mlm_c4": "C4, models of 110 M parameters, perplexity per masked token, 125,000 steps of 2^18 tokens",
    "ablation_gau": "ablations of a gated attention unit, models of 105 M parameters, perplexity",
    "ablation_mhsa": "ablations of multi-head attention, models of 110 M parameters, perplexity",
}
SOURCE = "Transformer Quality in Linear Time (Hua, Dai, Liu and Le), arXiv 2202.10447"


@cache
def paper_tables() -> dict[str, Any]:
    """All tables by name."""
    tables: dict[str, Any] = json.loads((files(__package__) / "paper_tables.json").read_text(encoding="utf-8"))
    return tables


def paper_numbers(tables: Sequence[str], row: str, setting: Setting, task: Task = "clm") -> dict[str, float]:
    """What the paper reports of a row in a setting: "pplx", "latency_ms", "speedup", as far as it does.

    The tables are searched in order; those of another text are passed over. Those of ablations have a single context, and a
    column for each task.
    """
    for name in tables:
        table = paper_tables()[name]
        values = table["rows"].get(row)
        if values is None or TEXTS.get(name, setting.text) != setting.text:
            continue
        if "columns" in table:
            return {"pplx": values[table["columns"].index("pplx_lm" if task == "clm" else "pplx_mlm")]}
        if setting.context not in table["context"]:
            return {}
        place = table["context"].index(setting.context)
        found = {key: column[place] for key, column in values.items() if column[place] is not None}
        if (name, row) == ("lm_wiki40b", "FLASH"):
            found["speedup"] = paper_tables()["speedup_headline"]["flash_over_transformer++"][place]
        return found
    return {}


def paper_cost(pair: str, setting: Setting, task: Task = "clm") -> float | None:
    """By how much the perplexity of an approximation exceeds that of the exact model in the paper; None if it has no number.

    The pair is called as in the paper, "FLASH-Quad -> FLASH". Masked models of C4 stand beside any text.
    """
    name = "mlm_c4" if task == "mlm" else "lm_wiki40b"
    costs = paper_tables()["approximation_cost_pplx"]
    if TEXTS.get(name, setting.text) != setting.text or setting.context not in costs["context"]:
        return None
    cost: float = costs[name][pair][costs["context"].index(setting.context)]
    return cost


def paper_loss(numbers: dict[str, float]) -> float | None:
    """The paper's loss in nats, from its perplexity; None if it has none."""
    return math.log(numbers["pplx"]) if "pplx" in numbers else None
