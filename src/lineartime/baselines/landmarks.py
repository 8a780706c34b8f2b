"""Softmax attention to m landmarks that stand for the whole sequence, linear in its length.

    linformer:      k_l = sum over j of E[l, j] k[j]        v_l = sum over j of F[l, j] v[j]        for the m landmarks l
                    o[i] = sum over l of softmax over l (q[i].k_l / sqrt(h)) v_l

    A sequence of fewer than M tokens uses the first T columns of E and F, which the heads share.

    nystromformer:  landmark l of q and k: the mean of tokens floor(l T / m) up to floor((l + 1) T / m)
                    F = softmax(q k_l^T / sqrt(h))    A = softmax(q_l k_l^T / sqrt(h))    B = softmax(q_l k^T / sqrt(h))
                    out = F A+ (B v) + convolution(v)        convolution: along the tokens, head by head

    A+ is a pseudo-inverse, by 6 iterations. If there are at least as many landmarks as tokens, softmax(q k^T / sqrt(h)) is
    computed instead, which F A+ B would equal.

Shapes: R rows (one for each document), H heads, L tokens of the longest row, T tokens of a row, h head width, m landmarks,
M the longest sequence allowed, w width of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import masked_products, real_tokens, scaled_products
from lineartime.errors import ArgumentError
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.layers.dense import factory
from lineartime.ops.checks import check_fits, check_positive

ITERATIONS = 6


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return masked_products(q, k, real[:, None, None]).softmax(-1).to(v.dtype) @ v


def _landmarks(x: Tensor, real: Tensor, n_landmarks: int) -> Tensor:
    """The means of segments of a row's tokens, [R, H, L, h] -> [R, H, m, h], in the dtype of x; zero for an empty segment."""
    tokens = torch.arange(1, x.shape[-2] + 1, device=x.device)
    segment = (tokens * n_landmarks - 1) // real.sum(-1, keepdim=True).clamp(min=1)  # [R or 1, L]
    member = (segment[:, None] == torch.arange(n_landmarks, device=x.device)[:, None]) & real[:, None]  # [R or 1, m, L]
    count = member.sum(-1, keepdim=True).clamp(min=1)
    means: Tensor = (member.to(x.dtype) / count)[:, None] @ x
    return means


def pseudo_inverse(a: Tensor) -> Tensor:
    """Approximate the pseudo-inverse of nonnegative matrices [..., m, m] by a fixed number of iterations."""
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.mT / (a.sum(-2).amax(-1) * a.sum(-1).amax(-1))[..., None, None]
    for _ in range(ITERATIONS):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


class Linformer(MultiHeadMixer):
    """Linformer: 512 positions mixed into 128 landmarks.

    Args:
        n_landmarks: m, the number of keys and values into which the tokens of a sequence are mixed.
        max_length: M, the maximum number of tokens in a sequence; a longer one raises an error.
        **options: the options of `MultiHeadMixer`; causal=True raises an error.

    Source: "Linformer: Self-Attention with Linear Complexity" (arXiv 2006.04768), with E and F shared by the heads.
    """

    name = "linformer"
    maps = ("mix_keys", "mix_values")
    why_not_causal = "every landmark mixes all positions, so that each compressed key would contain the future"

    def __init__(self, d_model: int, *, n_landmarks: int = 128, max_length: int = 512, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(n_landmarks=n_landmarks, max_length=max_length)
        self.n_landmarks = n_landmarks
        self.max_length = max_length
        self.mix_keys = nn.Parameter(torch.empty(n_landmarks, max_length, **factory(options)))
        self.mix_values = nn.Parameter(torch.empty(n_landmarks, max_length, **factory(options)))
        self.init_own()

    def init_own(self) -> None:
        # A landmark is a sum of up to M tokens. With this standard deviation, it is about as large as one token.
        for mix in (self.mix_keys, self.mix_values):
            nn.init.normal_(mix, std=self.max_length**-0.5)

    @property
    def longest_sequence(self) -> int:
        return self.max_length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend to landmarks: q, k, v [R, H, L, h] -> [R, H, L, h]; padding is zero and adds nothing to them."""
        length = k.shape[-2]
        check_fits("Linformer", length, self.max_length)
        keys = self.mix_keys[:, :length].to(k.dtype) @ k  # [R, H, m, h]
        values = self.mix_values[:, :length].to(v.dtype) @ v
        return scaled_products(q, keys).softmax(-1).to(v.dtype) @ values


class Nystromformer(MultiHeadMixer):
    """Nyströmformer: softmax attention approximated with 64 landmarks.

    Args:
        n_landmarks: m, the number of segments, whose means are the landmarks.
        convolution: w, the width in tokens of the convolution of the values; odd, or 0 for no convolution.
        **options: the options of `MultiHeadMixer`; causal=True raises an error.

    Source: "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention" (arXiv 2102.03902).
    """

    name = "nystromformer"
    tables = ("kernel",)
    why_not_causal = "its landmarks are means of segments of the whole sequence, so that each would contain the future"

    def __init__(self, d_model: int, *, n_landmarks: int = 64, convolution: int = 33, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(n_landmarks=n_landmarks)
        if not isinstance(convolution, int) or (convolution != 0 and (convolution < 0 or convolution % 2 == 0)):
            raise ArgumentError("convolution", f"is {convolution!r}, but must be an odd number, or 0 for no convolution.")
        self.n_landmarks = n_landmarks
        self.convolution = convolution
        self.kernel = nn.Parameter(torch.empty(self.n_heads, convolution, **factory(options)))
        self.init_own()

    def init_own(self) -> None:
        nn.init.normal_(self.kernel, std=0.02)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        out = self._attend_to_landmarks(q, k, v, real)
        if not self.convolution or not v.shape[2]:  # PyTorch cannot convolve an empty sequence
            return out
        kernel = self.kernel[:, None, :, None].to(v.dtype)
        # Values are zero at padding, which is at the end of a row, so it acts like the zeros beyond the row.
        return out + F.conv2d(v, kernel, padding=(self.convolution // 2, 0), groups=self.n_heads)

    def _attend_to_landmarks(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        length, n_landmarks, here = q.shape[-2], self.n_landmarks, real_tokens(q, real)
        if length <= n_landmarks:
            return _softmax_attention(q, k, v, here)
        q_l, k_l = (_landmarks(x, here, n_landmarks) for x in (q, k))
        between = pseudo_inverse(scaled_products(q_l, k_l).softmax(-1)).to(v.dtype)
        summaries = between @ _softmax_attention(q_l, k, v, here)
        approximate = scaled_products(q, k_l).softmax(-1).to(v.dtype) @ summaries
        if real is None:
            return approximate
        q, k, v = (x[..., :n_landmarks, :] for x in (q, k, v))  # all tokens of rows with at most n_landmarks tokens
        exact = F.pad(_softmax_attention(q, k, v, here[:, :n_landmarks]), (0, 0, 0, length - n_landmarks))
        return torch.where((real.sum(-1) <= n_landmarks)[:, None, None, None], exact, approximate)
