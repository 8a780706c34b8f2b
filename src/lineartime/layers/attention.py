"""Multi-head attention: the base of all such layers, and softmax attention, the baseline for GAU and FLASH.

Shapes: N tokens, H heads, h = d / H head width, d model width, R rows (one for each document or stream), L tokens of the
longest row.

    q, k, v = rope(x Wq + bq), rope(x Wk + bk), x Wv + bv, cut into H heads        x = norm(input)
    with qk_norm, q and k are rope(rmsnorm(.)) of each head instead
    o[t] = sum over visible j of softmax over j (q[t].k[j] / sqrt(h)) v[j]
    out = input + (o of all heads) Wo + bo
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import Unpack

from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.residual import RMSNorm
from lineartime.ops.checks import check_n_heads
from lineartime.ops.modes import common_dtype, matmul_dtype, output_dtype, under_transform, without_autocast
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache

MANY_KEYS = 2048
"""From this number of keys on, two products are faster than fused attention for one query in bf16 on a CPU."""


class HeadOptions(MixerOptions, total=False):
    """What every multi-head attention takes: see `MultiHeadMixer`."""

    n_heads: int
    rope: bool


class MultiHeadMixer(Mixer):
    """Multi-head attention around an `attend` that a subclass supplies: [B, T, d] -> [B, T, d].

    `attend` receives every document as a separate row, with its real tokens first.

    Args:
        n_heads: H, which must divide d.
        rope: whether to apply rotary positions to queries and keys.
        **options: the options of `Mixer`.
    """

    n_maps: ClassVar[int] = 3
    """The number of input projections: 3 for queries, keys and values; 2 if queries and keys are the same."""

    def __init__(self, d_model: int, *, n_heads: int = 12, rope: bool = True, **options: Unpack[MixerOptions]) -> None:
        super().__init__(d_model, **options)
        check_n_heads(n_heads, {"d_model": d_model}, in_pairs=rope)
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.rope = rope
        self.rotated_width = self.head_dim if rope else 0
        self.to_qkv = Dense(d_model, *[d_model] * self.n_maps, **factory(options))
        self.to_output = Dense(d_model, d_model, **factory(options))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend: queries, keys and values [R, H, L, h] -> [R, H, L, h], all of the same dtype and with autocast off.

        `real`, bool [R, L], is False for the padding at the end of shorter rows, where the inputs are zeros. It is None if
        there is no padding.
        """
        raise NotImplementedError

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: Any, packing: Packing) -> tuple[Tensor, Any]:
        """Do the same for more tokens of streams, [R, H, L, h], and return the new state; `state` may be overwritten."""
        raise NotImplementedError

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        attended, state = self.attend_heads(self.project(x, packing), packing, state)
        return self.combine(x, attended), state

    def attend_heads(self, maps: tuple[Tensor, Tensor, Tensor], packing: Packing, state: Any) -> tuple[Tensor, Any]:
        """Attend with queries, keys and values [N, H, h]: the outputs of all heads, [N, d], and the state of streams."""
        compute = self.compute_dtype(*maps)
        dtype = output_dtype(maps[-1], compute)
        with without_autocast(maps[-1]):
            q, k, v = (heads.to(compute) for heads in maps)
            if state is None:
                out = packing.by_row(partial(_in_rows, self.attend), q, k, v)
                if packing.prefix is not None:
                    out = _with_prefix(out, q, k, v, packing)
            else:
                q, k, v = (packing.to_rows(heads).transpose(1, 2) for heads in (q, k, v))
                attended, state = self.attend_next(q, k, v, state, packing)
                out = packing.tokens(attended.transpose(1, 2))
        return out.flatten(1).to(dtype), state

    def combine(self, normed: Tensor, attended: Tensor) -> Tensor:
        """Apply the output projection: normed tokens and the attention's output, [N, d] each -> [N, d]."""
        out: Tensor = self.to_output(attended)
        return out

    def compute_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
        """The dtype of the inputs of `attend`."""
        return matmul_dtype(q, k, v)

    def project(self, x: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """Project normed tokens [N, d] to queries, keys and values [N, H, h]."""
        maps = [part.unflatten(1, (self.n_heads, -1)) for part in self.to_qkv(x).chunk(self.n_maps, dim=1)]
        q, k = self.rotate(maps[0], maps[-2], packing)
        return q, k, maps[-1]

    def rotate(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys [N, H, h] by their positions, if the layer uses rotary positions."""
        return (packing.rotate(q), packing.rotate(k)) if self.rope else (q, k)

    def empty_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Keys or values of zero tokens, [B, H, 0, h]."""
        like = self.any_parameter
        return torch.zeros(batch_size, self.n_heads, 0, self.head_dim, dtype=dtype or like.dtype, device=like.device)

    def init_own_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams: by default, a cache of keys and values."""
        empty = self.empty_cache(batch_size)
        return KVCache(self.first_position(batch_size), empty, empty)


class AttentionOptions(HeadOptions, total=False):
    """What `Attention` takes."""

    qk_norm: bool


class Attention(MultiHeadMixer):
    """Softmax multi-head self-attention.

    The layer includes a pre-norm and a residual connection: [B, T, d] -> [B, T, d].

    Args:
        qk_norm: whether the queries and keys of each head pass through an `RMSNorm` before they are rotated (arXiv 2010.04245).
        **options: the options of `MultiHeadMixer`.

    Source: "Attention Is All You Need" (arXiv 1706.03762), with rotary positions (arXiv 2104.09864).
    """

    name = "attention"
    reads_prefix = True
    any_positions = True

    def __init__(self, d_model: int, *, qk_norm: bool = False, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        self.qk_norm = qk_norm
        self.q_norm: nn.Module = RMSNorm(self.head_dim, **factory(options)) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(self.head_dim, **factory(options)) if qk_norm else nn.Identity()

    def rotate(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, if the layer does so, and rotate them by their positions."""
        return super().rotate(self.q_norm(q), self.k_norm(k), packing)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Softmax attention: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        return _attend(q, k, v, real, self.causal)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, packing: Packing) -> tuple[Tensor, KVCache]:
        state, keys, values, visible = append(state, k, v, packing)
        q = q.to(keys.dtype)
        if q.shape[2] == 1:
            return _attend_last(q, keys, values, None if packing.even and packing.common_start is not None else visible), state
        return _softmax_attention(q, keys, values, visible), state

    def compute_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
        """The dtype of autocast or of the values, float16 included: this softmax computes its scores in float32."""
        return common_dtype(v)


def _in_rows(form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
    """A form of `attend` for rows whose heads come after their tokens, [R, L, H, h]."""
    return form(*(x.transpose(1, 2) for x in (q, k, v)), real).transpose(1, 2)


def _with_prefix(causal: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """The outputs [N, H, h] of causal attention, and in prefixes those of a bidirectional one to the prefix."""
    assert packing.prefix is not None
    prefix = packing.prefix[packing.document] if packing.sharing == 1 else packing.prefix[:, None]
    marks = (packing.position < prefix).flatten()[:, None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, inside: Tensor, real: Tensor | None) -> Tensor:
        return _in_rows(partial(_attend, causal=False), q, k, v, inside[..., 0, 0])

    return torch.where(marks, packing.by_row(attend, *(x.masked_fill(~marks, 0) for x in (q, k, v)), marks), causal)


def append(state: KVCache, k: Tensor, v: Tensor, packing: Packing) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    """`KVCache.append` of [R, H, L, h], with which keys each new token sees, bool [L, K] or [R, 1, L, K]."""
    state, keys, values, last = state.append(k, v, packing)
    visible = torch.arange(keys.shape[2], device=k.device) <= last[..., None]
    return state, keys, values, visible if visible.dim() == 2 else visible[:, None]


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """[B, T, f] -> [B, H, T, f / H]."""
    return x.view(*x.shape[:-1], n_heads, x.shape[-1] // n_heads).transpose(1, 2)  # torch.compile rejects unflatten in a step


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, h] -> [B, T, H * h]."""
    return x.transpose(1, 2).flatten(2)


def _attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, causal: bool) -> Tensor:
    visible: Tensor | None = None  # causal needs no mask: padding comes after the real tokens
    if real is not None and not causal:
        # A softmax over no keys is NaN, so a row without real tokens attends to its padding, which is zero.
        visible = (real | ~real.any(1, keepdim=True))[:, None, None, :]
    return _softmax_attention(q, k, v, visible, causal)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool = False) -> Tensor:
    # PyTorch's fused softmax attention has no forward-mode derivative; its math backend has one.
    with sdpa_kernel(SDPBackend.MATH) if under_transform() else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)


def _attend_last(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attend from the last token to all, or to the `visible` ones: q [B, H, 1, h], k, v [B, H, T, h] -> [B, H, 1, h].

    In bf16 on a CPU, PyTorch's fused softmax attention takes several times as long for one query as two products.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or k.shape[2] < MANY_KEYS or q.shape[0] == 0:
        return _softmax_attention(q, k, v, visible)
    scores = _product(q, k.mT).float() * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return _product(scores.softmax(-1).to(v.dtype), v)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """The products of matrices, one by one: [B, H, 1, n], [B, H, n, m] -> [B, H, 1, m].

    A batched product in bf16 would copy the part of a cache that is in use.
    """
    products = [a @ b for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)]
    stacked: Tensor = torch.stack(products).unflatten(0, x.shape[:2])
    return stacked
