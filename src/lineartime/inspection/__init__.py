"""What a model does with a text, layer by layer: for people who would rather look than read."""

from lineartime.inspection.look import Inspection, LayerView, Piece, inspect
from lineartime.inspection.write import PAGE, write_inspection

__all__ = ["PAGE", "Inspection", "LayerView", "Piece", "inspect", "write_inspection"]
