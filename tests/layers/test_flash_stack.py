"""The step of FLASH layers in a row as one function in C++, against the layers over the whole text."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU
from lineartime.layers.dense import Dense
from lineartime.layers.flash_stack import FlashStack, flash_stack
from lineartime.layers.streams import tensors_of
from lineartime.machine import using_threads
from lineartime.native import NATIVE_DTYPES, why_not_native
from lineartime.ops.dense import MAX_ROWS
from lineartime.ops.mixed_chunk import step_native
from lineartime.ops.mixed_chunk.inputs import MixedChunkStreams

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f"functions in C++ cannot be built: {why_not_native()}")

D_MODEL, CHUNK, POSITIONS = 16, 4, (0, 3, 9)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(n_layers: int = 3, kind: type[Any] = FLASH, dtype: torch.dtype = torch.float64, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    options = {"d_qk": 8, "causal": True, **options}
    layers = nn.ModuleList(kind(D_MODEL, **options) for _ in range(n_layers)).to(dtype)
    for parameter in layers.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return layers


def flash(n_layers: int = 3, **options: Any) -> nn.ModuleList:
    return build(n_layers, **{"chunk_size": CHUNK, **options})


def stack_of(layers: nn.ModuleList, n_streams: int = len(POSITIONS)) -> FlashStack | None:
    return flash_stack(layers, lambda: list(layers), n_streams)


def whole(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def streams_of(layers: nn.ModuleList, x: Tensor) -> list[Any]:
    """Of every layer, streams that have read as many tokens as POSITIONS say."""
    streams = []
    for layer in layers:
        read = [layer.extend(x[row, None, :position], None)[1] for row, position in enumerate(POSITIONS)]
        streams.append(layer.join_streams(read))
        x = layer(x)
    return streams


def steps(layers: nn.ModuleList, x: Tensor, streams: list[Any], in_parts: bool = False) -> Tensor:
    """The outputs of CHUNK + 2 more tokens of every stream, by one function or layer by layer."""
    rows, outputs = range(len(POSITIONS)), []
    for _ in range(CHUNK + 2):
        token = x[rows, streams[0].position.tolist()][:, None]
        if in_parts:
            for layer, of_layer in zip(layers, streams, strict=True):
                token = layer.step(token, of_layer)
        else:
            stack = stack_of(layers)
            assert stack is not None
            out = stack.step(token, streams, stack.step_layout(streams[0].position))
            assert out is not None
            token = out
        outputs.append(token)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "scalenorm", "normalization": "paper"},
        {"norm": "rmsnorm", "normalization": "paper_sum"},
        {"token_shift": True},
        {"token_shift": True, "norm": "scalenorm", "rope": False},
        {"relative_bias": False},
        {"rotary_width": 4, "expansion": 3},
        {"d_qk": 200, "expansion": 40},  # several parts for threads
    ],
)
def test_steps_are_the_layers_over_the_whole_text(options: dict[str, Any], threads: int) -> None:
    layers, x = flash(**options), torch.randn(3, 20, D_MODEL, dtype=torch.float64)
    streams = streams_of(layers, x)
    with using_threads(threads):
        outputs = steps(layers, x, streams)
    expected = torch.stack([whole(layers, x)[row, read : read + CHUNK + 2] for row, read in enumerate(POSITIONS)])
    torch.testing.assert_close(outputs, expected, atol=1e-9, rtol=1e-9)
    for of_layer in streams:
        assert of_layer.position.tolist() == [read + CHUNK + 2 for read in POSITIONS]


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_it_leaves_the_state_that_the_layers_leave_one_by_one(token_shift: bool, dtype: torch.dtype) -> None:
    layers, x = flash(dtype=dtype, token_shift=token_shift), torch.randn(3, 20, D_MODEL).to(dtype)
    streams = streams_of(layers, x)
    others = copy.deepcopy(streams)
    results = (steps(layers, x, streams), *streams), (steps(layers, x, others, in_parts=True), *others)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for one, other in zip(*map(tensors_of, results), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_many_streams_are_read_as_few(dtype: torch.dtype) -> None:
    layers, x = flash(dtype=dtype), torch.randn(MAX_ROWS, 9, D_MODEL).to(dtype)
    streams = [layer.join_streams([layer.init_state(MAX_ROWS)]) for layer in layers]
    stack = stack_of(layers, MAX_ROWS)
    assert stack is not None
    tokens = (x[:, place, None].contiguous() for place in range(x.shape[1]))
    outputs = [stack.step(token, streams, stack.step_layout(streams[0].position)) for token in tokens]
    expected = whole(layers.double(), x.double())
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, atol=tolerance, rtol=tolerance)


def test_a_stack_is_kept_as_long_as_nothing_changes() -> None:
    layers = flash()
    stack = stack_of(layers)
    assert stack is not None
    layers[0].gamma.mul_(2)  # as an optimizer does, in place
    assert stack_of(layers) is stack


def test_a_stack_is_made_under_autocast_and_takes_steps_without_it() -> None:
    layers = flash()
    with torch.autocast("cpu", torch.bfloat16):
        stack = stack_of(layers)
    x = torch.randn(3, 20, D_MODEL, dtype=torch.float64)
    streams = streams_of(layers, x)
    steps(layers, x, streams)
    assert stack_of(layers) is stack


def test_weights_that_were_transposed_in_place_are_noticed() -> None:
    layers = flash(expansion=1)  # whose output has as many rows as columns
    stack = stack_of(layers)
    assert stack is not None
    assert stack.is_current
    output = layers[1].to_output.weight
    output.data = output.data.t()
    assert not stack.is_current
    assert stack_of(layers) is None, "the function in C++ reads rows one after another"


def test_a_whole_number_as_epsilon_and_another_default_device_change_nothing() -> None:
    layers, x = flash(), torch.randn(3, 20, D_MODEL, dtype=torch.float64)
    for layer in layers:
        layer.norm.eps = 0
    streams = streams_of(layers, x)
    others = copy.deepcopy(streams)
    with torch.device("meta"):
        outputs = steps(layers, x, streams)
    torch.testing.assert_close(outputs, steps(layers, x, others, in_parts=True), atol=1e-10, rtol=1e-10)


class LowRank(Dense):
    pass


def replace_part(layers: nn.ModuleList) -> None:
    layers[1].to_output = LowRank(2 * D_MODEL, D_MODEL).double()


def replace_layer(layers: nn.ModuleList) -> None:
    layers[1] = nn.Identity()


def set_forward(layers: nn.ModuleList) -> None:
    layers[1].to_output.forward = lambda x: x[..., :D_MODEL]


def add_dropout(layers: nn.ModuleList) -> None:
    layers.train()
    layers[1].dropout.p = 0.5


def in_its_place(dense: nn.Linear) -> Tensor:
    memory = dense.weight.data.view(-1).view(torch.float32)
    return memory[: dense.weight.numel()].view(dense.weight.shape)


CHANGES_TO_NOTHING: dict[str, Callable[[nn.ModuleList], Any]] = {
    "a hook": lambda layers: layers[1].to_output.register_forward_hook(lambda module, inputs, out: 2 * out),
    "a hook before": lambda layers: layers[1].norm.register_forward_pre_hook(lambda module, inputs: None),
    "a hook on a bias": lambda layers: layers[1].bias.register_forward_hook(lambda module, inputs, out: 2 * out),
    "a forward of its own": set_forward,
    "a method of its own": lambda layers: setattr(layers[1], "after", lambda x, out: x),
    "a step of its own": lambda layers: setattr(layers[1], "apply_gate", lambda gate, attended: attended),
    "a part of a user": replace_part,
    "another layer": replace_layer,
    "dropout": add_dropout,
    "another eps": lambda layers: setattr(layers[1].norm, "eps", 1e-3),
    "another normalization": lambda layers: setattr(layers[1], "normalization", "paper"),
    "a softmax": lambda layers: [setattr(layer, "activation", "softmax") for layer in layers],
    "half precision": lambda layers: layers.half(),
    "another shape": lambda layers: setattr(layers[1].to_output, "bias", nn.Parameter(torch.zeros(3, dtype=torch.float64))),
    "another dtype in a layer": lambda layers: layers[1].float(),
    "columns side by side": lambda layers: setattr(layers[1].to_output.weight, "data", torch.zeros(2 * D_MODEL, D_MODEL).mT),
    "another dtype in its place": lambda layers: setattr(layers[1].to_output.weight, "data", in_its_place(layers[1].to_output)),
    "no memory": lambda layers: layers.to("meta"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES_TO_NOTHING)
def test_what_someone_does_to_a_layer_ends_the_stack(change: str) -> None:
    layers = flash()
    stack = stack_of(layers)
    assert stack is not None
    CHANGES_TO_NOTHING[change](layers)
    after = stack_of(layers)
    if after is not None:  # alike in all layers: a softmax, which the function does not know
        streams = [layer.join_streams([layer.init_state(3)]) for layer in layers]
        assert after.step(torch.zeros(3, 1, D_MODEL).double(), streams, after.step_layout(streams[0].position)) is None


def test_a_hook_on_all_modules_ends_the_stack_until_it_is_taken_away() -> None:
    layers = flash()
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, out: None)
    try:
        assert stack_of(layers) is None
    finally:
        hook.remove()
    assert stack_of(layers) is not None


def test_new_parameters_make_a_new_stack() -> None:
    layers, x = flash(), torch.randn(3, 20, D_MODEL, dtype=torch.float64)
    before = steps(layers, x, streams_of(layers, x))
    layers[1].to_output.weight = nn.Parameter(2 * layers[1].to_output.weight)
    streams = streams_of(layers, x)
    others = copy.deepcopy(streams)
    after = steps(layers, x, streams)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, steps(layers, x, others, in_parts=True), atol=1e-10, rtol=1e-10)


def test_a_copy_has_a_stack_of_its_own() -> None:
    layers, x = flash(), torch.randn(3, 20, D_MODEL, dtype=torch.float64)
    first = steps(layers, x, streams_of(layers, x))
    other = copy.deepcopy(layers)
    for parameter in layers.parameters():
        parameter.zero_()
    torch.testing.assert_close(steps(other, x, streams_of(other, x)), first)


def without_norm_weights(layers: nn.ModuleList) -> nn.ModuleList:
    layers[0].norm = nn.LayerNorm(D_MODEL, elementwise_affine=False)
    return layers


@pytest.mark.parametrize(
    "make",
    [
        lambda: build(kind=GAU),
        lambda: build(kind=type("OfAUser", (FLASH,), {}), chunk_size=CHUNK),
        lambda: flash(norm_position="post"),
        lambda: without_norm_weights(flash()),
        lambda: flash(bias_form="buckets"),
        lambda: nn.ModuleList([*flash(1), *flash(1, chunk_size=8)]),
        lambda: nn.ModuleList(),
    ],
)
def test_other_layers_make_no_stack(make: Callable[[], nn.ModuleList]) -> None:
    assert stack_of(make()) is None


def test_a_dropout_of_another_class_makes_no_stack_in_training() -> None:
    layers = flash().train()
    layers[0].dropout = nn.Identity()
    assert stack_of(layers) is None
    assert stack_of(layers.eval()) is not None


def test_gradients_and_many_streams_are_left_to_the_layers() -> None:
    layers = flash()
    assert stack_of(layers, MAX_ROWS) is not None
    assert stack_of(layers, MAX_ROWS + 1) is None
    with torch.enable_grad():
        assert stack_of(layers) is None


def test_without_a_compiler_there_is_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineartime.layers.flash_stack.native_functions", lambda source: None)
    assert stack_of(flash()) is None


def with_sums(streams: MixedChunkStreams, change: Callable[[Tensor], Tensor]) -> MixedChunkStreams:
    return streams._replace(sums=change(streams.sums))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, streams: (x.float(), streams),
        lambda x, streams: (x[:2], streams),
        lambda x, streams: (x[..., 1:].contiguous(), streams),
        lambda x, streams: (x, [of_layer._replace(last=torch.zeros(3, 2 * D_MODEL).double()) for of_layer in streams]),
        lambda x, streams: (x, [streams[0]._replace(last=streams[0].last[:, :1]), *streams[1:]]),
        lambda x, streams: (x, [streams[0]._replace(last=streams[0].last.float()), *streams[1:]]),
        lambda x, streams: (x, [of_layer._replace(own=with_sums(of_layer.own, torch.Tensor.float)) for of_layer in streams]),
        lambda x, streams: (x, [streams[0].own, *streams[1:]]),
        lambda x, streams: (x, [of_layer._replace(own=None) for of_layer in streams]),
        lambda x, streams: (x, streams[:2]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_left_to_pytorch(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = flash(token_shift=True)
    streams = [layer.join_streams([layer.init_state(3)]) for layer in layers]
    stack = stack_of(layers)
    assert stack is not None
    monkeypatch.setattr(step_native, "native_functions", lambda source: pytest.fail("called"))
    layout = stack.step_layout(streams[0].position)
    x, changed = wrong(torch.zeros(3, 1, D_MODEL, dtype=torch.float64), streams)
    assert stack.step(x, changed, layout) is None


def test_streams_of_another_layer_are_named() -> None:
    layers, others = flash(), flash(d_qk=16)
    streams = [layer.join_streams([layer.init_state(3)]) for layer in others]
    stack = stack_of(layers)
    assert stack is not None
    with pytest.raises(ArgumentError, match=r"^streams has sums of shape \[3, 16, 32\], but must have \[B, 8, 32\]: give"):
        stack.step(torch.zeros(3, 1, D_MODEL).double(), streams, stack.step_layout(streams[0].position))
