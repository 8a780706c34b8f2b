"""RTMPose's gated attention unit, as mmpose, DeepLabCut, OTX and netspresso-trainer name its weights.

Shapes: T tokens (keypoints), S tokens of other sequences, d model width, e value width, s query/key width.

    x_n = g x / max(|x| / sqrt(d), eps)
    u, v, z = act(x_n W_uv)                       [T, e] [T, e] [T, s]
    q, k = z gamma_0 + beta_0, z gamma_1 + beta_1
    P = relu((q k^T + bias) / sqrt(s))^2 * mask   [T, T], divided by nothing
    y = scale * x + (u * P v) W_o                 the shortcut only where both widths are d

    cross-attention: u, q = act(x_n W_uv), k = keys W_k, v = values W_v   [T, e] [T, s] [S, s] [S, e]

Here x and every row of scores are divided by their largest element before they are squared, and the output is multiplied by the
square of the latter: in float16, no square overflows unless the output does.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.errors import ArgumentError, LineartimeError, check_choice
from lineartime.foreign.weights import StateDict
from lineartime.ops.checks import check_even, check_positive
from lineartime.ops.modes import acc_dtype

PACKAGE = "RTMPose's gated attention unit"
PoseActivation = Literal["silu", "relu"]
PosePositions = Literal["none", "inverted", "rope", "add"]
_ACTIVATIONS = {"silu": F.silu, "relu": F.relu}
_INVERTED = 1e-4
"""The temperature of the rotation of an RTMCCBlock, whose frequencies are 10000^(2 i / s), not 10000^(-2 i / s)."""
ROPE = "its rotary frequencies are inverted, 1, 10, 100, ... in place of 1, 1/10, 1/100, ...: neighbouring tokens are not near"
TABLE = "its relative bias is read from the front, so that distance 0 has another value for each number of tokens"


def sine_encoding(n: int, width: int, temperature: float = 1e5, *, like: Tensor) -> Tensor:
    """Cosines, then sines, of position / temperature^(2 i / width), [n, width]: mmpose's SinePositionalEncoding."""
    half, dtype = width // 2, acc_dtype(like)
    rates = (1 / temperature) ** (torch.arange(half, dtype=dtype, device=like.device) / half)
    angles = torch.arange(n, dtype=dtype, device=like.device)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1).to(like.dtype)


def _rotated(x: Tensor, encoding: Tensor) -> Tensor:
    """Rotate feature i with feature i + s / 2: [..., T, s], by a `sine_encoding`."""
    (one, two), (cos, sin) = x.chunk(2, -1), encoding.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class PoseScaleNorm(nn.Module):
    """g x / max(|x| / sqrt(d), eps) with one learned scalar g: [..., d] -> [..., d]; in float16, too, for any x."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Rescale x."""
        largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=self.eps)  # the result does not depend on it
        x = x / largest
        return x * self.g / x.square().mean(-1, keepdim=True).clamp(min=(self.eps / largest).square()).sqrt()


