"""What a model does with a text, layer by layer: as arrays, and as one picture."""

from lineartime.inspection.look import Inspection, LayerView, inspect, open_attention
from lineartime.inspection.picture import draw

__all__ = ["Inspection", "LayerView", "draw", "inspect", "open_attention"]
