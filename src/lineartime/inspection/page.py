"""The page of an inspection: one HTML file without scripts or external resources.

All data from the user, above all the text, passes through `escaped`.
"""

import html
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence

from lineartime.inspection.look import Inspection, LayerView, Piece
from lineartime.inspection.pictures import NEGATIVE, POSITIVE, map_png
from lineartime.runs.ticks import MIN_TICKS, round_ticks, tick_labels

_WORST = 8.0
"""The loss in nats that is shown in the strongest colour."""
_STYLE = f"""
:root {{ color-scheme: light dark; --ink: #1b1f24; --faint: #667; --paper: #fff; --line: #d5d8dd; --hot: 217,95,2;
  --local: rgb{NEGATIVE}; --global: rgb{POSITIVE}; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e8eb; --faint: #9aa3ad; --paper: #15181c; --line: #3a4048; --hot: 255,140,60;
    --local: #6cb4ee; --global: #ff9d4d; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.1rem; margin: 2.2rem 0 .4rem; }}
p, figcaption {{ color: var(--faint); margin: .3rem 0; }}
.text {{ font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink);
  border: 1px solid var(--line); border-radius: 6px; padding: .8rem; direction: ltr; }}
.text span {{ unicode-bidi: isolate; border-radius: 3px; background: rgba(var(--hot), var(--loss)); }}
.text .kept {{ background: none; color: var(--faint); }}
.text i, h1 i {{ font-style: normal; opacity: .7; font-size: .85em; }}
.scale {{ display: inline-block; width: 9rem; height: .8em; border-radius: 3px;
  background: linear-gradient(90deg, rgba(var(--hot), 0), rgba(var(--hot), .8)); }}
.figures {{ display: flex; flex-wrap: wrap; gap: 1.4rem; }} figure {{ margin: .4rem 0; width: min-content; max-width: 100%; }}
figure img {{ width: 19rem; aspect-ratio: 1; image-rendering: pixelated; border: 1px solid var(--line); }}
svg {{ width: 29rem; }} svg text {{ fill: var(--faint); font-size: 11px; }}
.grid {{ stroke: var(--line); }} .curve {{ fill: none; stroke-width: 1.5; }}
"""


def page(inspection: Inspection, title: str) -> str:
    """The page as HTML."""
    return "".join(_page(inspection, title))


def escaped(text: str) -> str:
    r"""Escape a text for HTML; an invisible character is shown as its escape sequence, such as \u202e."""
    return "".join(_character(character) for character in text)


def _character(character: str) -> str:
    if character == "\n":
        return "<i>↵</i>\n"
    if character == " " or character.isprintable():
        return html.escape(character)
    return f"<i>{html.escape(character.encode('unicode_escape').decode())}</i>"


def _page(inspection: Inspection, title: str) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield f"<title>lineartime inspect</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    yield f"<h1>{escaped(title)}</h1>\n"
    yield from _text(inspection)
    if inspection.task != "mlm":
        yield "<p>Below, position 0 holds the end of a document. Position t holds token t - 1 and predicts token t.</p>\n"
    for number, layer in enumerate(inspection.layers, 1):
        yield from _layer(layer, number)
    yield "</body>\n</html>\n"


def _text(inspection: Inspection) -> Iterator[str]:
    mean = inspection.loss
    if mean is None:
        yield "<p>No token of this text was predicted, so there is no loss.</p>\n"
    else:
        yield f"<p>Mean loss {mean:.3f} nats per predicted token. The stronger the colour, the higher the loss: "
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


def _layer(layer: LayerView, number: int) -> Iterator[str]:
    yield f"<h2>Layer {number}: {escaped(layer.name)}</h2>\n"
    for sentence in layer.missing:
        yield f"<p>{escaped(sentence)}</p>\n"
    yield '<div class="figures">\n'
    for part, weights in layer.weights.items():
        name = "Attention" if part == "attention" else f"{part.capitalize()} part"
        picture = b64encode(map_png(weights)).decode()
        yield f'<figure><img alt="{name} of layer {number}: weights" src="data:image/png;base64,{picture}">'
        signs = ", blue ones negative" if (weights < 0).any() else ""
        yield f"<figcaption>{name}: how much each position (row) attends to every other one (column). "
        yield f"Strongest weight {float(weights.abs().max()):.2g}{signs}.</figcaption></figure>\n"
    share = layer.global_share
    if share is not None:
        curves = {"global": [(float(place), value) for place, value in enumerate(share.tolist())]}
        yield _chart("The global part's share of what is added to each token, by norms", curves, top=1.0)
    elif layer.added:
        norms = {str(part): [(float(at), value) for at, value in enumerate(n.tolist())] for part, n in layer.added.items()}
        yield _chart("The norm of what is added to each token", norms)
    if layer.states:
        states = {"global": [(float(read), norm) for read, norm in layer.states.items()]}
        yield _chart("The norm of the global state, by tokens read", states)
    yield "</div>\n"


def _chart(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], top: float | None = None) -> str:
    """Draw curves as an SVG in the colours of the page."""
    width, height, left, bottom = 460, 220, 52, 24
    points = [point for curve in curves.values() for point in curve]
    end = max(MIN_TICKS - 1.0, max(x for x, _ in points))
    high = max(y for _, y in points) if top is None else top
    high = high if high > 0 else 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / end * (width - left - 8), height - bottom - y / high * (height - bottom - 10)

    parts = [f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">']
    across, up = round_ticks(0, end, whole=True), round_ticks(0, high)
    for tick, label in zip(up, tick_labels(up), strict=True):
        _, y = at(0, tick)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{width - 8}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, label in zip(across, tick_labels(across), strict=True):
        x, _ = at(tick, 0)
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{label}</text>')
    for name, curve in curves.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        colour = "global" if name == "global" else "local"
        parts.append(f'<polyline class="curve" stroke="var(--{colour})" points="{path}"/>')
    parts.append(f"</svg><figcaption>{html.escape(title)}.</figcaption></figure>\n")
    return "".join(parts)
