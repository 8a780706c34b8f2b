"""GAU and FLASH, from norm to residual: one method reads rows, packs, prefixes and streams.

    U, V, Y = split(norm(x) Wi + bi)                                                   [N,e] [N,e] [N,s]
    queries and keys = rope(silu(Y) gamma_i + beta_i)       2 of GAU, 4 of FLASH       [N,s]
    y = x + (silu(U) * attend(queries, keys, silu(V))) Wo + bo

A model of GAUs is FLASH-Quad.

Shapes: N tokens, D documents, d model width, e = expansion * d value width, s query/key width, C chunk size.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), sections 2.2 (GAU) and 3 (FLASH).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.dense import Dense, apart, factory, has_hooks, is_untouched
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.positions import MAX_TABLE_LENGTH, RelativeBias, RotaryBias, TableBias
from lineartime.layers.residual import norm_parts
from lineartime.ops import mixed_chunk, tiles
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, SOFTMAXES, Activation, Normalization
from lineartime.ops.backends import BACKENDS, Backend, choose_backend, why_not
from lineartime.ops.checks import check_even, check_positive, require
from lineartime.ops.mixed_chunk import MixedChunkOptions, Scales, mixed_chunk_state, reciprocal
from lineartime.ops.modes import acc_dtype, is_plain, is_trained_compiled, matmul_dtype
from lineartime.ops.packing import Packing, describe
from lineartime.ops.state import KVCache

InitialScores = Literal["small", "unit"]
PUBLISHED_LENGTH = 512
"""The constant n of a causal GAU with normalization="paper" and no max_length: the paper's shortest context."""


class GatedOptions(MixerOptions, total=False):
    """What every gated unit takes: see `GAU`."""

    d_qk: int
    expansion: int
    activation: Activation
    normalization: Normalization
    rope: bool
    relative_bias: bool
    initial_scores: InitialScores


