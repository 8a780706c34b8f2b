"""FLASH of MossFormer, for speech: attention of two gates with convolutions, as in modelscope, FunASR and clearvoice.

    x' = x with the first half of its features from the frame before
    v, u    = halves of convolved(x'; d -> 4 d)                     convolved(x) = h + depthwise convolution of h over 17 frames
    queries and keys = rope(convolved(x'; d -> s) gamma_i + beta_i)            h = silu(norm(x) W + b)
    av, au  = mixed chunk attention of v, and of u                  relu^2(q.k / C) inside chunks; sums over chunks are divided
    y = x + convolved((au * v) * sigmoid(av * u); 2 d -> d)           by the number of frames, or by C if causal

Their norm is g x / max(rms(x), 1e-5). Rotary positions turn 32 of the s features.

Shapes: B rows, T frames, N real frames, D documents, d model width, s query/key width, C chunk size.
Source: "MossFormer" (arXiv 2302.11824); modelscope 1.40.2, FunASR 1.4.16 and clearvoice 0.1.2, whose copies are one function.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack, override

from lineartime.errors import ArgumentError, LineartimeError, check_choice
from lineartime.foreign.weights import StateDict, interleaved_order
from lineartime.layers.dense import Dense, FactoryOptions, factory, reset_parts
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.residual import LayerNorm, Norm, ScaleNorm, build_norm
from lineartime.models.backbone import ModelState
from lineartime.ops.checks import check_even, check_positive
from lineartime.ops.mixed_chunk import MixedChunkOptions, MixedChunkState, Scales, attend, mixed_chunk_state, reciprocal
from lineartime.ops.modes import acc_dtype, autocast_dtype, is_exporting, is_traced
from lineartime.ops.packing import Packing
from lineartime.ops.state import State

Convolution = Literal["same", "causal"]
FRAMES = 17
"""The frames that a convolution reads: as many before a frame as behind it or, if it is causal, all before it."""


class ClampedNorm(ScaleNorm):
    """g x / max(rms(x), 1e-5) with one learned scalar g: [..., d] -> [..., d]."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(acc_dtype(x))
        rms: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        return (wide * (self.g / rms.clamp(min=self.eps))).to(x.dtype)


