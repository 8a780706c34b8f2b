"""`lineartime inspect`: show what each layer of a model does with a text, on a page for a browser and in pictures."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from lineartime.cli.options import Checkpoint, Device, read_text
from lineartime.errors import ArgumentError, require_packages
from lineartime.files import check_new_folder


@dataclass(frozen=True)
class InspectOptions:
    """The options of `lineartime inspect`."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one checkpoint."""
    text: str = ""
    """Text to read."""
    text_file: Path | None = None
    """File with the text, used as it is, without a byte order mark; - for standard input."""
    out: Path = Path("inspection")
    """New folder for index.html and the pictures."""
    max_tokens: int = 512
    """Maximum number of tokens to read, up to 2,048; the rest of the text is left out."""
    checkpoint: Checkpoint = None
    device: Device = "auto"


def run(options: InspectOptions) -> None:
    """Read the text, write the folder, and print where it is."""
    from lineartime.checkpoint import load_with_tokenizer
    from lineartime.inspection import inspect, write_inspection
    from lineartime.inspection.look import check_max_tokens
    from lineartime.machine import choose_device

    check_new_folder("out", options.out)  # like the next checks, before the slow part
    require_packages("matplotlib", extra="plot", purpose="A picture of a model")
    check_max_tokens(options.max_tokens)
    text = read_text(options, "text")
    if not text and options.text_file is None:
        raise ArgumentError("text", "is missing or empty: give a text, or a file with one by `text_file`.")
    if not text:
        raise ArgumentError("text_file", f"is {options.text_file}, which is empty: give a file with a text.")
    loaded = load_with_tokenizer(options.run, choose_device(options.device), checkpoint=options.checkpoint)
    inspection = inspect(loaded.model, loaded.tokenizer, text, options.max_tokens)
    page = write_inspection(inspection, str(loaded.checkpoint), options.out)
    left_out = f"; {inspection.left_out:,} more tokens were left out" if inspection.left_out else ""
    layers = "1 layer" if len(inspection.layers) == 1 else f"{len(inspection.layers)} layers"
    print(f"{page}: {layers}, for a browser; the pictures beside it are the same{left_out}")