class GAU(Mixer):
    """Gated attention unit: one layer that replaces attention and feed-forward, quadratic in T.

    The layer includes a pre-norm and a residual connection: `y = GAU(256)(x)` maps [B, T, d] to [B, T, d].

    Args:
        d_qk: s, the width of queries and keys, which must be even.
        expansion: the values and the gate have width e = expansion * d.
        activation: the activation of the scores: "relu2" or "softmax".
        normalization: "count" divides by the number of visible keys. "paper" is the published relu(q.k / n + bias)^2, with n
            the number of real tokens of the document or, in a causal layer, the constant `max_length` (512 if it is None).
        rope: whether to apply rotary positions to queries and keys.
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores.
        max_length: the length of the longest sequence, or None. Up to 512, the relative bias is a table, and a longer input
            raises an error. Above 512, or with None, the bias has the rotary form, which has no length limit.
        initial_scores: "small" draws gamma from N(0, 0.02) and sets beta to 0, as published. "unit" sets gamma to 1 and beta to
            s^(-1/4) for the queries and keys of a quadratic part. q.k / sqrt(s) then starts near 1 and, with RoPE, falls with
            distance. The published values suit normalization="paper"; with "count", attention that starts small learns late.
        **options: the options of `Mixer`.

    Source: arXiv 2202.10447, section 2.2.
    """

    name = "gau"
    reads_prefix = True
    any_positions = True
    backend: Backend | None = "auto"
    chunk_size: int | None = None
    n_heads: int = 1
    """The number of heads that divide the width of queries, keys and values among them."""
    n_maps: ClassVar[int] = 2
    """The number of queries and keys that are made from Z = silu(Y), each with its own gamma and beta."""
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    normalizations: ClassVar[tuple[str, ...]] = NORMALIZATIONS

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int = 128,
        expansion: int = 2,
        activation: Activation = "relu2",
        normalization: Normalization = "count",
        rope: bool = True,
        relative_bias: bool = True,
        max_length: int | None = None,
        initial_scores: InitialScores = "small",
        **options: Unpack[MixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_choice("activation", activation, self.activations)
        check_choice("normalization", normalization, self.normalizations)
        check_choice("initial_scores", initial_scores, get_args(InitialScores))
        check_positive(d_qk=d_qk, expansion=expansion, **({} if max_length is None else {"max_length": max_length}))
        check_even("queries and keys consist of pairs of features", d_qk=d_qk)
        self.d_qk = d_qk
        self.expansion = expansion
        self.d_gate, self.d_value = self.gate_and_value_widths(expansion * d_model)
        self.activation: Activation = activation
        self.normalization: Normalization = normalization
        self.rope = rope
        self.rotated_width = d_qk if rope else 0
        self.max_length = max_length
        self.initial_scores: InitialScores = initial_scores
        self.to_gate_value_base = Dense(d_model, self.d_gate, self.d_value, d_qk, **factory(options))
        self.gamma = nn.Parameter(torch.empty(self.n_maps, d_qk, **factory(options)))
        self.beta = nn.Parameter(torch.empty(self.n_maps, d_qk, **factory(options)))
        self.init_own()
        self.to_output = Dense(self.d_value, d_model, **factory(options))
        self.relative_bias = relative_bias
        self.bias: RelativeBias | None = None
        if relative_bias and max_length is not None and max_length <= MAX_TABLE_LENGTH:
            self.bias = TableBias(max_length, **factory(options))
        elif relative_bias:
            self.bias = RotaryBias(d_qk, **factory(options))

    def init_own(self) -> None:
        """Initialise gamma and beta: see `initial_scores`."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)
        if self.initial_scores == "unit":  # the queries and keys of a quadratic part come first
            nn.init.ones_(self.gamma[:2])
            nn.init.constant_(self.beta[:2], (self.d_qk / self.n_heads) ** -0.25)

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        """The widths of U and V, given e = expansion * d."""
        return width, width

    @property
    def longest_sequence(self) -> int | None:
        """The length that the table of relative biases covers, or None without a table."""
        return None if self.bias is None else self.bias.max_length

    def scales(self) -> Scales:
        """The divisors of its attention. Those of a causal layer do not change with the current length."""
        unit = (self.d_qk / self.n_heads) ** -0.5
        if self.normalization == "count":
            return Scales(unit, reciprocal, reciprocal)
        n = 1 / (self.max_length or PUBLISHED_LENGTH) if self.causal else None
        return Scales(unit if self.activation in SOFTMAXES else n, torch.ones_like, torch.ones_like)

    def options(self, packing: Packing) -> MixedChunkOptions:
        """The options of its attention."""

        def bias(n: int) -> Tensor:
            longest = self.longest_sequence
            assert self.bias is not None
            if longest is None or n <= longest:
                values: Tensor = self.bias(n, packing)
                return values
            problem = f"is {longest}, the length of this GAU's table of relative biases, but"
            advice = "build it with a larger max_length, or with None for no limit."
            if packing.lengths is not None or packing.even:
                raise ArgumentError("max_length", f"{problem} the sequence has {n} tokens: {advice}")
            # Of code that is traced, n is a bound.
            require(packing.position < longest, "max_length", f"{problem} a sequence has more tokens: {advice}")
            return F.pad(self.bias(longest, packing), (n - longest, n - longest))

        of_distance = None if self.bias is None else bias
        return MixedChunkOptions(
            self.chunk_size, self.causal, self.scales(), self.activation, of_distance, self.backend or "torch"
        )

    def prepare(self, packing: Packing) -> None:
        packing.grids(self.chunk_size, causal=self.causal)
        if self.rotated_width:
            packing.rotations(self.rotated_width, acc_dtype(self.gamma))

    def is_fused(self) -> bool:
        """Whether it is compiled for training as it was built: `read` then norms the tokens, together with the projection."""
        if not is_trained_compiled() or type(self) not in (GAU, FLASH) or self.token_shift:
            return False
        replaced = "before" in self.__dict__ or "read" in self.__dict__ or has_hooks(self.norm)
        return not replaced and norm_parts(self.norm) is not None and is_untouched(self.to_gate_value_base)

    def before(self, x: Tensor) -> Tensor:
        return x if self.is_fused() else super().before(x)

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        norm = norm_parts(self.norm) if self.is_fused() else None
        gate, v, y = apart(self.to_gate_value_base, x, [self.d_gate, self.d_value, self.d_qk], norm)
        maps, state = self.queries_and_keys(y, packing, state)
        out, state = self.attend(maps, F.silu(v), packing, state)
        return self.to_output(self.apply_gate(F.silu(gate), out)), state

    def queries_and_keys(self, y: Tensor, packing: Packing, state: Any) -> tuple[Sequence[Tensor], Any]:
        """Queries and keys, [N, s] each, of Y, and the state with what a subclass keeps of Y."""
        return self.rotated(F.silu(y), packing, self.n_maps), state

    def rotated(self, z: Tensor, packing: Packing, n: int) -> Sequence[Tensor]:
        """The first n maps, rope(Z gamma_i + beta_i), [N, s] each."""
        maps = torch.addcmul(self.beta[:n], z[:, None], self.gamma[:n])
        maps = packing.rotate(maps, self.rotated_width) if self.rope else maps
        # The backward pass stacks the gradients of the maps: in the narrow dtype that products leave.
        return (maps.to(matmul_dtype(z, maps)) if self.is_fused() else maps).unbind(1)

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        """Attend with queries and keys [N, s] and values [N, e]: the outputs [N, e], and the state of streams."""
        q, k = maps
        if state is None:
            return mixed_chunk.attend(q, k, None, None, v, packing, self.options(packing))
        return mixed_chunk.attend_cached(q, k, v, packing, self.options(packing), state)

    def apply_gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        """Multiply the output of the attention by the gate U."""
        return gate * attended

    def init_own_state(self, batch_size: int) -> Any:
        like = self.any_parameter
        keys = torch.zeros(batch_size, 0, self.d_qk, dtype=acc_dtype(like), device=like.device)
        return KVCache(self.first_position(batch_size), keys, keys.new_zeros(batch_size, 0, self.d_value))


class FLASH(GAU):
    """Gated unit with mixed chunk attention: quadratic inside chunks of C tokens, linear across them.

    The layer includes a pre-norm and a residual connection: `y = FLASH(256)(x)` maps [B, T, d] to [B, T, d]. A causal layer
    streams with constant memory. With normalization="paper", scores are divided by the constant C, as published, and the linear
    part is averaged over chunks. With "paper_sum", as in published ports, a causal layer sums K^T V / C over the chunks before
    without averaging, so that outputs grow with the position.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores of the quadratic part: a
            table for chunks of up to 512 tokens, and the rotary form for longer ones.
        **options: the options of `GAU`; the activation applies to the quadratic part.

    Source: arXiv 2202.10447, section 3.
    """

    name = "flash"
    n_maps = 4
    normalizations = (*NORMALIZATIONS, "paper_sum")
    splits_context = True
    constant_state = True
    chunk_size: int
    backends: ClassVar[tuple[Backend, ...]] = ("auto", "torch", "tiled", "oracle")
    bias_chunks: ClassVar[int] = 1
    """The number of consecutive chunks that the relative bias spans."""

    def __init__(self, d_model: int, *, chunk_size: int = 256, **options: Unpack[GatedOptions]) -> None:
        check_positive(chunk_size=chunk_size)
        self.chunk_size = chunk_size
        super().__init__(d_model, max_length=self.bias_chunks * chunk_size, **options)

    @property
    def longest_sequence(self) -> int | None:
        return None

    def scales(self) -> Scales:
        size = self.chunk_size
        if self.normalization == "count":
            return Scales(self.d_qk**-0.5, reciprocal, reciprocal)

        def of_full_chunks(n: Tensor) -> Tensor:
            return reciprocal((n + size - 1) // size * size)

        score = self.d_qk**-0.5 if self.activation in SOFTMAXES else 1 / size
        if self.normalization == "paper":
            return Scales(score, torch.ones_like, of_full_chunks)
        before = (lambda n: torch.full_like(n, 1 / size)) if self.causal else reciprocal
        return Scales(score, torch.ones_like, before, prefix=reciprocal)

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q_quad, k_quad, q_lin, k_lin = maps
        return mixed_chunk.attend(q_quad, k_quad, q_lin, k_lin, v, packing, self.options(packing), state)

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        if packing.context is not None and (packing.longest == 0 or packing.longest % self.chunk_size):
            found = f"has {packing.longest} tokens of a sequence in this process, but must have whole chunks"
            advice = f"split N times a multiple of {self.chunk_size} tokens over N processes."
            raise ArgumentError("x", f"{found}, chunk_size = {self.chunk_size}: {advice}")
        if packing.prefix is None and packing.context is None and self.has_tiles(x, packing, state):
            return self.read_tiles(self.norm(x) if self.is_fused() else x, packing, state)
        return super().read(x, packing, state)

    def has_tiles(self, x: Tensor, packing: Packing, state: Any) -> bool:
        """Whether tiles read these tokens: of streams, those that begin with a whole chunk, without a gradient.

        Raises:
            ArgumentError: if the backend of whole sequences cannot run here.
        """
        dtype, backend = matmul_dtype(x, self.gamma), self.backend or "torch"
        if state is None:
            return choose_backend(backend, self.backends[1:], x, dtype, self.activation, tiles.SOURCE) == "tiled"
        if backend not in ("auto", "tiled") or not packing.even or packing.longest < self.chunk_size:
            return False
        begins = packing.grids(self.chunk_size, causal=True)[0].slot is None and is_plain(x, self.gamma, self.beta)
        return begins and why_not("tiled", x.device, dtype, self.activation, tiles.SOURCE) is None

    def read_tiles(self, x: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        """The same on a CPU, with everything between the two projections in one operation."""
        projection, output = self.to_gate_value_base, self.to_output
        # Fusing the output projection, too, keeps less for the backward pass.
        fused = state is None and torch.is_grad_enabled() and is_untouched(output)
        weight = output.weight if fused else None
        projection_bias: Tensor | None = None
        full = all(grid.is_full for grid in packing.grids(self.chunk_size, causal=self.causal))  # empty slots stay zero
        if fused and full and is_untouched(projection):
            tokens, projection_bias = F.linear(x, projection.weight), projection.bias
        else:
            tokens = projection(x)
        projected = tiles.Projected(tokens, projection_bias, self.gamma, self.beta, weight)
        out, state = self.attend_tiles(projected, packing, state)
        return out + output.bias.to(out.dtype) if fused else output(out), state

    def attend_tiles(self, projected: tiles.Projected, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        """Gated attention of projected tokens, and the state of streams."""
        summary = None if state is None else state.summary
        out, summary = tiles.attend_projected(projected, packing, self.options(packing), self.rotated_width, summary)
        if state is None or summary is None:
            return out, None
        return out, self.with_open_chunk(projected, packing, replace(state, summary=summary.to(state.summary.dtype)))

    def with_open_chunk(self, projected: tiles.Projected, packing: Packing, state: Any) -> Any:
        """The state of streams with the open chunk of these tokens, which begin with a whole chunk."""
        streams, length = packing.new.shape[0], packing.longest
        state = replace(state, position=packing.start + packing.new)
        if length % self.chunk_size == 0:
            return state
        start = length - length % self.chunk_size
        here = describe((streams, length - start), device=packing.new.device, position=packing.start + start)

        def last(x: Tensor) -> Tensor:
            return x.view(streams, length, -1)[:, start:].flatten(0, 1)

        _, v, y = last(projected.tokens).split([self.d_gate, self.d_value, self.d_qk], -1)
        _, k_quad, _, k_lin = self.rotated(F.silu(y), here, 4)
        k_lin = k_lin if projected.linear is None else last(projected.linear[1])
        (grid,) = here.grids(self.chunk_size, causal=True)
        keys, values = torch.stack([grid.keys(k_quad), grid.keys(k_lin)], 1), grid.keys(F.silu(v))
        return replace(state, keys=keys.to(state.keys.dtype), values=values.to(state.values.dtype))

    def init_own_state(self, batch_size: int) -> Any:
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, self.any_parameter)


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Set the backend that computes the attention of all GAU, FLASH and mhsa-relu2 layers of a model, or of a single layer.

    Other layers stay as they are, and so does FLASH beside GAU for "triton", which FLASH does not have. The variants of FLASH
    in `lineartime.baselines` have only one implementation. In streams of FLASH, "tiled" and "auto" apply to whole chunks, if
    they can run there and no gradient is needed; otherwise, PyTorch's operations read them, without an error. Single tokens of
    streams and streams of GAU do not follow the backend, and prefixes only "oracle".

    Args:
        module: a layer, or a module that contains layers.
        backend: "torch", "tiled" (for CPUs), "triton" (kernels for GPUs, of GAU), "oracle" (the definition, slow), or "auto",
            the fastest that can run.

    Raises:
        ArgumentError: if the backend is unknown, or none of these layers has it. A backend that cannot run here raises an error
            when the layer reads whole sequences.
    """
    check_choice("backend", backend, BACKENDS)
    layers = [layer for layer in module.modules() if isinstance(layer, Mixer) and layer.backend is not None]
    having = [layer for layer in layers if backend in layer.backends]
    if layers and not having:
        check_choice("backend", backend, layers[0].backends)
    for layer in having:
        layer.backend = backend