class ConvolvedDense(nn.Module):
    """h + depthwise convolution of h, with h = silu(norm(x) W + b): [N, d_in] -> [N, d_out]."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        norm: Norm,
        eps: float,
        convolution: Convolution,
        dropout: float,
        **made: Unpack[FactoryOptions],
    ) -> None:
        super().__init__()
        self.norm = ClampedNorm(eps, **made) if norm == "scalenorm" else build_norm(norm, d_in, eps, **made)
        self.dense = Dense(d_in, d_out, **made)
        self.taps = nn.Parameter(torch.empty(d_out, 1, FRAMES, **made))
        self.before = FRAMES - 1 if convolution == "causal" else FRAMES // 2
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `Dense` and `nn.Conv1d` do."""
        reset_parts(self)
        nn.init.uniform_(self.taps, -(FRAMES**-0.5), FRAMES**-0.5)

    def forward(self, x: Tensor, packing: Packing, recent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Also maps what streams keep, the last h of each [D, 16, d_out], to that after these frames."""
        h = F.silu(self.dense(self.norm(x)), inplace=not torch.is_grad_enabled())
        if recent is None:
            out = packing.by_row(lambda rows, _: self.convolve(rows, self.before)[:, : rows.shape[1]], h)
            out = h + out if is_exporting() else out
        else:
            known = torch.cat([recent.to(h.dtype), packing.to_rows(h)], 1)
            out = packing.tokens(self.convolve(known, 0))
            last = packing.new[:, None, None] + torch.arange(recent.shape[1], device=h.device)[:, None]
            recent = known.gather(1, last.expand_as(recent)).to(recent.dtype)
        return self.dropout(out), recent

    def convolve(self, rows: Tensor, padding: int) -> Tensor:
        """Add their convolution to rows [R, L, d_out], with as many zeros before as behind: [R, L + 2 padding - 16, d_out].

        On a CPU, PyTorch takes a fraction of the time of `conv1d` for images of one line whose features stand last. But of few
        features in bf16, it never returns.
        """
        rows, groups = rows.transpose(1, 2), rows.shape[-1]
        if is_exporting():  # without h, whose sum is made of new memory: programs of any length need to know its strides
            return F.conv1d(rows.contiguous(), self.taps, padding=padding, groups=groups).transpose(1, 2)
        taps = self.taps + F.pad(self.taps.new_ones(1), (self.before, FRAMES - 1 - self.before))
        if (autocast_dtype(rows) or rows.dtype) not in (torch.float32, torch.float64):
            return F.conv1d(rows.contiguous(), taps.to(rows.dtype), padding=padding, groups=groups).transpose(1, 2)
        out = F.conv2d(rows[:, :, None], taps[:, :, None].to(rows.dtype), padding=(0, padding), groups=groups)
        return out[:, :, 0].transpose(1, 2)


@dataclass(eq=False)
class MossFormerState(State):
    """What streams of a `MossFormerFLASH` remember; its size does not depend on the number of frames read.

    Attributes:
        attention: the state of the attention to v and u.
        hidden, qk, out: [B, 16, ...], what the three convolutions read of the last frames.
    """

    attention: MixedChunkState
    hidden: Tensor
    qk: Tensor
    out: Tensor

    @property
    def position(self) -> Tensor:
        """int64 [B], the number of frames that each stream has read."""
        return self.attention.position


class MossFormerFLASH(Mixer):
    """The FLASH of MossFormer, from shift to residual: [B, T, d] -> [B, T, d]. A mask is honoured, unlike in most of theirs.

    Args:
        d_qk: s, the width of queries and keys, an even number.
        chunk_size: C, their `group_size`.
        rotary_width: how many features of queries and keys are rotated, half of them in each half of s; 0 for none.
        convolution: "same", theirs, reads 8 frames ahead also in a layer with causal attention, which then cannot stream.
            "causal" reads the 16 frames before.
        **options: the options of `Mixer`; token_shift is True by default, and norm "scalenorm". dropout also applies to v, u,
            queries and keys; theirs drops attention weights, too.

    Raises:
        ArgumentError: if an argument has a value that is not allowed.
    """

    name = "mossformer"
    any_positions = True

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int = 128,
        chunk_size: int = 256,
        rotary_width: int = 32,
        convolution: Convolution = "same",
        **options: Unpack[MixerOptions],
    ) -> None:
        options = {"token_shift": True, "norm": "scalenorm", **options}
        super().__init__(d_model, **options)
        check_positive(d_qk=d_qk, chunk_size=chunk_size)
        check_even("queries and keys consist of pairs of features", d_qk=d_qk)
        check_choice("convolution", convolution, get_args(Convolution))
        if rotary_width % 2 or not 0 <= rotary_width <= d_qk:
            raise ArgumentError("rotary_width", f"is {rotary_width}, but must be an even number from 0 to d_qk = {d_qk}.")
        self.norm = nn.Identity()  # each projection has its own, after the shift
        self.d_qk, self.chunk_size, self.convolution = d_qk, chunk_size, convolution
        self.rotary_width = self.rotated_width = rotary_width
        made: Any = (options["norm"], options.get("norm_eps", 1e-5), convolution, self.dropout.p)
        self.to_hidden = ConvolvedDense(d_model, 4 * d_model, *made, **factory(options))
        self.to_qk = ConvolvedDense(d_model, d_qk, *made, **factory(options))
        self.to_out = ConvolvedDense(2 * d_model, d_model, *made, **factory(options))
        self.gamma, self.beta = (nn.Parameter(torch.empty(4, d_qk, **factory(options))) for _ in range(2))
        self.init_own()

    def init_own(self) -> None:
        """Initialise gamma and beta, as theirs."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)

    @override
    def check_causal(self) -> None:
        super().check_causal()
        if self.convolution == "same":
            found = 'is "same", so that MossFormerFLASH cannot stream: its convolutions read 16 frames ahead'
            raise ArgumentError("convolution", f'{found}. Train one that is built with convolution="causal".')

    @override
    def read(self, x: Tensor, packing: Packing, state: MossFormerState | None = None) -> tuple[Tensor, Any]:
        if not is_traced() and packing.count == 0:  # PyTorch convolves no rows of nothing
            return x, state
        kept: Any = (None,) * 4 if state is None else (state.attention, state.hidden, state.qk, state.out)
        attention, of_hidden, of_qk, of_out = kept
        hidden, of_hidden = self.to_hidden(x, packing, of_hidden)
        z, of_qk = self.to_qk(x, packing, of_qk)
        maps = torch.addcmul(self.beta, z[:, None], self.gamma)
        maps = packing.rotate(maps, self.rotated_width) if self.rotated_width else maps
        q_quad, k_quad, q_lin, k_lin = maps.unbind(1)
        attended, after = attend(q_quad, k_quad, q_lin, k_lin, hidden, packing, self.options(), attention)
        (v, u), (of_v, of_u) = hidden.chunk(2, -1), attended.chunk(2, -1)
        out, of_out = self.to_out(of_u * v * (of_v * u).sigmoid_(), packing, of_out)
        kept = after, of_hidden, of_qk, of_out
        return out, None if state is None else MossFormerState(*kept)

    def options(self) -> MixedChunkOptions:
        """The options of its attention."""
        before = (lambda n: torch.full_like(n, 1 / self.chunk_size)) if self.causal else reciprocal
        return MixedChunkOptions(self.chunk_size, self.causal, Scales(1 / self.chunk_size, torch.ones_like, before))

    @override
    def init_own_state(self, batch_size: int) -> MossFormerState:
        like, projections = self.any_parameter, (self.to_hidden, self.to_qk, self.to_out)
        recent = (like.new_zeros(batch_size, FRAMES - 1, each.dense.out_features) for each in projections)
        attention = mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, 4 * self.d_model, like)
        return MossFormerState(attention, *recent)


