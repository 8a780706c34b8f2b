"""Show what a model does with a text, layer by layer, on a page and in pictures."""

from lineartime.inspection.look import Inspection, LayerView, Piece, inspect
from lineartime.inspection.page import PAGE, write_inspection

__all__ = ["PAGE", "Inspection", "LayerView", "Piece", "inspect", "write_inspection"]
