"""The gated unit, base of GAU and FLASH.

Shapes: B batch, T tokens, d model width, e = expansion * d value width, s query/key width.

    U = silu(x Wu + bu)  [B,T,e]      V = silu(x Wv + bv)  [B,T,e]      Z = silu(x Wz + bz)  [B,T,s]
    queries and keys = rope(Z * gamma + beta), one cheap (gamma, beta) for each
    out = input + (U * attention(..., V)) Wo + bo
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.residual import Mixer, MixerOptions, init_dense, new_positions, zero_padding
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, Activation, Normalization, check_choice
from lineartime.ops.backends import BACKENDS, Backend
from lineartime.ops.gated_mixed_chunk import queries_and_keys
from lineartime.ops.layout import token_positions


class GatedOptions(MixerOptions, total=False):
    """What every gated unit takes: see `GatedUnit`."""

    d_qk: int
    expansion: int
    activation: Activation
    normalization: Normalization
    rope: bool


class GatedUnit(Mixer):
    """Projections, gate and output of a gated attention layer (arXiv 2202.10447, section 2.2); a subclass attends.

    Args:
        d_qk: s, the width of queries and keys; even.
        expansion: values and gate are e = expansion * d wide.
        activation: of the scores: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys; "paper" is the published form, see the subclass.
        rope: whether queries and keys are rotated by their position.
        **options: those of `Mixer`.
    """

    backend: Backend = "auto"
    """Which implementation of its attention a layer uses: see `set_backend`."""
    has_backends: ClassVar[bool] = True
    """Whether there is more than one."""
    n_maps: ClassVar[int] = 2
    """Queries and keys that are made of Z, each by its own gamma and beta."""

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int = 128,
        expansion: int = 2,
        activation: Activation = "relu2",
        normalization: Normalization = "count",
        rope: bool = True,
        **options: Unpack[MixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_positive(d_qk=d_qk, expansion=expansion)
        check_even("rotary positions turn pairs of features", d_qk=d_qk)
        self.d_qk = d_qk
        self.d_gate, self.d_value = self.gate_and_value_widths(expansion * d_model)
        self.activation: Activation = activation
        self.normalization: Normalization = normalization
        self.rope = rope
        self.to_gate_value_base = init_dense(nn.Linear(d_model, self.d_gate + self.d_value + d_qk))
        self.gamma = nn.Parameter(torch.empty(self.n_maps, d_qk))
        self.beta = nn.Parameter(torch.zeros(self.n_maps, d_qk))
        nn.init.normal_(self.gamma, std=0.02)
        self.to_output = init_dense(nn.Linear(self.d_value, d_model))

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        """How wide U and V are, given e = expansion * d."""
        return width, width

    def attend(self, maps: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Queries and keys [B, maps, T, s] and values [B, T, e] -> [B, T, e], for whole sequences.

        A subclass supplies this, or `attend_and_gate` as a whole.
        """
        raise NotImplementedError

    @abstractmethod
    def attend_next(self, maps: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The same for N more tokens of streams, and the state after them."""

    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Read whole sequences at once.

        Args:
            x: [B, T, d].
            mask: bool [B, T], True for real tokens; padding may stand anywhere and comes out as zeros.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.

        Returns:
            [B, T, d].

        Raises:
            ValueError: if shapes do not fit, or a sequence is longer than a table of relative biases.
        """
        self.check_batch(x, mask, cu_seqlens)
        x = zero_padding(x, mask)
        positions = token_positions(x.shape[1], mask, cu_seqlens, x.device)
        gated = self.attend_and_gate(self.to_gate_value_base(self.norm(x)), positions, mask, cu_seqlens)
        return zero_padding(self.add_output(x, gated), mask)

    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Continue streams by N tokens, [B, N, d] -> [B, N, d] and the state after them; `state` stays as it is."""
        self.check_stream(x, state)
        projected = self.to_gate_value_base(self.norm(x))
        gate, v, maps = self.split(projected, new_positions(state.position, x.shape[1], x.device))
        attended, state = self.attend_next(maps, v, state)
        return self.add_output(x, self.gate(gate, attended)), state

    def attend_and_gate(self, projected: Tensor, positions: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """From the projected tokens [B, T, 2 e + s] to what the output map reads, [B, T, e]."""
        gate, v, maps = self.split(projected, positions)
        return self.gate(gate, self.attend(maps, v, mask, cu_seqlens))

    def split(self, projected: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected tokens -> the gate U and the values V, [B, T, e], and the queries and keys, [B, maps, T, s]."""
        gate, value, base = F.silu(projected).split([self.d_gate, self.d_value, self.d_qk], dim=-1)
        return gate, value, self.queries_and_keys(base, positions)

    def queries_and_keys(self, base: Tensor, positions: Tensor) -> Tensor:
        """Z [B, T, s] -> rope(Z * gamma + beta), [B, maps, T, s]."""
        return queries_and_keys(base, self.gamma, self.beta, positions if self.rope else None)

    def gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        """U * attention's output."""
        return gate * attended

    def add_output(self, x: Tensor, gated: Tensor) -> Tensor:
        """The output map and the residual: x [B, T, d] and gated values [B, T, e] -> [B, T, d]."""
        out: Tensor = x + self.dropout(self.to_output(gated))
        return out


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Have all GAU and FLASH layers of a model, or a layer itself, compute their attention by one backend.

    Streaming, and the variants of FLASH in `lineartime.baselines`, have but one implementation, and do not change.

    Args:
        module: a layer, or anything that contains layers.
        backend: "torch", "tiled" (for processors), "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto", the
            fastest that can run.

    Raises:
        ValueError: for an unknown backend. One that is known but cannot run says so when the layer is used.
    """
    check_choice("backend", backend, BACKENDS)
    for layer in module.modules():
        if isinstance(layer, GatedUnit) and layer.has_backends:
            layer.backend = backend
