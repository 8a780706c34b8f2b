"""`lineartime inspect`: draw what each layer of a model does with a text."""

from dataclasses import dataclass
from pathlib import Path

from lineartime.cli.options import Checkpoint, Device, Run, read_text
from lineartime.errors import ArgumentError


@dataclass(frozen=True)
class InspectOptions:
    """The options of `lineartime inspect`."""

    run: Run
    text: str = ""
    """Text to read."""
    text_file: Path | None = None
    """File with the text, used as it is, without a byte order mark; - for standard input."""
    out: Path = Path("inspection.png")
    """The picture; its suffix decides the format."""
    max_tokens: int = 512
    """Maximum number of tokens to read, up to 2,048; the rest of the text is left out."""
    checkpoint: Checkpoint = None
    device: Device = "auto"


def run(options: InspectOptions) -> None:
    """Read the text, write the picture, and print where it is and what it does not show."""
    from lineartime.checkpoint import load_with_tokenizer
    from lineartime.inspection import draw, inspect
    from lineartime.plots import check_picture, save_figure

    check_picture(options.out)  # before the slow part
    text = read_text(options, "text")
    if not text:
        raise ArgumentError("text", "is missing or empty, but must hold a text, here or in a file.")
    loaded = load_with_tokenizer(options.run, options.device, checkpoint=options.checkpoint)
    inspection = inspect(loaded.model, loaded.tokenizer, text, options.max_tokens)
    picture = save_figure(draw(inspection, str(loaded.checkpoint)), options.out, dots_per_inch=100)
    print(f"{picture}: {' '.join((f'{len(inspection.tokens):,} tokens.', *inspection.notes))}")
