"""A GAU-alpha of a few weights, and its formulas, written one by one.

    x = norm(word[ids] + type[types])        norm(x) = x / sqrt(mean(x^2) + eps)
    U, V, Z = split(silu(x Wi + bi))         q, k = rope(Z * wq + bq), rope(Z * wk + bk)
    A[t] = softmax over real j of (q[t].k[j] / sqrt(s) * log(n) / log(512))        n: how many are real
    x = norm(x + (U * A V) Wo + bo)          logits = x decoder^T

rope turns features 2 i and 2 i + 1 by t / 10000^(2 i / s); the order in which they come out does not change q.k.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##a", "##b", "天", "地", "人", "。"]
CONFIG: dict[str, Any] = {
    "model_type": "gau_alpha",
    "vocab_size": len(PIECES),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "attention_key_size": 8,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "use_bias": False,
}


def make_weights(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights in the layout of a GAUAlphaForMaskedLM."""
    d, e, s = config["hidden_size"], config["intermediate_size"], config["attention_key_size"]
    shapes = {
        "gau_alpha.embeddings.word_embeddings.weight": (config["vocab_size"], d),
        "gau_alpha.embeddings.token_type_embeddings.weight": (config["type_vocab_size"], d),
        "cls.predictions.decoder.weight": (config["vocab_size"], d),
    }
    for layer in range(config["num_hidden_layers"]):
        own = {"i_dense": (2 * e + s, d), "o_dense": (d, e), "q_scaleoffset": (s,), "k_scaleoffset": (s,)}
        for name, shape in own.items():
            shapes[f"gau_alpha.encoder.layer.{layer}.gau.{name}.weight"] = shape
            if config["use_bias"]:
                shapes[f"gau_alpha.encoder.layer.{layer}.gau.{name}.bias"] = shape[:1]
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
    """The logits [B, T, V] by the formulas above."""
    e, s = config["intermediate_size"], config["attention_key_size"]
    word = weights["gau_alpha.embeddings.word_embeddings.weight"]

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config["layer_norm_eps"]).sqrt()

    def affine(x: Tensor, name: str) -> Tensor:
        out = F.linear(x, weights[f"{name}.weight"]) if name.endswith("dense") else x * weights[f"{name}.weight"]
        return out + weights.get(f"{name}.bias", 0.0)

    def rope(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for i in range(s // 2):
            angles = torch.arange(x.shape[1], dtype=x.dtype) / 10000 ** (2 * i / s)
            one, two = x[..., 2 * i], x[..., 2 * i + 1]
            out[..., 2 * i] = one * angles.cos() - two * angles.sin()
            out[..., 2 * i + 1] = one * angles.sin() + two * angles.cos()
        return out

    def attention(scores: Tensor) -> Tensor:
        real = mask[:, None].expand_as(scores)
        count = real.sum(-1, keepdim=True)
        kind = config.get("normalization", "softmax_plus")
        if config.get("attention_scale", True):
            scores = scores / s**0.5
        if kind == "squared_relu":
            return scores.relu().square() * real / count
        if kind == "softmax_plus":
            scores = scores * count.to(scores).log() / torch.tensor(512.0).to(scores).log()
        return scores.masked_fill(~real, -torch.inf).softmax(-1)

    x = norm(word[ids] + weights["gau_alpha.embeddings.token_type_embeddings.weight"][types])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"gau_alpha.encoder.layer.{layer}.gau."
        u, v, z = F.silu(affine(x, f"{prefix}i_dense")).split([e, e, s], -1)
        q, k = (rope(affine(z, f"{prefix}{name}_scaleoffset")) for name in ("q", "k"))
        x = norm(x + affine(u * (attention(q @ k.mT) @ v), f"{prefix}o_dense"))
    return x @ weights.get("cls.predictions.decoder.weight", word).T


def write_folder(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """A folder as it is published, with a pickled file of weights; returns the weights."""
    config = {**CONFIG, **changes}
    weights = make_weights(config)
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    return weights
