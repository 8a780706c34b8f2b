"""GAU-alpha with random weights, converted, against its formulas and against what the published package computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.foreign import gau_alpha as formulas
from tests.foreign.agreement import assert_agree
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.foreign.gau_alpha import from_gau_alpha

VOCABULARY = 19
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
    config = {**formulas.CONFIG, **changes}
    weights = formulas.make_weights(config, torch.float64)
    model = from_gau_alpha(weights, config)
    ids, types = torch.randint(VOCABULARY, (3, 13)), torch.randint(2, (3, 13))
    mask = torch.arange(13) < torch.tensor([13, 2, 7])[:, None]
    word = weights["gau_alpha.embeddings.word_embeddings.weight"]

    def ours(embedded: Tensor) -> Tensor:
        return model.logits(model.backbone.read(embedded, mask, token_types=types))

    def other(embedded: Tensor) -> Tensor:
        rows = {**weights, "gau_alpha.embeddings.word_embeddings.weight": embedded.flatten(0, 1)}
        places = torch.arange(ids.numel()).view_as(ids)
        return formulas.forward(rows, config, places, mask, types)

    assert_agree(ours, other, F.embedding(ids, word), mask, tolerance=1e-10)
    torch.testing.assert_close(
        model(ids, mask=mask, token_types=types)[mask],
        formulas.forward(weights, config, ids, mask, types)[mask],
        atol=1e-10,
        rtol=1e-10,
    )


@pytest.mark.parametrize("name", ["published", "squared-relu"])
def test_logits_are_those_of_the_published_package(name: str) -> None:
    """Its weights and configuration as it saves them; rows of 13, 4 and 7 tokens."""
    folder = PUBLISHED / name
    weights, given = (torch.load(folder / file, weights_only=True) for file in ("pytorch_model.bin", "reference.pt"))
    mask, expected = given["mask"].bool(), given["logits"]
    found = from_gau_alpha(weights, json.loads((folder / "config.json").read_text()))(
        given["ids"], mask=mask, token_types=given["types"]
    )
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5 * float(expected[mask].abs().max()), rtol=0)


def test_logits_are_tied_where_theirs_are() -> None:
    """Whether both tensors are in the file, or the embedding alone, as in a GAUAlphaModel."""
    weights = formulas.make_weights(formulas.CONFIG)
    assert from_gau_alpha(weights, formulas.CONFIG).lm_head is not None
    weights["cls.predictions.decoder.weight"] = weights["gau_alpha.embeddings.word_embeddings.weight"].clone()
    both = from_gau_alpha(weights, formulas.CONFIG)
    assert both.lm_head is None
    del weights["cls.predictions.decoder.weight"]
    base = {name.removeprefix("gau_alpha."): tensor for name, tensor in weights.items()}
    ids = torch.randint(VOCABULARY, (2, 9))
    assert torch.equal(from_gau_alpha(base, formulas.CONFIG)(ids), both(ids))


def test_a_configuration_of_another_model_is_named() -> None:
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"layer_norm_eps": 0}, "GAU-alpha describes no model of lineartime: layer_norm_eps is 0, but must be above 0"),
        ({"normalization": "none"}, "normalization is 'none', but must be one of"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but must be one of"),
    ]
    weights = formulas.make_weights(formulas.CONFIG)
    for changes, message in unfit:
        with pytest.raises(LineartimeError, match=message):
            from_gau_alpha(weights, {**formulas.CONFIG, **changes})
    name = "gau_alpha.encoder.layer.1.gau.i_dense.weight"
    with pytest.raises(LineartimeError, match=rf"{name} has shape \[9, 16\], but GAU-alpha has \[72, 16\] there"):
        from_gau_alpha({**weights, name: torch.zeros(9, 16)}, formulas.CONFIG)
