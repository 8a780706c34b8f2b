"""GAU without its gate, with values twice as wide: an ablation of gating.

Shapes: B batch, T tokens, d model width, e = expansion * d.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "no gating": V is 2e wide and Wo maps 2e to d.

    V = silu(x Wv + bv)  [B,T,2e]      out = input + attention(..., V) Wo + bo
"""

from torch import Tensor

from lineartime.layers.flash import GAU


class GAUUngated(GAU):
    """GAU without its gate, values twice as wide.

    The options are those of `GAU`.
    """

    name = "gau-ungated"

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        return 0, 2 * width

    def apply_gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        return attended