class PoseGAU(nn.Module):
    """RTMPose's gated attention unit: [..., T, d] -> [..., T, d_out].

    Its parameters have the names of RTMCCBlock and GAUEncoder of mmpose, so that state dicts go both ways.

    Args:
        d_model: d, the width of the input.
        d_out: the width of the output, by default d; other widths have no shortcut.
        d_value: e, by default 2 d.
        d_qk: s, even.
        n_tokens: the most tokens of the relative bias, [2 n_tokens - 1]; None for no bias. That of cross-attention, the product
            of a, rotated by t, and b, rotated by j, has any number.
        cross: whether keys and values come from other sequences.
        bias: whether the projections have biases.
        activation: of the projection of x: "silu" or "relu".
        positions: of queries and keys: "none"; "inverted", the rotation of RTMCCBlock; "rope" or "add", those of GAUEncoder in
            RTMO, which rotate by an encoding [T, s] or add it. It is given with the input, a learned one or a `sine_encoding`.
        eps: the least root mean square by which the norm divides.
        dropout: of P, in training.

    Source: RTMPose (arXiv 2303.07399) and RTMO (arXiv 2312.07526).
    """

    def __init__(
        self,
        d_model: int,
        d_out: int | None = None,
        *,
        d_value: int | None = None,
        d_qk: int = 128,
        n_tokens: int | None = None,
        cross: bool = False,
        bias: bool = False,
        activation: PoseActivation = "silu",
        positions: PosePositions = "none",
        eps: float = 1e-5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d_out = d_model if d_out is None else d_out
        d_value = 2 * d_model if d_value is None else d_value
        check_positive(d_model=d_model, d_out=d_out, d_value=d_value, d_qk=d_qk, n_tokens=1 if n_tokens is None else n_tokens)
        check_even("half of the features are rotated with the other half", d_qk=d_qk)
        check_choice("activation", activation, get_args(PoseActivation))
        check_choice("positions", positions, get_args(PosePositions))
        if cross and positions in ("rope", "add"):
            raise ArgumentError("positions", f"is {positions!r}, but cross-attention has only 'none' and 'inverted'.")
        self.cross, self.activation, self.positions, self.dropout = cross, activation, positions, dropout
        self.widths = (d_value, d_qk) if cross else (d_value, d_value, d_qk)
        self.ln = PoseScaleNorm(eps)
        self.uv = nn.Linear(d_model, sum(self.widths), bias)
        self.o = nn.Linear(d_value, d_out, bias)
        if cross:
            self.k_fc, self.v_fc = nn.Linear(d_model, d_qk, bias), nn.Linear(d_model, d_value, bias)
        else:
            self.gamma, self.beta = nn.Parameter(torch.rand(2, d_qk)), nn.Parameter(torch.rand(2, d_qk))
        self.w = None if n_tokens is None or cross else nn.Parameter(torch.rand(2 * n_tokens - 1))
        self.a, self.b = (nn.Parameter(torch.rand(1, d_qk)) if n_tokens and cross else None for _ in range(2))
        self.res_scale = nn.ParameterDict({"scale": torch.ones(d_model)}) if d_out == d_model else None

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        encoding: Tensor | None = None,
    ) -> Tensor:
        """Process whole sequences.

        Args:
            x: [..., T, d].
            keys, values: [..., S, d], for cross-attention alone.
            mask: [..., T, T] or [..., T, S], bool or numbers, which P is multiplied by.
            encoding: [T, s], for the positions "rope" and "add" alone.

        Raises:
            ArgumentError: for inputs that the layer does not take or lacks, or more tokens than its relative bias has.
        """
        self._check(x, keys, values, mask, encoding)
        u, *others = _ACTIVATIONS[self.activation](self.uv(self.ln(x))).split(self.widths, -1)
        if keys is not None and values is not None:
            q, k, v = others[0], self.k_fc(keys), self.v_fc(values)
        else:
            v, z = others
            q, k = (z * self.gamma[i] + self.beta[i] for i in range(2))
        n, m, s = q.shape[-2], k.shape[-2], q.shape[-1]
        if self.positions == "inverted":
            q, k = (_rotated(each, sine_encoding(each.shape[-2], s, _INVERTED, like=each)) for each in (q, k))
        if encoding is not None:
            q, k = (_rotated(each, encoding) if self.positions == "rope" else each + encoding for each in (q, k))
        scores = q / math.sqrt(s) @ k.mT  # divided first: in float16, q k^T may overflow
        if self.w is not None:
            offsets = torch.arange(n, device=x.device)
            scores = scores + self.w[offsets - offsets[:, None] + n - 1] / math.sqrt(s)
        if self.a is not None and self.b is not None:
            a, b = (_rotated(each, sine_encoding(size, s, _INVERTED, like=q)) for each, size in ((self.a, n), (self.b, m)))
            scores = scores + a / math.sqrt(s) @ b.mT
        if not m:  # of no keys, there is no largest score
            scores, v = scores.new_zeros(*scores.shape[:-1], 1), v.new_zeros(*v.shape[:-2], 1, v.shape[-1])
            mask = None
        largest = scores.detach().amax(-1, keepdim=True).clamp(min=1e-5)  # y does not depend on it
        p = F.dropout((scores / largest).relu().square(), self.dropout, self.training)
        attended = (p if mask is None else p * mask) @ v
        out: Tensor = F.linear(u * attended, self.o.weight) * largest * largest
        out = out if self.o.bias is None else out + self.o.bias
        return out if self.res_scale is None else x * self.res_scale["scale"] + out

    def _check(
        self, x: Tensor, keys: Tensor | None, values: Tensor | None, mask: Tensor | None, encoding: Tensor | None
    ) -> None:
        """Raise ArgumentError for inputs that the layer lacks or does not take."""
        d, s, n = self.uv.in_features, self.widths[-1], x.shape[-2] if x.dim() > 1 else 0
        others = {"keys": keys, "values": values}
        for name, given in others.items():
            if self.cross != (given is not None):
                has = "is given, but self-attention has none: leave it out."
                raise ArgumentError(name, "is None, but cross-attention needs it." if self.cross else has)
        for name, given in {"x": x, **others}.items():
            if given is not None and (given.dim() < 2 or given.shape[-1] != d):
                raise ArgumentError(name, f"has shape {list(given.shape)}, but must be [..., tokens, {d}].")
        m = n if keys is None else keys.shape[-2]
        if values is not None and values.shape[-2] != m:
            raise ArgumentError("values", f"has {values.shape[-2]} tokens, but there are {m} keys: give as many.")
        wanted = self.positions in ("rope", "add")
        if wanted != (encoding is not None) or (encoding is not None and encoding.shape != (n, s)):
            found = "None" if encoding is None else f"of shape {list(encoding.shape)}"
            needs = f"of shape [{n}, {s}]" if wanted else "None"
            raise ArgumentError("encoding", f"is {found}, but positions={self.positions!r} needs {needs}.")
        scores = (*x.shape[:-2], n, m)
        fits = mask is None or all(a in (1, b) for a, b in zip(mask.shape[::-1], scores[::-1], strict=False))
        if mask is not None and (mask.dim() < 2 or not fits):
            raise ArgumentError("mask", f"has shape {list(mask.shape)}, but must be [..., {n}, {m}], as {list(scores)}.")
        if self.w is not None and 2 * n - 1 > len(self.w):
            raise ArgumentError("x", f"has {n} tokens, but the relative bias is for at most {(len(self.w) + 1) // 2}.")


