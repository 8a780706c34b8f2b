"""RTMPose's unit against what the units of four packages computed in float64, which tests/assets/make_rtmpose.py saved."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.export import write_onnx
from lineartime.foreign.rtmpose import PoseGAU, PoseScaleNorm, from_rtmpose, sine_encoding

STORED = load_file(Path(__file__).parents[1] / "assets" / "rtmpose.safetensors")
GIVEN = {name.removeprefix("input."): tensor for name, tensor in STORED.items() if name.startswith("input.")}
D, E, S, T, OUT = 4, 8, 4, 5, 6
SELF = ["uv.weight", "o.weight", "gamma", "beta", "ln.g"]
CROSS = ["uv.weight", "o.weight", "k_fc.weight", "v_fc.weight", "ln.g"]
BIASES = {"uv.weight": "uv.bias", "o.weight": "o.bias", "k_fc.weight": "k_fc.bias", "v_fc.weight": "v_fc.bias"}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": ([*SELF, "res_scale.scale"], {}),
    "wider": ([*SELF, "uv.bias", "o.bias"], {}),
    "relu": ([*SELF, "res_scale.scale"], {"activation": "relu"}),
    "table": ([*SELF, "res_scale.scale", "w"], {}),
    "inverted": ([*SELF, "res_scale.scale"], {"positions": "inverted"}),
    "cross": ([*CROSS, "res_scale.scale"], {}),
    "cross-bias": ([*CROSS, *BIASES.values(), "res_scale.scale", "a", "b"], {"positions": "inverted"}),
    "rtmo-none": ([*SELF, "res_scale.scale"], {}),
    "rtmo-add": ([*SELF, "res_scale.scale"], {"positions": "add"}),
    "rtmo-rope": ([*SELF, "res_scale.scale"], {"positions": "rope"}),
}
CASES |= {f"{name}-mask": case for name, case in CASES.items() if name.startswith("rtmo")}


def weights_of(name: str, prefix: str = "") -> dict[str, Tensor]:
    """The weights of a case, of which the stored ones are a superset."""
    names, _ = CASES[name]
    out = OUT if name == "wider" else D
    rows = {"uv": E + S if "k_fc.weight" in names else 2 * E + S, "o": out}
    return {
        prefix + each: STORED[f"weight.{each}"][: rows.get(each.partition(".")[0] if "." in each else "")] for each in names
    }


def build(name: str, **changes: Any) -> PoseGAU:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return from_rtmpose(weights_of(name, "head.gau."), **{**CASES[name][1], **changes})


@pytest.mark.parametrize("name", CASES)
def test_values_and_all_gradients_are_those_of_the_published_units(name: str) -> None:
    unit = build(name)
    leaves = [GIVEN[each].clone().requires_grad_() for each in (("x", "keys", "values") if unit.cross else ("x",))]
    options = {"mask": GIVEN["mask"] if name.endswith("mask") else None}
    options["encoding"] = GIVEN["encoding"] if unit.positions in ("rope", "add") else None
    out = unit(*leaves, **options)
    torch.testing.assert_close(out, STORED[f"{name}.out"], atol=1e-10, rtol=1e-10)
    leaves += [parameter for _, parameter in sorted(unit.named_parameters())]
    gradients = torch.autograd.grad((out * GIVEN["direction"][..., : out.shape[-1]]).sum(), leaves)
    found = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(found, STORED[f"{name}.gradients"], atol=1e-10, rtol=1e-10)


def test_state_dict_goes_back_under_the_same_names() -> None:
    for name in CASES:
        weights = weights_of(name)
        back = build(name).state_dict()
        assert back.keys() == weights.keys()
        assert all(torch.equal(back[each], weights[each]) for each in weights)


def test_what_no_shipped_configuration_uses_warns() -> None:
    for name, message in (("table", "relative bias is read from the front"), ("inverted", "frequencies are inverted")):
        with pytest.warns(UserWarning, match=message):
            from_rtmpose(weights_of(name), **CASES[name][1])
    with pytest.warns(UserWarning, match="frequencies are inverted"):
        from_rtmpose(weights_of("cross-bias"))
    from_rtmpose(weights_of("rtmo-add"), positions="add")  # the one that is used; warnings are errors here


def by_formula(unit: PoseGAU, x: Tensor) -> Tensor:
    """Self-attention to another width, squared before it is divided."""
    normed = x * unit.ln.g / (x.square().sum(-1, keepdim=True).sqrt() * x.shape[-1] ** -0.5).clamp(min=unit.ln.eps)
    u, v, z = torch.nn.functional.silu(unit.uv(normed)).split(unit.widths, -1)
    q, k = (z * unit.gamma[i] + unit.beta[i] for i in range(2))
    return unit.o(u * ((q @ k.mT / z.shape[-1] ** 0.5).relu().square() @ v))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("size", "score"), [(270.0, 1.0), (6e4, 1.0), (1.0, 40.0)])
def test_float16_does_not_overflow_where_squares_would(size: float, score: float) -> None:
    """In the norm, whose sum of squares exceeds 65,504 at inputs near 270, and in P, at scores above 256."""
    unit = PoseGAU(64, 32)
    with torch.no_grad():
        unit.gamma.mul_(score), unit.o.weight.div_(score**2)
        unit.half()
        x = (size * (1 + 0.08 * torch.rand(2, 17, 64))).half()
        found, squared_first = unit(x), by_formula(unit, x)
        expected = by_formula(unit.double(), x.double())
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, atol=1e-2 * largest, rtol=0)
    assert not (squared_first - expected).abs().max() < 0.5 * largest  # zeros, or no numbers


def test_norm_is_linear_below_eps_and_has_gradients_at_zero() -> None:
    norm = PoseScaleNorm(1e-5).double()
    x = torch.tensor([[0.0, 0.0], [3e-6, -4e-6], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    found = norm(x)
    expected = x.detach() / torch.tensor([[1e-5], [1e-5], [12.5**0.5]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient[:2], torch.full((2, 2), 1e5, dtype=torch.float64))


def test_table_has_a_limit_and_reads_a_single_token() -> None:
    """Which the published units fail at."""
    unit = build("table")
    x, changed = torch.randn(1, 1, D, dtype=torch.float64), build("table")
    assert changed.w is not None
    changed.w.data[1:] += 1
    assert torch.equal(unit(x), changed(x))  # distance 0 of one token is the first number of the table
    changed.w.data[0] += 100
    assert not torch.equal(unit(x), changed(x))
    with pytest.raises(ArgumentError, match=f"x has {T + 2} tokens, but the relative bias is for at most {T + 1}"):
        unit(torch.randn(1, T + 2, D, dtype=torch.float64))


def test_instances_in_a_batch_are_each_alone_and_dropout_is_of_training() -> None:
    """RTMO reads [B, N, K, d], the K keypoints of N people."""
    unit, x, encoding = build("rtmo-add", dropout=0.5), GIVEN["x"], GIVEN["encoding"]
    out = unit(x, encoding=encoding)
    torch.testing.assert_close(out, STORED["rtmo-add.out"], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(unit(x[:, None], encoding=encoding)[:, 0], out)
    assert not torch.allclose(unit.train()(x, encoding=encoding), out)


def test_unit_reads_no_tokens_and_no_keys() -> None:
    assert PoseGAU(8)(torch.randn(2, 0, 8)).shape == (2, 0, 8)
    unit, x = PoseGAU(8, cross=True), torch.randn(2, 3, 8)
    nothing = torch.randn(2, 0, 8)
    torch.testing.assert_close(unit(x, nothing, nothing), x)  # the shortcut


def test_sine_encoding_is_of_mmpose() -> None:
    """Position 2 of width 4 at temperature 1e5: angles 2 and 2 / 1e5^(1/2)."""
    like = torch.zeros(1, dtype=torch.float64)
    angles = torch.tensor([2.0, 2 / 1e5**0.5], dtype=torch.float64)
    torch.testing.assert_close(sine_encoding(3, 4, like=like)[2], torch.cat([angles.cos(), angles.sin()]))


@pytest.mark.nightly
def test_onnx_of_one_file_keeps_float16(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    unit = PoseGAU(64, 32, n_tokens=17).half().eval()
    x = (270 + 20 * torch.randn(2, 17, 64)).half()
    program = torch.export.export(unit, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    file = write_onnx(program, tmp_path / "unit.onnx", output="y")
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(["y"], {"x": x[:1].numpy()})
    with torch.no_grad():
        expected = unit.double()(x[:1].double())
    torch.testing.assert_close(torch.from_numpy(found).double(), expected, atol=1e-2 * float(expected.abs().max()), rtol=0)
    assert [each.name for each in tmp_path.iterdir()] == ["unit.onnx"]  # no file of weights beside it


def test_weights_and_inputs_that_do_not_fit_are_named() -> None:
    weights = weights_of("plain")
    for unfit, message in (
        ({}, "The weights lack uv.weight, which RTMPose's gated attention unit has"),
        (
            {f"{place}{name}": tensor for place in ("a.", "b.") for name, tensor in weights.items()},
            "hold 2 units of RTMPose.*, 'a.' and 1 more: give those of one",
        ),
        ({**weights, "more": torch.zeros(1)}, "hold 'more', which RTMPose's gated attention unit does not have"),
        ({name: weights[name] for name in weights if name != "gamma"}, "lack gamma"),
        ({**weights, "o.weight": torch.zeros(D, 3 * E)}, "uv.weight has 20 rows, of which -28 are for queries"),
        ({**weights, "beta": torch.zeros(2, 3)}, r"beta has shape \[2, 3\]"),
    ):
        with pytest.raises(LineartimeError, match=message):
            from_rtmpose(unfit)
    x, unit, cross = GIVEN["x"], build("plain"), build("cross")
    for call, message in (
        (lambda: unit(x[..., 1:]), rf"x has shape \[2, {T}, {D - 1}\], but must be \[..., tokens, {D}\]"),
        (lambda: unit(x, x, x), "keys is given, but self-attention has none"),
        (lambda: cross(x, x), "values is None, but cross-attention needs it"),
        (lambda: cross(x, x, x[:, 1:]), f"values has {T - 1} tokens, but there are {T} keys"),
        (lambda: unit(x, encoding=x[0]), "encoding is of shape .*, but positions='none' needs None"),
        (lambda: build("rtmo-add")(x), rf"encoding is None, but positions='add' needs of shape \[{T}, {S}\]"),
        (lambda: unit(x, mask=torch.ones(2, T)), r"mask has shape \[2, 5\], but must be \[..., 5, 5\]"),
        (lambda: unit(x, mask=torch.ones(3, T, T)), r"mask has shape \[3, 5, 5\], .* as \[2, 5, 5\]"),
        (lambda: PoseGAU(D, cross=True, positions="add"), "positions is 'add', but cross-attention has only"),
        (lambda: PoseGAU(D, d_qk=3), "d_qk is 3, but must be even"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
