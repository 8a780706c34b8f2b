"""The list of models that can be built by name, with what each of them costs: `lineartime presets` and the documents."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lineartime.errors import LineartimeError
from lineartime.models.config import ModelConfig
from lineartime.models.cost import cost, count_parameters, stream_bytes
from lineartime.models.presets import PAPER_MILLIONS, PRESETS, SIZES, describe, model_of, presets
from lineartime.models.systems import SYSTEMS


@dataclass(frozen=True)
class PresetsConfig:
    """List the models that can be built by name, with what they cost."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Only presets that hold one of these in their names, for instance: tiny"""
    context_length: int = 4096
    """Tokens of context for which operations and memory are counted."""
    verify: bool = False
    """Instead, build every model that the paper counts, and compare the numbers of parameters."""


def show_presets(config: PresetsConfig) -> None:
    """Print the presets that are asked for; LineartimeError for a name that none has, or a size that is not the paper's."""
    if config.context_length < 1:
        raise LineartimeError(f"--context-length is {config.context_length}, but must be at least 1.")
    names = [name for name in PRESETS if not config.names or any(part in name for part in config.names)]
    if not names:
        raise LineartimeError(f"no preset has {' or '.join(config.names)} in its name: leave it out to see all of them.")
    if config.verify:
        _verify_presets(names)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    columns = [Column("preset", no_wrap=True), *map(_right, ("parameters", "size", "MFLOP/token", "state"))]
    if console.width >= 120:  # in less, it would be a word a line
        columns.append(Column("what it is"))
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    causal, both_ways = presets("clm"), presets("mlm")
    for name in track(names, "counting", console=Console(stderr=True), transient=True):
        model = causal.get(name) or both_ways[name]
        length = min(config.context_length, model.longest_sequence or config.context_length)
        parameters, flops, state = cost(model, length)
        row = [
            name,
            f"{parameters / 1e6:.1f} M",
            f"{model.n_blocks} x {model.d_model}",
            f"{flops / 1e6:,.1f}" + (" " if length == config.context_length else "*"),
            "none" if state is None else f"{state / 1e6:,.1f} MB",
            describe(name),
        ]
        table.add_row(*row[: len(columns)])
    console.print(table)
    for line in (
        f"MFLOP/token  matrix products of a forward pass over {config.context_length:,} tokens (*: over as many as it reads)",
        "state        memory of a stream after them, in float32 (none: only looks both ways, for --task mlm)",
    ):
        console.print(line, soft_wrap=True)


def _verify_presets(names: Sequence[str]) -> None:
    """Compare parameters with the paper's, where it states them; LineartimeError for a difference."""
    names = [name for name in names if name in PAPER_MILLIONS]
    if not names:
        raise LineartimeError("the paper counts the parameters of none of these: leave the names out to see those it counts.")
    table = Table("preset", _right("parameters"), _right("paper"), "agrees")
    wrong = []
    for name in track(names, "building", console=Console(stderr=True), transient=True):
        parameters = count_parameters(presets("clm")[name])
        agrees = round(parameters / 1e6) == PAPER_MILLIONS[name]
        wrong += [] if agrees else [name]
        table.add_row(name, f"{parameters:,}", f"{PAPER_MILLIONS[name]} M", "yes" if agrees else "no")
    Console(highlight=False).print(table)
    if wrong:
        raise LineartimeError(f"not as large as in the paper: {', '.join(wrong)}.")


def _right(header: str) -> Column:
    return Column(header, justify="right")


def systems_table() -> str:
    """All systems as a Markdown table, which the documents show: what and where each is, and how its memory grows."""
    lines = ["| system | what it is | code | feed-forward | memory of a stream |", "| --- | --- | --- | --- | --- |"]
    for name, system in SYSTEMS.items():
        code = "/".join(system.mixer.__module__.split(".")[1:]) + ".py"
        feed_forward = "none" if system.feed_forward is None else {"mlp": "MLP", "glu": "GEGLU"}[system.feed_forward.name]
        cells = [f"`{name}`", system.describe(), f"`{code}`", feed_forward, _memory(model_of(system, SIZES["tiny"], "clm"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _memory(config: ModelConfig) -> str:
    if config.mixer.layer.why_not_causal is not None:
        return "looks both ways only"
    short, longer, long = (stream_bytes(config, length) for length in (256, 257, 512))
    if short == long:
        return "constant"
    return "grows with chunks" if short == longer else "grows with tokens"