class MossFormerStack(nn.Module):
    """Layers of MossFormer one after the other, [B, T, d] -> [B, T, d], as their MossformerBlock and MossFormerModule."""

    def __init__(self, layers: Iterable[MossFormerFLASH]) -> None:
        super().__init__()
        self.layers: Sequence[MossFormerFLASH] = nn.ModuleList(layers)  # type: ignore[assignment]  # as in Backbone

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Process whole sequences; the mask, [B, T], is True for real frames."""
        if not self.layers:
            return x
        packing = self.layers[0].describe(x.shape, mask, device=x.device)
        frames = packing.pack(x)
        for layer in self.layers:
            frames = layer(frames, packing=packing)
        return packing.unpack(frames)

    def extend(self, x: Tensor, state: ModelState | None = None, mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Continue streams by any number of frames, or begin them without a state, as `Mixer.extend` does."""
        states = [None] * len(self.layers) if state is None else list(state.blocks)
        for place, layer in enumerate(self.layers):
            x, states[place] = layer.extend(x, states[place], mask)
        return x, ModelState(tuple(states))


_PACKAGE = "MossFormer's FLASH"
_MAPS = [0, 2, 1, 3]
"""The indices of our queries and keys among theirs: quad_q, lin_q, quad_k, lin_k."""
_NAMES = {"norm": "mdl.0", "dense": "mdl.1", "taps": "mdl.3.sequential.1.conv.weight"}
"""Their names of the parts of a projection."""
_GAN = "The MossFormer of mossformer_gan_se is not FLASH: it has no chunks, and attends across rows, too. It has no layer here."


