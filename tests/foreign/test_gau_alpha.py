"""GAU-alpha with random weights, converted, against what the published package computed, and against its formulas.

    x = norm(word[ids] + type[types])        norm(x) = x / sqrt(mean(x^2) + eps)
    U, V, Z = split(silu(x Wi + bi))         q, k = rope(Z * wq + bq), rope(Z * wk + bk)
    A[t] = softmax over real j of (q[t].k[j] / sqrt(s) * log(n) / log(512))        n: how many are real
    x = norm(x + (U * A V) Wo + bo)          logits = x decoder^T

rope turns features 2 i and 2 i + 1 by t / 10000^(2 i / s); the order in which they come out does not change q.k.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.foreign.test_flash_pytorch import assert_agree
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.foreign.gau_alpha import from_gau_alpha

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
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
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


# Conversion --------------------------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[1] / "assets" / "gau_alpha"
"""Made by assets/make_gau_alpha.py."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True},
        {"normalization": "softmax"},
        {"normalization": "squared_relu", "attention_scale": False},
        {"layer_norm_eps": 1e-3, "num_hidden_layers": 1},
    ],
)
def test_logits_and_gradients_are_those_of_its_formulas(changes: dict[str, Any]) -> None:
    """At ragged lengths, with types of tokens."""
    config = {**CONFIG, **changes}
    weights = make_weights(config, torch.float64)
    model = from_gau_alpha(weights, config)
    ids, types = torch.randint(len(PIECES), (3, 13)), torch.randint(2, (3, 13))
    mask = torch.arange(13) < torch.tensor([13, 2, 7])[:, None]
    word = weights["gau_alpha.embeddings.word_embeddings.weight"]

    def ours(embedded: Tensor) -> Tensor:
        return model.logits(model.backbone.read(embedded, mask, token_types=types))

    def other(embedded: Tensor) -> Tensor:
        rows = {**weights, "gau_alpha.embeddings.word_embeddings.weight": embedded.flatten(0, 1)}
        places = torch.arange(ids.numel()).view_as(ids)
        return forward(rows, config, places, mask, types)

    assert_agree(ours, other, F.embedding(ids, word), mask, tolerance=1e-10)
    torch.testing.assert_close(
        model(ids, mask=mask, token_types=types)[mask], forward(weights, config, ids, mask, types)[mask], atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("name", ["published", "squared-relu"])
def test_logits_are_those_of_the_published_package(name: str) -> None:
    """Its weights and configuration as it saves them; rows of 13, 4 and 7 tokens."""
    folder = PUBLISHED / name
    weights, given = (torch.load(folder / file, weights_only=True) for file in ("pytorch_model.bin", "reference.pt"))
    mask, expected = given["mask"].bool(), given["logits"]
    with pytest.warns(UserWarning, match=r"dropout 0.1 of attention weights and 0.1 of embeddings, which ours does not have"):
        model = from_gau_alpha(weights, json.loads((folder / "config.json").read_text()))
    assert model.config.dropout == 0.1  # of the outputs of layers, as theirs
    found = model(given["ids"], mask=mask, token_types=given["types"])
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5 * float(expected[mask].abs().max()), rtol=0)


def test_logits_are_tied_where_theirs_are() -> None:
    """Whether both tensors are in the file, or the embedding alone, as in a GAUAlphaModel."""
    weights = make_weights(CONFIG)
    assert from_gau_alpha(weights, CONFIG).lm_head is not None
    weights["cls.predictions.decoder.weight"] = weights["gau_alpha.embeddings.word_embeddings.weight"].clone()
    both = from_gau_alpha(weights, CONFIG)
    assert both.lm_head is None
    del weights["cls.predictions.decoder.weight"]
    base = {name.removeprefix("gau_alpha."): tensor for name, tensor in weights.items()}
    ids = torch.randint(len(PIECES), (2, 9))
    assert torch.equal(from_gau_alpha(base, CONFIG)(ids), both(ids))


def test_a_configuration_of_another_model_is_named() -> None:
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"layer_norm_eps": 0}, "GAU-alpha describes no model of lineartime: layer_norm_eps is 0, but must be above 0"),
        ({"normalization": "none"}, "normalization is 'none', but must be one of"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but must be one of"),
        ({"num_hidden_layers": 4}, "The weights of GAU-alpha have 3 layers, but its configuration has 4"),
    ]
    weights = make_weights(CONFIG)
    for changes, message in unfit:
        with pytest.raises(LineartimeError, match=message):
            from_gau_alpha(weights, {**CONFIG, **changes})
    name = "gau_alpha.encoder.layer.1.gau.i_dense.weight"
    with pytest.raises(LineartimeError, match=rf"{name} has shape \[9, 16\], but GAU-alpha has \[72, 16\] there"):
        from_gau_alpha({**weights, name: torch.zeros(9, 16)}, CONFIG)