def from_rtmpose(
    weights: Mapping[str, Tensor],
    *,
    activation: PoseActivation = "silu",
    positions: PosePositions = "none",
    eps: float = 1e-5,
    dropout: float = 0.0,
) -> PoseGAU:
    """Build the gated attention unit of a state dict of mmpose, DeepLabCut, OTX or netspresso-trainer, in evaluation mode.

    Args:
        weights: of an RTMCCBlock, a GatedAttentionUnit or a GAUEncoder, or of a whole model that has one of them.
        activation, positions, eps, dropout: those it was built with, as of `PoseGAU`; the weights do not contain them. An
            RTMCCBlock of pos_enc=True has positions="inverted". Its drop_path, which only training would read, is left out.

    Warns:
        UserWarning: for a relative bias or rotary positions of an RTMCCBlock, which are what it computes, not what is meant.

    Raises:
        LineartimeError: for weights that have no such unit, or several.
        ArgumentError: for arguments that the unit cannot have.
    """
    state = StateDict(weights, PACKAGE).part("uv.weight")
    (rows, d_model), (d_out, d_value) = state.matrix("uv.weight"), state.matrix("o.weight")
    cross = "k_fc.weight" in state
    d_qk = rows - (1 if cross else 2) * d_value
    if d_qk < 2 or d_qk % 2:
        raise LineartimeError(f"uv.weight has {rows} rows, of which {d_qk} are for queries, but {PACKAGE} has an even number.")
    n_tokens = (state["w"].numel() + 1) // 2 if "w" in state else 1 if "a" in state else None
    unit = PoseGAU(
        d_model, d_out, d_value=d_value, d_qk=d_qk, n_tokens=n_tokens, cross=cross, bias="uv.bias" in state,
        activation=activation, positions=positions, eps=eps, dropout=dropout,
    )  # fmt: skip
    taken = {name: state.take(name, *parameter.shape) for name, parameter in unit.state_dict().items()}
    state.finish()
    for wrong, is_used in ((TABLE, unit.w is not None), (ROPE, positions == "inverted" or unit.a is not None)):
        if is_used:
            warnings.warn(f"This unit is {PACKAGE} to the letter: {wrong}.", stacklevel=2)
    unit.to(taken["uv.weight"].dtype).load_state_dict(taken)
    return unit.eval()
