"""`lineartime presets`: the models that can be built by name."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from lineartime.errors import LineartimeError, did_you_mean
from lineartime.screen import new_table, output_console, tracked


@dataclass(frozen=True)
class PresetsOptions:
    """The options of `lineartime presets`."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Show only presets whose names contain one of these parts, such as tiny."""
    context_length: int = 4096
    """Context length, in tokens, for which operations and memory are counted."""
    json: bool = False
    """Print one line of JSON for each preset; operations and memory are those of one token and one stream."""


def run(options: PresetsOptions) -> None:
    """Print the presets; raises LineartimeError if no name matches."""
    from lineartime.models.cost import check_context_length
    from lineartime.models.systems import PRESETS

    check_context_length(options.context_length)
    names = [name for name in PRESETS if not options.names or any(part in name for part in options.names)]
    if not names:
        raise LineartimeError(
            f"No preset name contains {' or '.join(options.names)}{did_you_mean(options.names[0], PRESETS)}: leave the names "
            "out to see all of them."
        )
    if options.json:
        for entry in _entries(names, options.context_length):
            print(json.dumps(entry), flush=True)
    else:
        _print_costs(names, options.context_length)


def _entries(names: Sequence[str], context_length: int) -> Iterator[dict[str, Any]]:
    """Each preset and its cost, counted for the context length or, if it reads fewer tokens, for those.

    Operations are those of the matrix products of a forward pass; the state is None for a bidirectional model.
    """
    from lineartime.models.cost import preset_cost
    from lineartime.models.systems import presets, system_of

    causal, bidirectional = presets("clm"), presets("mlm")
    for name in names:
        model = causal.get(name) or bidirectional[name]
        length, (parameters, flops, state) = preset_cost(name, model, context_length)
        yield {
            "name": name,
            "description": system_of(name).describe(),
            "n_blocks": model.n_blocks,
            "d_model": model.d_model,
            "parameters": parameters,
            "context_length": length,
            "flops_per_token": flops,
            "state_bytes": state,
        }


def _print_costs(names: Sequence[str], context_length: int) -> None:
    console = output_console(width=None if sys.stdout.isatty() else 140)
    headers = ["preset", "parameters", "size", "MFLOP/token", "state"]
    if console.width >= 120:  # a narrower column would hold one word per line
        headers.append("what it is")
    table = new_table(headers, left=("preset", "what it is"), folded=("what it is",))
    for entry in tracked(_entries(names, context_length), "counting", len(names)):
        row = [
            entry["name"],
            f"{entry['parameters'] / 1e6:.1f} M",
            f"{entry['n_blocks']} x {entry['d_model']}",
            f"{entry['flops_per_token'] / 1e6:,.1f}" + (" " if entry["context_length"] == context_length else "*"),
            "none" if entry["state_bytes"] is None else f"{entry['state_bytes'] / 1e6:,.1f} MB",
            entry["description"],
        ]
        table.add_row(*row[: len(headers)])
    console.print(table)
    for line in (
        f"MFLOP/token  matrix products of a forward pass over {context_length:,} tokens (*: over as many as it reads)",
        "state        memory of a stream after them, in float32 (none: the model is bidirectional only, for --task mlm)",
    ):
        console.print(line, soft_wrap=True)
