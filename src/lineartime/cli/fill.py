"""`lineartime fill`: predict the tokens at the masks of a text."""

import dataclasses
import json
from dataclasses import dataclass

from lineartime.cli.options import Checkpoint, Device, Json, Run
from lineartime.screen import new_table, output_console


@dataclass(frozen=True)
class FillOptions:
    """The options of `lineartime fill`."""

    run: Run
    text: str
    """Text with one or more [MASK], each of which replaces one token (with bytes, one byte)."""
    top: int = 5
    """Number of candidates to show for each mask."""
    checkpoint: Checkpoint = None
    device: Device = "auto"
    json: Json = False


def run(options: FillOptions) -> None:
    """Print the candidates for each mask."""
    from lineartime.checkpoint import load_with_tokenizer
    from lineartime.models.language_model import MaskedLM, check_model
    from lineartime.text_generation import fill_mask

    loaded = load_with_tokenizer(options.run, options.device, checkpoint=options.checkpoint)
    masks = fill_mask(check_model(loaded.model, MaskedLM, "fill masks"), loaded.tokenizer, options.text, options.top)
    if options.json:
        found = [[dataclasses.asdict(candidate) for candidate in candidates] for candidates in masks]
        print(json.dumps({"checkpoint": str(loaded.checkpoint), "text": options.text, "masks": found}))
        return
    console = output_console(markup=False)
    for number, candidates in enumerate(masks, 1):
        table = new_table(("probability", "id", "token"), left=("token",), title=f"mask {number} of {len(masks)}")
        for candidate in candidates:
            letters = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in candidate.text)
            table.add_row(f"{candidate.probability:.4f}", str(candidate.token), f'"{"".join(letters)}"')
        console.print(table)
