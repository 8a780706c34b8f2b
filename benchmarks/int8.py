"""Generation with int8 dense maps, by torchao: `python benchmarks/int8.py [RUN]` (about 8 minutes on 2 cores).

It needs torchao (`pip install torchao==0.18.0`). The script times a token of one stream at position 1,024 with the original
weights, with int8 weights, and with int8 weights and inputs (quantised for each token), eager and compiled, all taking turns.
With RUN, a run of `lineartime train`, it also measures the loss on the test split of the default text in each form.
"""

import argparse
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import evaluate_in_memory, save
from torch import nn

from generation import CPU
from lineartime.bench.measure import median_seconds, synchronized
from lineartime.bench.subjects import state_after
from lineartime.checkpoint import load, load_tokenizer
from lineartime.generation.decoding import continuing
from lineartime.markdown import markdown_table
from lineartime.models.language_model import CausalLM, build_model
from lineartime.models.presets import resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

POSITION = 1024
FORMS: dict[str, Any] = {
    "as they are": None,
    "int8 weights": Int8WeightOnlyConfig(),
    "int8 weights and inputs": Int8DynamicActivationInt8WeightConfig(),
}
PRESETS = ("flash-tiny", "flash-base")
GOAL, LOSS_GOAL = 1.3, 0.005
"""The speed-up that a token should have, and the largest relative increase of the loss."""


def quantized(model: nn.Module, form: str) -> nn.Module:
    """Convert the dense maps of a model to one of `FORMS`, in place."""
    if FORMS[form] is not None:
        quantize_(model, FORMS[form])
    return model


def stepper(preset: str, form: str, dtype: torch.dtype, compiled: bool) -> Any:
    """A function that generates a token of one stream."""
    torch.manual_seed(0)
    model = quantized(build_model(resolve(preset)).eval().to(dtype), form)
    assert isinstance(model, CausalLM)
    if compiled:
        model.compile_step()
    with torch.no_grad():
        read_next = continuing(model, state_after(model, torch.zeros(1, POSITION, dtype=torch.long)))
    token = torch.zeros(1, dtype=torch.long)
    return partial(torch.no_grad()(read_next), token)


def speeds(rounds: int) -> list[dict[str, Any]]:
    """Seconds per token, in every form."""
    rows: list[dict[str, Any]] = []
    for preset in PRESETS:
        for dtype in (torch.float32, torch.bfloat16):
            forms = [(form, mode) for form in FORMS for mode in ("eager", "compiled")]
            steps = {(form, mode): stepper(preset, form, dtype, mode == "compiled") for form, mode in forms}
            seconds = median_seconds(steps, rounds, partial(synchronized, CPU), min_seconds=0.05)
            name = str(dtype).removeprefix("torch.")
            rows += [
                {"preset": preset, "dtype": name, "form": form, "mode": mode, "seconds": value}
                for (form, mode), value in seconds.items()
            ]
            print(json.dumps(rows[-len(forms) :]), flush=True)
    return rows


def losses(run: Path) -> list[dict[str, Any]]:
    """Bits per byte on the test split of the default text, in every form."""
    rows = []
    for form in FORMS:
        model = quantized(load(run), form)
        assert isinstance(model, CausalLM)
        found = evaluate_in_memory(model, load_tokenizer(run), POSITION)
        rows.append({"run": run.name, "form": form, "bits_per_byte": found.bits_per_byte})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown tables: milliseconds per token in the faster mode and the speed-up over original weights, and the losses."""
    lines = []
    for preset, dtype in dict.fromkeys((row["preset"], row["dtype"]) for row in rows if "seconds" in row):
        cells = {}
        for form in FORMS:
            found = [row for row in rows if (row.get("preset"), row.get("dtype"), row["form"]) == (preset, dtype, form)]
            cells[form] = min(found, key=lambda row: float(row["seconds"]))
        plain = cells["as they are"]["seconds"]
        shown = [
            f"{1e3 * row['seconds']:.2f}, {row['mode']}" + (f" ({plain / row['seconds']:.2f})" if FORMS[form] else "")
            for form, row in cells.items()
        ]
        lines.append([f"`{preset}`", dtype, *shown, f"{GOAL}"])
    forms = [f"{form}, ms" if FORMS[form] is None else f"{form}, ms (times faster)" for form in FORMS]
    found_table = markdown_table(["model", "all else", *forms, "goal"], lines)
    measured = [row for row in rows if "bits_per_byte" in row]
    if measured:
        plain = measured[0]["bits_per_byte"]
        losses = [
            [row["form"], f"{row['bits_per_byte']:.4f}", f"{row['bits_per_byte'] / plain - 1:+.3%}", f"{LOSS_GOAL:+.1%}"]
            for row in measured
        ]
        found_table += "\n" + markdown_table(["dense maps", "test bits per byte", "change", "goal"], losses)
    return found_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run, for the loss")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each case, of which the median is taken")
    arguments = parser.parse_args()
    rows = speeds(arguments.rounds)
    if arguments.run is not None:
        rows += losses(arguments.run)
    save("int8", rows, table(rows))


if __name__ == "__main__":
    main()
