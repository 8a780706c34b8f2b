"""MossFormer's FLASH: what the published layers computed, its formula, streams, and programs of any length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.definitions import noisy
from tests.pairs import every_pair
from torch import Tensor, nn
from torch.export import Dim

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.export import write_onnx
from lineartime.foreign import MossFormerFLASH, MossFormerStack, from_mossformer, replace_mossformer
from lineartime.layers import check_mixer

ASSETS = Path(__file__).parents[1] / "assets" / "mossformer"
CHUNK = 8
SIZES: dict[str, Any] = {"d_qk": 6, "rotary_width": 4, "chunk_size": CHUNK}


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def stored() -> dict[str, Tensor]:
    return part(load_file(ASSETS / "scalenorm.safetensors"), "weights.")


def made(**options: Any) -> MossFormerFLASH:
    """A layer in float64 with random weights that let every part have a say."""
    layer: MossFormerFLASH = noisy(MossFormerFLASH(4, **{**SIZES, **options}).double().eval(), 0.5)
    return layer


def definition(layer: MossFormerFLASH, x: Tensor) -> Tensor:
    """The formula for one row [T, d], one frame at a time where it matters."""
    size, n, before = layer.chunk_size, len(x), 16 if layer.convolution == "causal" else 8

    def convolved(own: Any, x: Tensor) -> Tensor:
        h = F.silu(
            F.linear(
                x / (x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5).clamp(min=1e-5) * own.norm.g, *own.dense.parameters()
            )
        )
        seen = [[(tap, t + tap - before) for tap in range(17) if 0 <= t + tap - before < n] for t in range(n)]
        return torch.stack([h[t] + sum(own.taps[:, 0, tap] * h[j] for tap, j in seen[t]) for t in range(n)])

    def turned(z: Tensor) -> Tensor:
        half, turns = z.shape[-1] // 2, layer.rotated_width // 2
        angles = torch.arange(n, dtype=z.dtype)[:, None] * 10000.0 ** -(torch.arange(turns, dtype=z.dtype) / turns)
        one, two = z[:, :turns], z[:, half : half + turns]
        first, second = one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()
        return torch.cat([first, z[:, turns:half], second, z[:, half + turns :]], 1)

    shifted = torch.cat([F.pad(x[:, :2], (0, 0, 1, 0))[:-1], x[:, 2:]], 1)
    hidden, z = convolved(layer.to_hidden, shifted), convolved(layer.to_qk, shifted)
    q_quad, k_quad, q_lin, k_lin = (turned(z * g + b) for g, b in zip(layer.gamma, layer.beta, strict=True))
    rows = []
    for t in range(n):
        first = t // size * size
        near = range(first, t + 1 if layer.causal else min(n, first + size))
        far, by = (range(first), size) if layer.causal else (range(n), n)
        row = sum(F.relu(q_quad[t] @ k_quad[j] / size) ** 2 * hidden[j] for j in near)
        rows.append(row + sum((q_lin[t] @ k_lin[j] / by) * hidden[j] for j in far))
    (v, u), (of_v, of_u) = hidden.chunk(2, 1), torch.stack(rows).chunk(2, 1)
    return x + convolved(layer.to_out, of_u * v * torch.sigmoid(of_v * u))


@pytest.mark.parametrize("name", ["scalenorm", "layernorm-causal"])
def test_layer_has_the_values_and_gradients_of_theirs(name: str) -> None:
    tensors = load_file(ASSETS / f"{name}.safetensors")
    weights, gradients = part(tensors, "weights."), part(tensors, "gradient.")
    options: dict[str, Any] = {"causal": "causal" in name, "chunk_size": CHUNK}
    layer = from_mossformer(weights, **options)
    for length in (1, 8, 21):
        x, y, direction, gradient = (tensors[f"{length}.{key}"] for key in ("x", "y", "direction", "gradient"))
        layer.zero_grad()
        out = layer(x.requires_grad_())
        torch.testing.assert_close(out, y, atol=1e-10, rtol=0)
        (out * direction).sum().backward()
        torch.testing.assert_close(x.grad, gradient, atol=1e-10, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(torch.cat([layer(row) for row in x.split(1)]), y, atol=1e-10, rtol=0)
    expected = from_mossformer({**gradients, "rotary_pos_emb.freqs": weights["rotary_pos_emb.freqs"]}, **options)
    for key, parameter in layer.named_parameters():  # of the longest; in our order and under our names
        torch.testing.assert_close(parameter.grad, expected.get_parameter(key), atol=1e-10, rtol=0)


@every_pair(causal=[False, True], convolution=["same", "causal"], length=[1, 4, 12, 15])
def test_layer_is_its_formula(causal: bool, convolution: str, length: int) -> None:
    layer = made(causal=causal, convolution=convolution, chunk_size=4)
    x = torch.randn(2, length, 4, dtype=torch.float64, requires_grad=True)
    found, expected = layer(x), torch.stack([definition(layer, row) for row in x])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    direction, inputs = torch.randn_like(found), [x, *layer.parameters()]
    of_both = [
        torch.autograd.grad((y * direction).sum(), inputs, allow_unused=True, materialize_grads=True) for y in (found, expected)
    ]
    torch.testing.assert_close(*of_both, atol=1e-9, rtol=1e-9)
    with torch.no_grad():  # one row alone, without slots for frames that are not there
        torch.testing.assert_close(layer(x[:1]), expected[:1], atol=1e-10, rtol=1e-10)


@every_pair(norm=["scalenorm", "layernorm"], kind=["bidirectional", "causal"], rotary_width=[0, 6], token_shift=[False, True])
def test_layer_honours_masks_packs_and_streams(norm: str, kind: str, rotary_width: int, token_shift: bool) -> None:
    causal: dict[str, Any] = {"causal": True, "convolution": "causal"} if kind == "causal" else {}
    promises = check_mixer(made(norm=norm, rotary_width=rotary_width, token_shift=token_shift, **causal))
    assert "padding changes nothing, and its outputs are zero" in promises
    assert ("streams continue in any pieces as the whole text is read" in promises) is (kind == "causal")


def test_layer_in_bfloat16_and_under_autocast_stays_close() -> None:
    layer, x = made().float(), torch.randn(2, 21, 4)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), expected, atol=0.3, rtol=0.1)
    torch.testing.assert_close(layer.bfloat16()(x.bfloat16()).float(), expected, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("convolution", ["same", "causal"])
def test_layer_reads_no_frames_and_few_features_in_bfloat16(convolution: Any) -> None:
    layer, x = made(causal=True, convolution=convolution), torch.randn(2, 2 * CHUNK, made().d_model)
    layer, x = layer.to(x), x.requires_grad_()
    for out in (layer(x[:, :0]), layer(x[:0]), layer(x, torch.zeros(x.shape[:2], dtype=torch.bool))):
        assert not out.any()
        out.sum().backward()
    narrow = MossFormerFLASH(16, d_qk=8, rotary_width=4, chunk_size=CHUNK, convolution=convolution)
    exact, read = narrow(y := torch.randn(1, 48, 16)), narrow.bfloat16()(y.bfloat16())  # PyTorch's conv2d would not return
    torch.testing.assert_close(read.float(), exact, atol=0.1, rtol=0.1)
    if convolution == "causal":
        state = layer.extend(x[:, :3])[1]
        paused = layer.extend(x[:, 3:7], state.clone(), torch.zeros(2, 4, dtype=torch.bool))[1]
        assert all(map(torch.equal, state.tensors(), paused.tensors()))


def test_layer_drops_in_training_and_is_reset_to_where_it_began() -> None:
    layer, x = MossFormerFLASH(4, **SIZES, dropout=0.5), torch.randn(1, 9, 4)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    nn.init.ones_(layer.to_out.taps)
    nn.init.zeros_(layer.gamma)
    layer.reset_parameters()
    assert layer.to_out.taps.abs().max() <= 17**-0.5
    assert 0 < layer.gamma.abs().max() < 0.1


def stacked(**options: Any) -> MossFormerStack:
    return MossFormerStack([made(**options), made(**options)])


def test_stack_is_its_layers_and_honours_the_mask() -> None:
    weights = {f"layers.{place}.{name}": tensor + place for name, tensor in stored().items() for place in range(2)}
    stack = from_mossformer(weights, chunk_size=CHUNK)
    assert isinstance(stack, MossFormerStack)
    x, mask = torch.randn(2, 13, 4, dtype=torch.float64), torch.arange(13) >= torch.tensor([[0], [4]])
    out = stack(x, mask=mask)
    for row, rest in ((0, 0), (1, 4)):
        expected = stack.layers[1](stack.layers[0](x[row : row + 1, rest:]))
        torch.testing.assert_close(out[row : row + 1, rest:], expected, atol=1e-10, rtol=1e-10)
    assert not out[1, :4].any()


@pytest.mark.parametrize("pieces", [[1] * 30, [CHUNK] * 4, [3, 16, 1, 40, 7]])
def test_stack_streams_in_pieces_of_any_size_with_a_state_of_one_size(pieces: list[int]) -> None:
    stack, state, outputs = stacked(causal=True, convolution="causal"), None, []
    x = torch.randn(2, sum(pieces), 4, dtype=torch.float64)
    sizes = set()
    with torch.no_grad():
        for piece in x.split(pieces, 1):
            out, state = stack.extend(piece, state)
            outputs.append(out)
            sizes.add(state.nbytes)
        torch.testing.assert_close(torch.cat(outputs, 1), stack(x), atol=1e-10, rtol=1e-10)
    assert state is not None
    assert state.position.tolist() == [sum(pieces)] * 2
    assert len(sizes) == 1


def test_layer_with_convolutions_that_read_ahead_cannot_stream() -> None:
    with pytest.raises(ArgumentError, match='convolution is "same", so that MossFormerFLASH cannot stream'):
        made(causal=True).extend(torch.zeros(1, 2, 4, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="causal is False, so that MossFormerFLASH cannot stream"):
        made(convolution="causal").init_state(1)


def test_weights_of_something_else_are_refused_in_a_sentence() -> None:
    layernorm = part(load_file(ASSETS / "layernorm-causal.safetensors"), "weights.")
    gan = {f"TSCB.0.intra_mossformer.{name}": tensor for name, tensor in layernorm.items()}
    looks_like_gan = MossFormerFLASH(3, **SIZES, norm="layernorm").state_dict()
    names = {"norm": "mdl.0", "dense": "mdl.1", "taps": "mdl.3.sequential.1.conv.weight"}
    looks_like_gan = {".".join(names.get(part, part) for part in name.split(".")): x for name, x in looks_like_gan.items()}
    looks_like_gan |= {f"qk_offset_scale.{name}": looks_like_gan.pop(name) for name in ("gamma", "beta")}
    unfit: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
        (lambda w: w.clear(), "lack qk_offset_scale.gamma and layers.0: give those of a layer or a stack"),
        (lambda w: w.pop("to_out.mdl.1.bias"), "lack to_out.mdl.1.bias, which MossFormer's FLASH has"),
        (lambda w: w.update({"fsmn.0.conv1.0.weight": torch.zeros(2)}), "hold 'fsmn.0.conv1.0.weight', which"),
        (lambda w: w.update({"to_hidden.mdl.1.bias": torch.zeros(3)}), r"to_hidden.mdl.1.bias has shape \[3\]"),
        (lambda w: w.update({"rotary_pos_emb.freqs": torch.zeros(9)}), "rotary_width is 18, but must be an even number from 0"),
        (lambda w: (w.clear(), w.update(gan)), "The MossFormer of mossformer_gan_se is not FLASH"),
        (
            lambda w: (w.clear(), w.update(looks_like_gan)),
            "may be those of another layer, which look the same: call replace_mossformer",
        ),
    ]
    for change, message in unfit:
        weights = stored()
        change(weights)
        with pytest.raises(LineartimeError, match=message):
            from_mossformer(weights)


class Theirs(nn.Module):
    """What their layers have beside their weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.causal, self.group_size, self.shift_tokens, self.dropout = False, CHUNK, True, nn.Dropout(0.1)
        self.weights, self.qk_offset_scale = weights, nn.Identity()

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return dict(self.weights)


