"""Linformer: softmax attention to m learned summaries of the sequence, linear in its length.

Shapes: T tokens, H heads, h head width, m landmarks, R rows (one for each document), L tokens of the longest row,
M the longest sequence allowed.
Source: "Linformer: Self-Attention with Linear Complexity" (arXiv 2006.04768), with E and F shared by the heads.

    k_l = sum over j of E[l, j] k[j]        v_l = sum over j of F[l, j] v[j]        for the m landmarks l
    o[i] = sum over l of softmax over l (q[i].k_l / sqrt(h)) v_l

A sequence of fewer than M tokens uses the first T columns of E and F.
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import scaled_products
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.layers.dense import factory
from lineartime.ops.checks import check_fits, check_positive


def linformer_attention_oracle(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """The definition for one head of one document: q, k, v [T, h] and E, F [m, M] -> [T, h]. Slow."""
    keys, values = [], []
    for landmark in range(len(e)):
        keys.append(torch.stack([e[landmark, j] * k[j] for j in range(len(k))]).sum(0))
        values.append(torch.stack([f[landmark, j] * v[j] for j in range(len(v))]).sum(0))
    rows = [(torch.stack(keys) @ q[i] / q.shape[-1] ** 0.5).softmax(0) @ torch.stack(values) for i in range(len(q))]
    return torch.stack(rows)


class Linformer(MultiHeadMixer):
    """Linformer: 512 positions mixed into 128 landmarks.

    Args:
        n_landmarks: m, the number of keys and values into which the tokens of a sequence are mixed.
        max_length: M, the maximum number of tokens in a sequence; a longer one raises an error.
        **options: the options of `MultiHeadMixer`; causal=True raises an error.
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
