"""What `inspect` finds is what the model does."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import noisy
from torch import Tensor

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.inspection import draw, inspect, open_attention
from lineartime.layers import FLASH, GAU, FLASHMesa
from lineartime.layers.attention import Attention

TEXT = "for each line in text:\n    print(line)\n"
BYTES = ByteTokenizer()
SHORT = {"d_qk": 8, "chunk_size": 8}


@pytest.mark.parametrize(("causal", "prefix"), [(False, None), (True, None), (True, 13)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FLASH, SHORT),
        (FLASH, {**SHORT, "normalization": "paper"}),
        (FLASH, {**SHORT, "normalization": "paper_sum", "activation": "softmax"}),
        (FLASHMesa, {**SHORT, "token_shift": True}),
        (GAU, {"d_qk": 8}),
        (GAU, {"d_qk": 8, "normalization": "paper", "max_length": 40}),
        (Attention, {"n_heads": 2, "qk_norm": True}),
    ],
)
def test_weights_times_values_are_the_layer(kind: Any, options: dict[str, Any], causal: bool, prefix: int | None) -> None:
    mixer, x = kind(16, causal=causal, **options).double().requires_grad_(False), torch.randn(1, 21, 16, dtype=torch.float64)
    noisy(mixer)
    lengths = None if prefix is None else torch.tensor([prefix])
    parts = open_attention(mixer, x, lengths)
    assert set(parts) == ({"attention"} if kind in (GAU, Attention) else {"local", "global"})
    weights, packing = sum(parts.values()), mixer.describe(x.shape, prefix_lengths=lengths, device=x.device)
    normed, _ = mixer.shifted(mixer.before(x[0]), packing, None)
    if kind is Attention:
        v = mixer.project(normed, packing)[2].transpose(0, 1)
        added = mixer.combine(normed, (weights @ v).transpose(0, 1).flatten(1))
    else:
        gate, v = mixer.to_gate_value_base(normed)[:, : 2 * mixer.d_value].chunk(2, -1)
        added = mixer.to_output(F.silu(gate) * (weights[0] @ F.silu(v)))
    torch.testing.assert_close(x[0] + added, mixer(x, prefix_lengths=lengths)[0], atol=1e-10, rtol=0)


def test_losses_and_states_are_those_of_the_model(tiny: Any) -> None:
    model = tiny("flash", noise=0.2).eval()
    seen, ids = inspect(model, BYTES, TEXT), torch.tensor([[BYTES.end_of_document, *BYTES.encode(TEXT)]])
    inputs: list[Tensor] = []
    with torch.no_grad():
        assert seen.loss == pytest.approx(float(model.loss(ids[:, :-1], ids[:, 1:])), abs=1e-5)
        model.backbone.read(ids[:, :-1], inputs=inputs)
    assert "".join(seen.tokens) == TEXT
    for block, x, layer in zip(model.backbone.blocks, inputs, seen.layers, strict=True):
        _, state = block.mixer.extend(x)
        assert list(layer.state_norms)[-1] == len(TEXT)
        assert layer.state_norms[len(TEXT)] == pytest.approx(float(state.summary.detach().norm()), rel=1e-5)
        assert layer.state_bytes == dict.fromkeys(layer.state_norms, state.nbytes)  # constant
        assert all(weights.shape == (1, len(TEXT), len(TEXT)) for weights in layer.weights.values())


@pytest.mark.parametrize("system", ["flash-quad", "transformer++", "performer", "longformer", "flash-memory"])
def test_each_system_has_losses_and_a_state(tiny: Any, system: str) -> None:
    layer = inspect(tiny(system).eval(), BYTES, TEXT).layers[0]
    assert bool(layer.weights) == (system in ("flash-quad", "transformer++", "flash-memory"))
    assert bool(layer.state_norms) == (system in ("performer", "flash-memory"))
    assert list(layer.state_bytes)[-1] == len(TEXT)


def test_masked_model_shows_losses_of_selected_tokens_alone(tiny: Any) -> None:
    seen = inspect(tiny("flash", "mlm").eval(), BYTES, TEXT * 5)
    assert 0 < int(seen.losses.isfinite().sum()) < len(seen.losses) / 2 == len(TEXT) * 5 / 2
    assert not seen.layers[0].state_bytes
    assert "15% of the tokens are predicted" in seen.notes[0]


def test_prefix_is_read_in_both_directions_and_not_predicted(tiny: Any) -> None:
    seen, half = inspect(tiny("flash", "prefix-lm", noise=0.2).eval(), BYTES, TEXT), len(TEXT) // 2
    assert seen.losses.isnan().tolist() == [place < half - 1 for place in range(len(TEXT))]  # after the end of a document
    assert seen.layers[0].weights["local"][0, :half, :half].triu(1).any()
    assert min(seen.layers[0].state_bytes) == half
    assert f"first {half - 1} tokens are the prefix" in seen.notes[0]


@pytest.mark.parametrize(("system", "task"), [("flash", "clm"), ("flash", "mlm"), ("performer", "clm"), ("linformer", "mlm")])
def test_picture_has_a_panel_for_each_part_and_state(tiny: Any, system: str, task: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    seen = inspect(tiny(system, task).eval(), BYTES, TEXT)
    assert seen._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    titles = [axes.get_title() for axes in draw(seen, "a $run").axes]
    for layer in seen.layers:
        assert sum(f", {layer.name}" in title for title in titles) == 2 * (len(layer.weights) + bool(layer.state_bytes))


def test_texts_are_cut_or_refused() -> None:
    short = lineartime.build("linformer-tiny", task="mlm", d_model=16, n_blocks=1, n_heads=2, max_length=8).eval()
    for text, tokens, message in (
        ("", 512, "text is empty, but must hold at least one token"),
        ("a", 2049, "max_tokens is 2049, but must be"),
        ("a" * 9, 512, "text has 9 tokens, but this model reads at most 8"),
    ):
        with pytest.raises(ArgumentError, match=message):
            inspect(short, BYTES, text, tokens)
    assert inspect(short, BYTES, "a" * 9, max_tokens=8).notes[0] == "1 more tokens were left out."
    one = next(seen for letter in "abcdefghij" if (seen := inspect(short, BYTES, letter)).loss is None)
    assert math.isnan(one.losses[0])
