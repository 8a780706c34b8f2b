"""Write the folder of an inspection: pictures, and a page for a browser that shows them and the text.

The page is one HTML file without scripts or external resources. All data from the user, above all the text, passes through
`escaped`.
"""

import html
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path

from lineartime.files import new_folder
from lineartime.inspection.look import Inspection, Piece
from lineartime.inspection.pictures import draw, picture_of_layer
from lineartime.plots import save_figure

PAGE = "index.html"
_WORST = 8.0
"""The loss in nats that is shown in the strongest colour."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #667; --paper: #fff; --line: #d5d8dd; --hot: 217,95,2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --faint: #9aa3ad; --paper: #15181c; --line: #3a4048; --hot: 255,140,60; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 90rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { color: var(--faint); margin: .3rem 0; }
.text { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink);
  border: 1px solid var(--line); border-radius: 6px; padding: .8rem; direction: ltr; }
.text span { unicode-bidi: isolate; border-radius: 3px; background: rgba(var(--hot), var(--loss)); }
.text .kept { background: none; color: var(--faint); }
.text i, h1 i { font-style: normal; opacity: .7; font-size: .85em; }
.scale { display: inline-block; width: 9rem; height: .8em; border-radius: 3px;
  background: linear-gradient(90deg, rgba(var(--hot), 0), rgba(var(--hot), .8)); }
img { max-width: 100%; border-radius: 6px; }
"""


def write_inspection(inspection: Inspection, title: str, out: str | Path) -> Path:
    """Write index.html, losses.png and a picture for each layer, layer-01.png, ..., into a new folder, and return the page.

    The page needs no other file and no network. A layer that has nothing to draw has no picture; the page says why.

    Args:
        inspection: what `inspect` returned.
        title: the heading of the page, for instance the model's path.
        out: the folder, which must be new or empty.

    Raises:
        ArgumentError: for a folder that is not empty.
        LineartimeError: if a file cannot be written, or matplotlib is missing.
    """
    out = Path(out)
    with new_folder("out", out) as folder:
        pictures = {name: save_figure(figure, folder / name).read_bytes() for name, figure in draw(inspection)}
        (folder / PAGE).write_text(page(inspection, title, pictures), encoding="utf-8")
    return out / PAGE


def page(inspection: Inspection, title: str, pictures: Mapping[str, bytes]) -> str:
    """The page as HTML, with the pictures of layers by the names of their files."""
    return "".join(_page(inspection, title, pictures))


def escaped(text: str) -> str:
    r"""Escape a text for HTML; an invisible character is shown as its escape sequence, such as \u202e."""
    return "".join(_character(character) for character in text)


def _character(character: str) -> str:
    if character == "\n":
        return "<i>↵</i>\n"
    if character == " " or character.isprintable():
        return html.escape(character)
    return f"<i>{html.escape(character.encode('unicode_escape').decode())}</i>"


def _page(inspection: Inspection, title: str, pictures: Mapping[str, bytes]) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield f"<title>lineartime inspect</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    yield f"<h1>{escaped(title)}</h1>\n"
    yield from _text(inspection)
    yield "<p>Below, a map shows how much each position (row) attends to every other one (column). "
    yield "Its colours follow the square root of a weight, so that weak weights are visible, too.</p>\n"
    if inspection.task != "mlm":
        yield "<p>Position 0 holds the end of a document. Position t holds token t - 1 and predicts token t.</p>\n"
    for number, layer in enumerate(inspection.layers, 1):
        yield f"<h2>Layer {number}: {escaped(layer.name)}</h2>\n"
        for sentence in layer.missing:
            yield f"<p>{escaped(sentence)}</p>\n"
        if picture := pictures.get(picture_of_layer(number)):
            what = "attention weights, what is added to each token, and the state"
            yield f'<img alt="Layer {number}: {what}" src="data:image/png;base64,{b64encode(picture).decode()}">\n'
    yield "</body>\n</html>\n"


def _text(inspection: Inspection) -> Iterator[str]:
    if inspection.loss is None:
        yield "<p>No token of this text was predicted, so there is no loss.</p>\n"
    else:
        yield f"<p>Mean loss {inspection.loss:.3f} nats per predicted token. The stronger the colour, the higher the loss: "
        yield f'<span class="scale"></span> from 0 to {_WORST:g} nats.'
        yield " Grey text was not predicted.</p>\n" if any(p.loss is None for p in inspection.pieces) else "</p>\n"
    if inspection.task == "mlm":
        yield "<p>Coloured tokens were selected to be predicted, most of them masked; the text is shown as it was before.</p>\n"
    if inspection.prefix:
        yield f"<p>The first {inspection.prefix:,} tokens are the prefix, which the model read in both directions.</p>\n"
    yield '<div class="text">'
    place = 0
    for piece in inspection.pieces:
        yield _piece(piece, place)
        place += len(piece.losses)
    yield "</div>\n"
    if inspection.left_out:
        yield f"<p>{inspection.left_out:,} more tokens were left out: the text was too long.</p>\n"


def _piece(piece: Piece, place: int) -> str:
    last = place + len(piece.losses) - 1
    where = f"token {place}" if last <= place else f"tokens {place} to {last}"
    if piece.loss is None:
        return f'<span class="kept" title="{where}, not predicted">{escaped(piece.text)}</span>'
    worst = min(1.0, max(loss for loss in piece.losses if loss is not None) / _WORST)
    return f'<span style="--loss:{0.8 * worst:.2f}" title="{where}, {piece.loss:.2f} nats">{escaped(piece.text)}</span>'
