"""The gated attention unit as cross-attention: queries and gate from a decoder, keys and values from an encoder.

Shapes: B batch, T tokens of the decoder, S tokens of the source, d model width, H heads, s query/key width of all heads,
e = expansion * d value width of all heads.

    x = norm(input)
    U = silu(x Wu + bu)         [B,T,e]      Q = silu(x Wq + bq) * gamma_q + beta_q        [B,T,s]
    V = silu(source Wv + bv)    [B,S,e]      K = silu(source Wk + bk) * gamma_k + beta_k   [B,S,s]
    out = input + (U * attention(Q, K, V)) Wo + bo      with heads: s and e are split into H parts that attend separately

The attention is that of a GAU, relu(q.k / sqrt(s / H))^2 / n. The paper leaves n open; here it is the number of real tokens of
the source.
Without its gate, as in the paper's ablation of GAU: U is left out, V is 2e wide, and Wo maps 2e to d.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.attention import merge_heads, split_heads
from lineartime.layers.dense import Dense, factory
from lineartime.layers.residual import LayerOptions, ResidualLayer
from lineartime.ops.activations import ACTIVATIONS, Activation
from lineartime.ops.checks import as_mask, check_n_heads, check_positive
from lineartime.ops.mixed_chunk import Scales, attention_weights, reciprocal
from lineartime.ops.modes import matmul_dtype, output_dtype, without_autocast
from lineartime.ops.state import State


@dataclass(eq=False)
class SourceState(State):
    """A source as a layer has read it: keys [B, H, S, s / H], values [B, H, S, their width / H], real tokens, bool [B, S]."""

    k: Tensor
    v: Tensor
    mask: Tensor | None


class CrossGAU(ResidualLayer):
    """Gated attention unit that reads another sequence: [B, T, d] and a source [B, S, d] -> [B, T, d].

    The layer includes a pre-norm and a residual connection. The source must already be normalised, for example by the final
    norm of an encoder. A token attends to the whole source and to no other token of its own sequence. There are no rotary
    positions, because the distance between tokens of different sequences has no meaning. Both sequences therefore need
    positions in their embeddings.

    Args:
        d_model: d, the width of inputs, source and outputs.
        n_heads: H, which must divide d_qk and the width of the values.
        d_qk: s, the total width of queries and keys over all heads.
        expansion: the values and the gate have a total width of e = expansion * d over all heads.
        activation: the activation of the scores: "relu2" or "softmax".
        gated: whether U multiplies what is attended. Without it, the values have a total width of 2e.
        **options: the options of `ResidualLayer`.

    Source: the unit of "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2, applied across two sequences.
    """

    name = "cross-gau"
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    """The values of `activation` that it supports."""

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 1,
        d_qk: int = 128,
        expansion: int = 2,
        activation: Activation = "relu2",
        gated: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_choice("activation", activation, self.activations)
        check_positive(d_qk=d_qk, expansion=expansion)
        width = expansion * d_model
        self.d_gate, self.d_value = (width, width) if gated else (0, 2 * width)
        value_name = f"{'' if gated else '2 * '}expansion * d_model"
        check_n_heads(n_heads, {"d_qk": d_qk, value_name: self.d_value}, in_pairs=False)
        self.n_heads = n_heads
        self.d_qk = d_qk
        self.expansion = expansion
        self.activation: Activation = activation
        self.gated = gated
        self.to_gate_query = Dense(d_model, self.d_gate, d_qk, **factory(options))
        self.to_value_key = Dense(d_model, self.d_value, d_qk, **factory(options))
        self.gamma = nn.Parameter(torch.empty(2, d_qk, **factory(options)))
        self.beta = nn.Parameter(torch.empty(2, d_qk, **factory(options)))
        self.init_own()
        self.to_output = Dense(self.d_value, d_model, **factory(options))

    def init_own(self) -> None:
        # Not N(0, 0.02) and 0 as in a GAU: without a relative bias, scores would start at 1e-6, and their squares would pass
        # no gradient. Here, scores start near beta_q.beta_k / sqrt(s / H) = 1, so every query first averages the whole source.
        nn.init.ones_(self.gamma)
        nn.init.constant_(self.beta, (self.d_qk / self.n_heads) ** -0.25)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None, source_mask: Tensor | None = None) -> Tensor:
        """Attend from all tokens to a whole source at once.

        Args:
            x: [B, T, d].
            source: [B, S, d], normed.
            mask: [B, T], bool or integers 0 and 1, True for real tokens. Padding may be anywhere; its outputs are zero.
            source_mask: [B, S], bool or integers 0 and 1, True for real tokens of the source. No token attends to padding.

        Returns:
            [B, T, d]. For a source without real tokens, the output is x plus a learned bias.

        Raises:
            ArgumentError: if shapes do not match.
        """
        return self.attend(x, self.project_source(source, source_mask), mask)

    def project_source(self, source: Tensor, source_mask: Tensor | None = None) -> SourceState:
        """Compute the keys and values of a source [B, S, d] once, for all calls of `attend`."""
        self.check_input(source, "source", "[B, S, d_model]")
        source_mask = as_mask("source_mask", source_mask, source.shape[0], source.shape[1], source.device)
        projected = F.silu(self.to_value_key(_zero_padding(source, source_mask)))
        value, base = projected.split([self.d_value, self.d_qk], dim=-1)
        k = base * self.gamma[1] + self.beta[1]
        return SourceState(split_heads(k, self.n_heads), split_heads(value, self.n_heads), source_mask)

    def attend(self, x: Tensor, state: SourceState, mask: Tensor | None = None) -> Tensor:
        """Attend from tokens [B, T, d] to a source. Tokens are independent, so T can be split in any way."""
        self.check_input(x)
        mask = as_mask("mask", mask, x.shape[0], x.shape[1], x.device)
        if x.shape[0] != state.k.shape[0]:
            raise ArgumentError("x", f"has batch size {x.shape[0]}, but the source has batch size {state.k.shape[0]}.")
        x = _zero_padding(x, mask)
        gate, base = F.silu(self.to_gate_query(self.before(x))).split([self.d_gate, self.d_qk], dim=-1)
        q = split_heads(base * self.gamma[0] + self.beta[0], self.n_heads)
        attended = merge_heads(self.read(q, state))
        return _zero_padding(self.after(x, self.to_output(gate * attended if self.gated else attended)), mask)

    def read(self, q: Tensor, state: SourceState) -> Tensor:
        """Attend from [B, H, T, s / H] to all real tokens of a source; zeros where there is none."""
        k, v, mask = state.k, state.v, state.mask
        hidden, count = None, torch.full((1,), k.shape[2], device=k.device)
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
            hidden, count = ~mask[:, None, None], mask.sum(-1)[:, None, None]
        compute, scales = matmul_dtype(q, k, v), Scales(q.shape[-1] ** -0.5, reciprocal, reciprocal)
        with without_autocast(q):
            products = q.to(compute) @ k.to(compute).mT
            weights = attention_weights(products, hidden, count.clamp(min=1), None, self.activation, scales)
            return (weights.to(compute) @ v.to(compute)).to(output_dtype(v, compute))


def _zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Replace padding in [B, T, d] by zeros, even if it is NaN."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)
