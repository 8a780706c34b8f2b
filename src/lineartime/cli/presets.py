"""`lineartime presets`: the models that can be built by name."""

import json
import sys
from dataclasses import dataclass

from lineartime.errors import LineartimeError, did_you_mean
from lineartime.screen import Progress, new_table, output_console


@dataclass(frozen=True)
class PresetsOptions:
    """The options of `lineartime presets`."""

    names: tuple[str, ...] = ()
    """Show only presets whose names contain one of these parts, such as tiny."""
    context_length: int = 4096
    """Context length, in tokens, for which operations and memory are counted."""
    json: bool = False
    """Print one line of JSON for each preset; operations and memory are those of one token and one stream."""


def run(options: PresetsOptions) -> None:
    """Print the presets and what they cost; raises LineartimeError if no name matches.

    Operations are those of the matrix products of a forward pass over the context length or, if a model reads fewer tokens,
    over those. A bidirectional model has no state.
    """
    from lineartime.models.cost import check_context_length, preset_cost
    from lineartime.models.systems import PRESETS, presets, system_of

    check_context_length(options.context_length)
    names = [name for name in PRESETS if not options.names or any(part in name for part in options.names)]
    if not names:
        parts = f"No preset name contains {' or '.join(options.names)}{did_you_mean(options.names[0], PRESETS)}"
        raise LineartimeError(f"{parts}: leave the names out to see all of them.")
    console = output_console(markup=False, width=None if sys.stdout.isatty() else 140)
    headers = ["preset", "parameters", "size", "MFLOP/token", "state", "what it is"]
    if console.width < 120:  # the last column would hold one word per line
        del headers[-1]
    table = new_table(headers, left=("preset", "what it is"), folded=("what it is",))
    causal, bidirectional = presets("clm"), presets("mlm")
    with Progress("counting", len(names)) as progress:
        for name in names:
            model, what = causal.get(name) or bidirectional[name], system_of(name).describe()
            length, (parameters, flops, state) = preset_cost(name, model, options.context_length)
            if options.json:
                sizes = {"n_blocks": model.n_blocks, "d_model": model.d_model, "parameters": parameters}
                costs = {"context_length": length, "flops_per_token": flops, "state_bytes": state}
                print(json.dumps({"name": name, "description": what, **sizes, **costs}), flush=True)
            row = [
                name,
                f"{parameters / 1e6:.1f} M",
                f"{model.n_blocks} x {model.d_model}",
                f"{flops / 1e6:,.1f}" + (" " if length == options.context_length else "*"),
                "none" if state is None else f"{state / 1e6:,.1f} MB",
                what,
            ]
            table.add_row(*row[: len(headers)])
            progress.advance(1)
    if not options.json:
        console.print(table)
        over = f"over {options.context_length:,} tokens (*: over as many as it reads)"
        console.print(f"MFLOP/token  matrix products of a forward pass {over}", soft_wrap=True)
        console.print("state        memory of a stream after them (none: bidirectional only, for --task mlm)", soft_wrap=True)
