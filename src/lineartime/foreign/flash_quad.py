"""Import the gated attention unit of FLASHQuad_pytorch from its state dict.

    P = relu(rope(q) rope(k)^T / n + w[j - t + n - 1])^2        n = max_position_embeddings (512), whatever the input's length

Its users found that 1 / length, and a bias read for that length, give wrong outputs at other lengths than that of training;
hence the constant. `normalization="constant"` has it here.
"""

from collections.abc import Mapping

from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.foreign.mixers import ForeignGAU
from lineartime.foreign.weights import StateDict
from lineartime.layers.positions import MAX_TABLE_LENGTH
from lineartime.layers.residual import Norm

PACKAGE = "FLASHQuad_pytorch"


def from_flash_quad(weights: Mapping[str, Tensor], *, causal: bool = False, eps: float = 1e-5) -> ForeignGAU:
    """Build the unit of a state dict of FLASHQuad_pytorch's GAU, in evaluation mode.

    Args:
        weights: of one GAU, also as the only one of a model.
        causal: whether it is called with causal=True.
        eps: the `layer_norm_eps` of its configuration.

    Raises:
        LineartimeError: for weights of something else, or of a unit that ours cannot be.
    """
    state = StateDict(weights, PACKAGE).part("uv.weight")
    (rows, d_model), (_, width), n = state.matrix("uv.weight"), state.matrix("o.weight"), (state["w"].numel() + 1) // 2
    d_qk = rows - 2 * width
    if width % d_model or d_qk < 2 or d_qk % 2 or n > MAX_TABLE_LENGTH:
        what = f"has values of width {width}, keys of width {d_qk} and biases of {n} tokens"
        ours = f"ours have a multiple of {d_model}, an even number and at most {MAX_TABLE_LENGTH}"
        raise LineartimeError(f"The weights of {PACKAGE} are of a unit that {what}, but {ours}.")
    for unused in ("a", "b"):  # of a bias for longer inputs, which it never reads
        state.take(unused, 1, d_qk)
    own = {
        "to_gate_value_base.weight": state.take("uv.weight", rows, d_model),
        "to_gate_value_base.bias": state.take("uv.bias", rows),
        "to_output.weight": state.take("o.weight", d_model, width),
        "to_output.bias": state.take("o.bias", d_model),
        "gamma": state.take("weight", 2, d_qk),
        "beta": state.take("bias", 2, d_qk),
        "bias.table": state.take("w", 2 * n - 1),
    }
    norm: Norm = "scalenorm" if "LayerNorm.scala" in state else "layernorm"
    if norm == "scalenorm":
        own["norm.g"] = state.take("LayerNorm.scala", 1)
    else:
        own |= {f"norm.{kind}": state.take(f"LayerNorm.{kind}", d_model) for kind in ("weight", "bias")}
    state.finish()
    unit = ForeignGAU(
        d_model, d_qk=d_qk, expansion=width // d_model, normalization="constant", max_length=n, causal=causal, norm=norm,
        norm_eps=eps,
    ).to(own["gamma"].dtype)  # fmt: skip
    unit.load_state_dict(own)
    return unit.eval()