def test_layers_inside_a_model_of_theirs_are_replaced() -> None:
    model = nn.Sequential(nn.Identity(), nn.ModuleDict({"layers": nn.ModuleList([Theirs(stored()), Theirs(stored())])}))
    model.eval()[1]["layers"][1].train()
    assert replace_mossformer(model) == 2
    first, second = model[1]["layers"]
    assert (first.chunk_size, first.training, second.training, first.dropout.p) == (CHUNK, False, True, 0.1)
    x = load_file(ASSETS / "scalenorm.safetensors")
    torch.testing.assert_close(first(x["21.x"], mask=None), x["21.y"], atol=1e-10, rtol=0)


def test_stack_without_layers_changes_nothing() -> None:
    x = torch.randn(1, 3, 4)
    assert MossFormerStack([])(x) is x


def test_model_without_their_layers_is_refused() -> None:
    with pytest.raises(ArgumentError, match="model has no FLASH of MossFormer among its parts"):
        replace_mossformer(nn.Sequential(nn.Linear(2, 2)))
    gan = type("MossFormer", (Theirs,), {})
    with pytest.raises(LineartimeError, match="mossformer_gan_se is not FLASH"):
        replace_mossformer(nn.Sequential(gan(stored())))


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_layer_and_stack_become_onnx_for_any_length(causal: bool, depth: int, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    layers = stacked(causal=causal).float().eval()
    module = layers if depth == 2 else layers.layers[0]
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=CHUNK, max=2**20)},)
    with torch.no_grad():
        program = torch.export.export(module, (torch.randn(2, 5 * CHUNK + 3, 4),), dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(write_onnx(program, tmp_path / "layers.onnx"))
    for rows, length in ((2, 1), (1, CHUNK - 1), (1, CHUNK), (3, CHUNK + 1), (2, 4 * CHUNK - 1), (1, 150)):
        x = torch.randn(rows, length, 4)
        with torch.no_grad():
            expected = module(x)
        size = max(1.0, float(expected.abs().max()))
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4 * size, rtol=0)