def from_mossformer(weights: Mapping[str, Tensor], **options: Any) -> MossFormerFLASH | MossFormerStack:
    """Build the layer, or stack of layers, of a state dict of MossFormer, in evaluation mode.

    Args:
        weights: the state dict of a FLASH_ShareA_FFConvM or MossFormerBlock, or of a stack of them, a MossformerBlock or
            MossFormerModule.
        **options: options of `MossFormerFLASH` that the weights do not contain: `causal`, `chunk_size` (their group_size) and
            `token_shift` (their shift_tokens) must be those that it was built with, and are theirs by default.

    Raises:
        ArgumentError: for options that the layer refuses.
        LineartimeError: for weights of anything else: of a MossFormer2, which has other layers between these, or of
            mossformer_gan_se.
    """
    state = StateDict(weights, _PACKAGE)
    if any(part in name for name in state for part in ("intra_mossformer.", "inter_mossformer.")):
        raise LineartimeError(_GAN)
    depth = state.count(r"layers\.(\d+)\.")
    if not depth and "qk_offset_scale.gamma" not in state:
        what = "The weights lack qk_offset_scale.gamma and layers.0: give those of a layer or a stack of layers of MossFormer"
        raise LineartimeError(f"{what}, or call replace_mossformer(model) for the layers inside a model.")
    built = [_layer(state, prefix, options) for prefix in [f"layers.{place}." for place in range(depth)] or [""]]
    state.finish()
    if not depth and isinstance(built[0].to_qk.norm, LayerNorm) and built[0].d_qk == 2 * built[0].d_model:
        what = "The weights may be those of another layer, which look the same: call replace_mossformer(model), which tells"
        raise LineartimeError(f"{what} them apart. {_GAN}")
    return (MossFormerStack(built) if depth else built[0]).eval()


def replace_mossformer(model: nn.Module) -> int:
    """Put our layers in the place of all FLASHes of MossFormer inside a model of theirs; returns how many.

    Dropout and mode stay, but attention weights are not dropped any more.

    Raises:
        LineartimeError: for a model without one, or one of mossformer_gan_se.
    """
    found: list[tuple[str, Any]] = [(name, part) for name, part in model.named_modules() if hasattr(part, "qk_offset_scale")]
    if any(type(part).__name__ == "MossFormer" for _, part in found):
        raise LineartimeError(_GAN)
    if not found or not found[0][0]:
        what = "has no FLASH of MossFormer among its parts: give a model of modelscope, FunASR or clearvoice."
        raise ArgumentError("model", what)
    layers = []
    for _, part in found:
        options = {"causal": part.causal, "chunk_size": part.group_size, "token_shift": part.shift_tokens}
        state = StateDict(part.state_dict(), _PACKAGE)
        layers.append(_layer(state, "", {**options, "dropout": part.dropout.p}).train(part.training))
        state.finish()
    for (name, _), layer in zip(found, layers, strict=True):
        model.set_submodule(name, layer)
    return len(layers)


def _layer(state: StateDict, prefix: str, options: Mapping[str, Any]) -> MossFormerFLASH:
    """The layer whose weights have names that begin with `prefix`; they are taken."""
    d_qk, d_model = state.matrix(f"{prefix}to_qk.mdl.1.weight")
    rotated = 2 * state.pop(f"{prefix}rotary_pos_emb.freqs", torch.empty(0)).numel()  # their values are always the same
    norm: Norm = "scalenorm" if f"{prefix}to_qk.mdl.0.g" in state else "layernorm"
    layer = MossFormerFLASH(d_model, d_qk=d_qk, rotary_width=rotated, norm=norm, **options)
    order, own = interleaved_order(d_qk, rotated), {}
    for name, like in layer.state_dict().items():
        if name in ("gamma", "beta"):
            own[name] = state.take(f"{prefix}qk_offset_scale.{name}", *like.shape)[_MAPS][:, order]
            continue
        tensor = state.take(prefix + ".".join(_NAMES.get(part, part) for part in name.split(".")), *like.shape)
        own[name] = tensor[order] if name.startswith("to_qk.") and "norm" not in name else tensor
    layer.to(own["gamma"]).load_state_dict(own)
    return layer
