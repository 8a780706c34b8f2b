"""Write the folder of an inspection: a page for a browser, and the same content as pictures."""

from pathlib import Path

from lineartime.files import new_folder, write_synchronised
from lineartime.inspection.look import Inspection
from lineartime.inspection.page import page
from lineartime.inspection.pictures import draw_layer, draw_losses

PAGE = "index.html"


def write_inspection(inspection: Inspection, title: str, out: str | Path) -> Path:
    """Write index.html, losses.png and a picture for each layer, layer-01.png, ..., into a new folder, and return the page.

    The page needs no other file and no network.

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
        write_synchronised(folder / PAGE, page(inspection, title))
        draw_losses(inspection, folder / "losses.png")
        for number, layer in enumerate(inspection.layers, 1):
            draw_layer(layer, f"layer {number}: {layer.name}", folder / f"layer-{number:02}.png")
    return out / PAGE
