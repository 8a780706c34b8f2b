"""The step of FLASH between its two dense maps: in C++ and in plain PyTorch, against the definition over the whole text."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.machine import using_threads
from lineartime.native import why_not_native
from lineartime.ops import gated_mixed_chunk_attention
from lineartime.ops.mixed_chunk import step, step_native
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, MixedChunkStreams, Projected
from lineartime.ops.mixed_chunk.step import mixed_chunk_streams
from lineartime.ops.mixed_chunk.stream import mixed_chunk_state
from lineartime.ops.positions import rotary_table

CHUNK, D_QK, D_VALUE, N_STREAMS = 5, 6, 7, 3


@pytest.fixture(params=["native", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that was taken is one in C++."""
    native, reason = step_native.step, why_not_native()
    if request.param == "native" and reason:
        pytest.skip(f"functions in C++ cannot be built here: {reason}")
    taken: list[bool] = []

    def step(*arguments: Any) -> Tensor | None:
        out = native(*arguments) if request.param == "native" else None
        taken.append((out is not None) == (request.param == "native"))
        return out

    monkeypatch.setattr(step_native, "step", step)
    return taken


def make(length: int, dtype: torch.dtype = torch.float64, d_qk: int = D_QK, d_value: int = D_VALUE) -> tuple[Tensor, ...]:
    """projected, gamma, beta, bias; the same numbers always, also where tests are collected."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N_STREAMS, length, 2 * d_value + d_qk), (4, d_qk), (4, d_qk), (CHUNK, CHUNK))
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def new_streams(inputs: tuple[Tensor, ...]) -> MixedChunkStreams:
    projected, gamma, *_ = inputs
    d_value = (projected.shape[-1] - gamma.shape[1]) // 2
    return mixed_chunk_streams([mixed_chunk_state(N_STREAMS, CHUNK, gamma.shape[1], d_value, like=projected)], projected.dtype)


def steps(
    inputs: tuple[Tensor, ...], streams: MixedChunkStreams, rope: bool = True, bias: bool = True, **options: Any
) -> Tensor:
    projected, gamma, beta, table = inputs
    chosen, outputs = MixedChunkOptions(CHUNK, True, **options), []
    for token in projected.split(1, 1):
        chunk = step.open_chunk(streams.position, chosen, streams.sums.dtype)
        rotations = rotary_table(streams.position[:, None], gamma.shape[1] // 2, streams.sums.dtype) if rope else None
        row = table[chunk.slot] if bias else None
        outputs.append(step.step_projected(Projected(token, gamma, beta), row, rotations, chosen, streams, chunk))
    return torch.cat(outputs, 1)


def whole(inputs: tuple[Tensor, ...], rope: bool = True, bias: bool = True, **options: Any) -> Tensor:
    projected, gamma, beta, table = inputs
    positions = torch.arange(projected.shape[1]) if rope else None
    return gated_mixed_chunk_attention(
        projected, gamma, beta, chunk_size=CHUNK, positions=positions, causal=True, bias=table if bias else None,
        backend="oracle", **options,
    )  # fmt: skip


@pytest.mark.parametrize("normalization", ["count", "paper", "paper_sum"])
@pytest.mark.parametrize(("rope", "bias"), [(True, True), (False, True), (True, False)])
def test_steps_are_the_definition_over_the_text(form: list[bool], normalization: Any, rope: bool, bias: bool) -> None:
    inputs, options = make(23), {"normalization": normalization, "rope": rope, "bias": bias}
    streams = new_streams(inputs)
    torch.testing.assert_close(steps(inputs, streams, **options), whole(inputs, **options), atol=1e-12, rtol=1e-12)
    assert streams.position.tolist() == [23] * N_STREAMS
    assert form == [True] * 23


@pytest.mark.parametrize("chunk_size", [1, 6, 12, 16])
def test_tokens_that_join_the_sums_in_groups_are_counted_once(
    form: list[bool], chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.CHUNK", chunk_size)
    inputs = make(2 * chunk_size + 21)
    streams = new_streams(inputs)
    torch.testing.assert_close(steps(inputs, streams), whole(inputs), atol=1e-12, rtol=1e-12)
    assert all(form)


@pytest.mark.parametrize("threads", [1, 3])
def test_forms_leave_the_same_state_for_streams_at_different_positions(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not_native():
        pytest.skip(f"functions in C++ cannot be built here: {why_not_native()}")
    monkeypatch.setattr(f"{__name__}.CHUNK", 16)
    inputs = make(19, d_qk=130, d_value=300)  # several parts for threads
    states = [
        mixed_chunk_state(1, CHUNK, 130, 300, like=inputs[0])._replace(
            summary=torch.randn(1, 130, 300).double(),
            k_quad=torch.randn(1, CHUNK, 130).double(),
            k_lin=torch.randn(1, CHUNK, 130).double(),
            v=torch.randn(1, CHUNK, 300).double(),
            position=position,
        )
        for position in (3, CHUNK + 9, 3 * CHUNK)  # in a first group, in a later one, and at the beginning of a chunk
    ]
    results = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(step_native, "step", lambda *_: None)
        streams = mixed_chunk_streams(states)
        with using_threads(threads):
            results.append((steps(inputs, streams), streams))
    (native_out, native_streams), (plain_out, plain_streams) = results
    torch.testing.assert_close(native_out, plain_out, atol=1e-10, rtol=1e-10)
    for one, other in zip(native_streams, plain_streams, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_errors_are_within_tolerance(form: list[bool], dtype: torch.dtype, tolerance: float) -> None:
    rounded = make(23, dtype)
    true = whole(tuple(x.double() for x in rounded))
    out = steps(rounded, new_streams(rounded))
    assert out.dtype == dtype
    assert (out - true).abs().max() < tolerance * true.abs().max()
    assert all(form)


@pytest.mark.parametrize(
    ("inputs", "options", "tolerance"),
    [
        (make(12, d_qk=5), {"rope": False}, 1e-12),
        (make(12), {"activation": "softmax"}, 1e-12),
        (tuple(x.requires_grad_() for x in make(12)), {}, 1e-12),
        ((make(12, torch.bfloat16)[0], *make(12, torch.float32)[1:]), {}, 2e-2),
        (make(12, torch.float16), {}, 3e-3),
    ],
    ids=["odd width", "softmax", "gradients", "two dtypes", "float16"],
)
def test_what_the_function_cannot_do_is_left_to_pytorch(
    inputs: tuple[Tensor, ...], options: dict[str, Any], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_native, "native_functions", lambda source: pytest.fail("called"))
    true = whole(tuple(x.detach().double() for x in inputs), **options)
    with torch.enable_grad():
        out = steps(inputs, new_streams(tuple(x.detach() for x in inputs)), **options)
    assert out.shape == (N_STREAMS, 12, D_VALUE)
    assert (out - true).abs().max() < tolerance * true.abs().max()


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("sums", lambda x: x[:1]), ("position", lambda x: x[:2]), ("position", Tensor.int), ("values", Tensor.float)],
)
def test_streams_of_another_batch_or_dtype_are_left_to_pytorch(field: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = make(1), MixedChunkOptions(CHUNK, True)
    streams = new_streams(inputs)
    monkeypatch.setattr(step_native, "native_functions", lambda source: pytest.fail("called"))
    changed = streams._replace(**{field: wrong(getattr(streams, field))})
    assert step_native.step(Projected(*inputs[:3]), None, None, options, changed) is None


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, torch.zeros(N_STREAMS, 2, 2 * D_VALUE + D_QK)),
        (0, torch.zeros(N_STREAMS, 1, 2 * D_VALUE + D_QK + 1)),
        (1, torch.zeros(3, D_QK)),
        (2, torch.zeros(4, D_QK - 2)),
        (3, torch.zeros(1, CHUNK)),
    ],
)
def test_inputs_of_another_shape_are_left_to_pytorch(place: int, wrong: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = make(1), MixedChunkOptions(CHUNK, True)
    streams = new_streams(inputs)
    monkeypatch.setattr(step_native, "native_functions", lambda source: pytest.fail("called"))
    *changed, row = [wrong.double() if at == place else x for at, x in enumerate((*inputs[:3], inputs[3][:N_STREAMS]))]
    assert step_native.step(Projected(*changed), row, None, options, streams) is None


@pytest.mark.parametrize(("field", "dimension"), [("sums", 1), ("sums", 2), ("keys", 2), ("keys", 3), ("values", 1)])
def test_streams_of_another_layer_never_lead_beyond_their_memory(field: str, dimension: int, form: list[bool]) -> None:
    inputs = make(1)
    streams = new_streams(inputs)
    smaller = getattr(streams, field).narrow(dimension, 0, 1).contiguous()
    with pytest.raises(ArgumentError, match=rf"^streams has {field} of shape .* but must have \[B, "):
        steps(inputs, streams._replace(**{field: smaller}))
