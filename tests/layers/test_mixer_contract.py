"""The one contract that everything which moves information between tokens has to keep."""

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.definitions import SizesWritten, assert_same_with_gradients, noisy
from torch import Tensor, nn

from lineartime.foreign.mixers import PostNorm, post_norm
from lineartime.layers import FLASH
from lineartime.layers.contract import NO_FUTURE, check_mixer
from lineartime.layers.mesa import FLASHMesa
from lineartime.layers.mixer import Mixer
from lineartime.layers.residual import constructor_options
from lineartime.models.config import KINDS
from lineartime.ops import packing as packings
from lineartime.ops.packing import Grid, Packing
from lineartime.ops.state import State

D_MODEL, CHUNK = 16, 8
SMALL = {"d_qk": 8, "n_heads": 2, "chunk_size": CHUNK}  # where a mixer has such an option, and its row does not say otherwise

# The options that a mechanism is tested with, where they are not its defaults alone. Every case is held to every test below.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "flash": [
        {},
        {"normalization": "paper"},
        {"normalization": "paper_sum"},
        {"activation": "softmax"},
        {"chunk_size": 513},  # the rotary bias
    ],
    "gau": [{}, {"max_length": 128}, {"normalization": "paper"}],
    "flash-foreign": [
        {"bias_form": "buckets", "rotary_width": 4, "normalization": "paper_sum"},
        {"activation": "laplace", "rotary_width": 2},
        {"activation": "softmax_plus"},
    ],
    "gau-foreign": [
        {"bias_form": "buckets", "rotary_width": 4, "normalization": "paper_bias"},
        {"activation": "softmax_plus"},
        {"activation": "laplace"},
        {"normalization": "paper_bias", "activation": "laplace"},
    ],
    "flash-global": [{}, {"normalization": "paper_sum"}],
    "flash-overlapping": [{}, {"normalization": "paper_sum"}],
    "flash-weighted": [{}, {"normalization": "paper"}],
    "performer": [{}, {"causal_sums": "matmul"}, {"causal_sums": "chunked"}, {"rotated": "features"}],
    "linear-elu": [{}, {"rotated": "features"}],
    "linear-taylor": [{}, {"rotated": "features"}],
    "efficient": [{}, {"rotated": "features"}],
    "cosformer": [{"max_length": 96}],
    "mixed-chunk": [{}, {"local": "overlapping"}, {"features": "relu"}, {"features": "cos", "max_length": 96}],
    "combiner": [{}, {"rope": False}],
    "linformer": [{"n_landmarks": 6, "max_length": 64}],
    "nystromformer": [{"n_landmarks": 6, "convolution": 5}, {"n_landmarks": 6, "convolution": 0}],
    "sparse": [{"stride": 4}],
    "longformer": [{"window": 4}, {"window": 5, "n_global": 7}],
    "bigbird": [{"block_size": 3, "n_global": 1, "n_random": 2}],
    "explicit-topk": [{"n_largest": 4}],
    "reformer": [{"n_buckets": 4, "chunk_size": 4}],
    "lact": [{"n_nets": 2}],
    "retnet": [{}, {"short_convolution": True}],
    "mamba2": [{"d_state": 6}, {"short_convolution": False}],
}

MIXERS = KINDS["mixer"] | {FLASHMesa.name: FLASHMesa}  # whose config is that of FLASH
ROWS = {kind: OPTIONS.get(kind, [{}]) for kind in MIXERS}


def case_name(kind: str, options: dict[str, Any]) -> str:
    return ", ".join([kind, *(f"{name}={value}" for name, value in options.items())])


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    case_name(kind, options): (MIXERS[kind], options) for kind, row in ROWS.items() for options in row
}
CASES |= {f"{kind}, post-norm": (post_norm(KINDS["mixer"][kind]), {"norm": "scalenorm"}) for kind in ("flash", "gau")}
ONE_OF_EACH = [case_name(kind, row[0]) for kind, row in ROWS.items()]
ONLY_BIDIRECTIONAL = [name for name, (mixer, _) in CASES.items() if mixer.why_not_causal is not None]
ONLY_CAUSAL = [name for name, (mixer, _) in CASES.items() if mixer.why_only_causal is not None]
CAUSAL = [name for name in CASES if name not in ONLY_BIDIRECTIONAL]
CAUSAL_MECHANISMS = [name for name in ONE_OF_EACH if name in CAUSAL]
DIRECTIONS = [(name, False) for name in ONE_OF_EACH if name not in ONLY_CAUSAL] + [(name, True) for name in CAUSAL_MECHANISMS]
# What the base of all mixers does alone is tested on these; test_boundary.py says that no mixer replaces it.
OF_THE_BASE = ["flash", "gau", "attention", "combiner-fixed"]

every_case = pytest.mark.parametrize(
    ("name", "causal"),
    [(name, name in CAUSAL) for name in CASES] + [each for each in DIRECTIONS if each[0] in CAUSAL and not each[1]],
)
every_mechanism = pytest.mark.parametrize("name", ONE_OF_EACH)
every_causal_mechanism = pytest.mark.parametrize("name", CAUSAL_MECHANISMS)
every_mechanism_in_both_directions = pytest.mark.parametrize(("name", "causal"), DIRECTIONS)
some_mixers = pytest.mark.parametrize("name", OF_THE_BASE)
some_mixers_in_both_directions = pytest.mark.parametrize(
    ("name", "causal"), [(name, causal) for name in OF_THE_BASE for causal in (False, True)]
)
LENGTH = 3 * CHUNK + 5


def fresh(name: str, causal: bool, d_model: int = D_MODEL, **others: Any) -> Mixer:
    mixer, options = CASES[name]
    small = {option: value for option, value in SMALL.items() if option in constructor_options(mixer)}
    return mixer(d_model, causal=causal, **small | options | others)


def build(name: str, causal: bool, token_shift: bool = False) -> Mixer:
    """The mixer with weights far from their small initial values, so that everything in it has a say."""
    torch.manual_seed(1)
    mixer: Mixer = noisy(fresh(name, causal, token_shift=token_shift))
    return mixer


def close(a: Tensor, b: Tensor) -> None:
    size = float(torch.cat([torch.ones(1), b.detach().abs().flatten()]).max())
    torch.testing.assert_close(a, b, atol=1e-5 * size, rtol=0)


def test_options_are_those_of_mixers_that_a_model_can_have() -> None:
    assert set(OPTIONS) <= set(MIXERS)


@every_case
def test_every_mixer_keeps_its_promises(name: str, causal: bool) -> None:
    assert (NO_FUTURE in check_mixer(fresh(name, causal))) is causal


@every_causal_mechanism
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(0, 13), min_size=1, max_size=7))
def test_extend_over_any_cutting_is_the_forward_pass(name: str, cuts: list[int]) -> None:
    """Outputs and gradients of the tokens."""
    mixer = build(name, causal=True).double()
    x = torch.randn(2, sum(cuts), D_MODEL, dtype=torch.float64, requires_grad=True)
    state, pieces = mixer.init_state(2) if len(cuts) % 2 else None, []
    for tokens in x.split(cuts, 1):
        piece, state = mixer.extend(tokens, state)
        pieces.append(piece)
    assert state.position.tolist() == [sum(cuts)] * 2
    assert_same_with_gradients(torch.cat(pieces, 1), mixer(x), [x], atol=1e-8, rtol=1e-8)


@every_causal_mechanism
def test_streams_may_pause_and_meet_again(name: str) -> None:
    mixer = build(name, causal=True)
    x = torch.randn(3, 12, D_MODEL)
    masks = torch.tensor([[1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]), torch.tensor([[0], [1], [0]])
    first, state = mixer.extend(x[:, :6], None, masks[0])
    assert state.position.tolist() == [5, 4, 5]
    before = state.clone()
    second, state = mixer.extend(x[:, 6:7], state, masks[1])
    assert state.position.tolist() == [5, 5, 5]
    rest, _ = mixer.extend(x[:, 7:], state)
    close(torch.cat([first, second, rest], 1), mixer(x, mask=torch.cat([*masks, torch.ones(3, 5, dtype=torch.long)], 1)))
    again, _ = mixer.extend(x[:, 6:7], before, masks[1])  # no clone is changed
    assert torch.equal(again, second)
    none, state = mixer.extend(x[:0, :3], None, mask=torch.ones(0, 3, dtype=torch.bool))
    assert none.shape == (0, 3, D_MODEL)


def streams_after(mixer: Mixer, x: Tensor, lengths: list[int]) -> State:
    """Streams that have each read so many tokens, alone, put together."""
    states = [mixer.extend(x[row : row + 1, :length], None)[1] for row, length in enumerate(lengths)]
    together: State = State.concatenate(states)
    return together


@pytest.mark.parametrize(
    ("name", "token_shift"), [(name, False) for name in ONE_OF_EACH if name in CAUSAL] + [(name, True) for name in OF_THE_BASE]
)
@torch.no_grad()
def test_streams_of_other_lengths_step_together_as_each_alone(name: str, token_shift: bool) -> None:
    mixer = build(name, causal=True, token_shift=token_shift).double()
    lengths, steps = [1, CHUNK, 1, 0, 1, 2 * CHUNK + 3], CHUNK + 2
    x = torch.randn(6, LENGTH + 5, D_MODEL, dtype=torch.float64)
    expected = mixer(x)
    with patch("lineartime.ops.state.MIN_ROOM", 4):  # the room of a cache is full several times
        state = streams_after(mixer, x, lengths)
        branch, places = state.clone(), [tensor.data_ptr() for tensor in state.tensors()]
        kept = [tensor.clone() for tensor in branch.tensors()]
        for step in range(steps):
            at = torch.tensor(lengths) + step
            out, state = mixer.extend(x[range(6), at][:, None], state)
            torch.testing.assert_close(out[:, 0], expected[range(6), at], atol=1e-9, rtol=1e-9)
    assert state.position.tolist() == [length + steps for length in lengths]
    assert all(torch.equal(tensor, value) for tensor, value in zip(branch.tensors(), kept, strict=True))
    if mixer.constant_state:  # what a CUDA graph goes on with
        assert [tensor.data_ptr() for tensor in state.tensors()] == places
    more = torch.stack([x[row, length + steps :][:5] for row, length in enumerate(lengths)])
    out, _ = mixer.extend(more, state)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[row], expected[row, length + steps :][:5], atol=1e-9, rtol=1e-9)


@every_causal_mechanism
@torch.no_grad()
def test_streams_are_taken_in_any_order_each_with_its_own_memory(name: str) -> None:
    mixer = build(name, causal=True, token_shift=name in OF_THE_BASE).double()
    x, new = torch.randn(3, LENGTH, D_MODEL, dtype=torch.float64), torch.randn(3, 3, D_MODEL, dtype=torch.float64)
    state = streams_after(mixer, x, [LENGTH, 2, CHUNK])
    expected, _ = mixer.extend(new, state.clone())
    for rows in ([2, 0, 0, 1], [1], []):
        index = torch.tensor(rows, dtype=torch.long)
        taken = state.take(index)
        for tensor in taken.tensors():
            assert not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # which torch.save writes
        found, _ = mixer.extend(new[index], taken)
        torch.testing.assert_close(found, expected[index], atol=1e-9, rtol=1e-9)


@every_causal_mechanism
def test_streams_put_together_in_inference_mode_go_on_outside(name: str) -> None:
    mixer, x = build(name, causal=True, token_shift=name in OF_THE_BASE), torch.randn(2, LENGTH, D_MODEL)
    whole = mixer(x)
    with torch.inference_mode():
        state = streams_after(mixer, x, [9, 9])
    pieces = [whole[:, :9]]
    for stop, mode in zip(
        (10, 11, 12, 14), (torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad), strict=True
    ):
        with mode():
            piece, state = mixer.extend(x[:, sum(piece.shape[1] for piece in pieces) : stop], state)
        pieces.append(piece)
    close(torch.cat(pieces, 1), whole[:, :14])


@some_mixers
def test_mask_of_zeros_and_ones_is_that_of_true_and_false(name: str) -> None:
    mixer = build(name, causal=name in CAUSAL)
    x, mask = torch.randn(2, LENGTH, D_MODEL), torch.rand(2, LENGTH) > 0.3
    for dtype in (torch.long, torch.uint8):
        assert torch.equal(mixer(x, mask=mask.to(dtype)), mixer(x, mask=mask))


@contextmanager
def small_parts() -> Iterator[None]:
    """Packs of a few tokens are cut as those of thousands are: documents of other lengths apart, in chunks of few slots."""
    with patch.multiple(packings, GROUP_COST=0, WASTE=100):
        yield


@every_mechanism_in_both_directions
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(0, 3) | st.integers(0, 2 * CHUNK + 3), min_size=1, max_size=9))
def test_pack_of_any_lengths_equals_its_documents_alone(name: str, causal: bool, lengths: list[int]) -> None:
    """Outputs, gradients of the tokens and of the parameters."""
    mixer = build(name, causal, token_shift=len(lengths) % 2 == 0).double()
    ends = [0, *accumulate(lengths)]
    x = torch.randn(1, ends[-1], D_MODEL, dtype=torch.float64, requires_grad=True)
    with small_parts():
        packed = mixer(x, cu_seqlens=torch.tensor(ends))
    alone = torch.cat([mixer(x[:, start:stop]) for start, stop in pairwise(ends)], 1)
    assert_same_with_gradients(packed, alone, [x, *mixer.parameters()], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in CAUSAL if fresh(name, True).reads_prefix])
def test_pack_of_other_lengths_with_padding_and_prefixes_equals_its_documents_alone(name: str) -> None:
    mixer = build(name, causal=True).double()
    ends, prefixes = [0, 3, 3, 25, 27, 46, 47], [2, 0, 9, 0, 15, 1]
    x, mask = torch.randn(1, ends[-1], D_MODEL, dtype=torch.float64), torch.ones(1, ends[-1], dtype=torch.bool)
    mask[0, [4, 12, 13, 24]] = False
    with small_parts():
        packed = mixer(x, mask, torch.tensor(ends), torch.tensor(prefixes))
    assert not packed[~mask].any()
    for start, stop, prefix in zip(ends, ends[1:], prefixes, strict=False):
        real = mask[0, start:stop]
        alone = mixer(x[:, start:stop][:, real], prefix_lengths=torch.tensor([prefix]))
        torch.testing.assert_close(packed[:, start:stop][:, real], alone, atol=1e-10, rtol=0)


@every_mechanism_in_both_directions
def test_pack_costs_what_its_documents_cost(name: str, causal: bool) -> None:
    """However much longer than the others one document is."""
    mixer = build(name, causal)
    longest = min(mixer.longest_sequence or 400, 400)
    lengths = [2] * 300 + [12] * 30 + [longest]

    def cost(tokens: int, ends: list[int] | None) -> int:
        with torch.no_grad(), SizesWritten() as written:
            mixer(torch.zeros(1, tokens, D_MODEL), None, None if ends is None else torch.tensor(ends))
        return sum(written.sizes)

    alone = sum(count * cost(tokens, None) for tokens, count in Counter(lengths).items())
    assert cost(sum(lengths), [0, *accumulate(lengths)]) < 3 * alone


@every_mechanism_in_both_directions
def test_gradients_are_those_of_gradcheck(name: str, causal: bool) -> None:  # which also has outputs without a gradient
    mixer = build(name, causal).double()
    x = torch.randn(1, CHUNK + 3, D_MODEL, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixer, x, fast_mode=True)


@every_mechanism_in_both_directions
def test_no_tokens_and_no_real_tokens_give_finite_zeros(name: str, causal: bool) -> None:
    mixer = build(name, causal)
    assert mixer(torch.zeros(2, 0, D_MODEL)).shape == (2, 0, D_MODEL)
    assert mixer(torch.zeros(2, 0, D_MODEL), mask=torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0, D_MODEL)
    assert mixer(torch.zeros(0, 3, D_MODEL), mask=torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3, D_MODEL)
    assert mixer(torch.zeros(1, 0, D_MODEL), cu_seqlens=torch.tensor([0])).shape == (1, 0, D_MODEL)
    x = torch.randn(2, 9, D_MODEL, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    y = mixer(x, mask=mask)
    assert not y[1].any()
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@every_mechanism_in_both_directions
def test_half_precision_autocast_stays_finite_on_large_inputs(name: str, causal: bool) -> None:
    mixer = build(name, causal)
    x = 1e3 * torch.randn(2, LENGTH, D_MODEL)
    if isinstance(mixer, PostNorm):  # it reads what the norm of the layer before has made small
        x = mixer.norm(x).detach()
    x.requires_grad_()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [5]])
    with torch.autocast("cpu", dtype=torch.float16):
        y = mixer(x, mask=mask)
    assert y.isfinite().all()
    y.float().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters() if parameter.grad is not None)


@every_causal_mechanism
def test_layer_cast_to_another_dtype_keeps_it(name: str) -> None:
    dtype = torch.bfloat16
    mixer = build(name, causal=True).to(dtype)
    x = torch.randn(2, LENGTH, D_MODEL).to(dtype)
    first, state = mixer.extend(x[:, :10], mixer.init_state(2))
    rest, _ = mixer.extend(x[:, 10:], state)
    whole = mixer(x)
    assert first.dtype == whole.dtype == dtype
    size = whole.float().abs().max()
    assert (torch.cat([first, rest], 1) - whole).abs().max() <= 8 * torch.finfo(dtype).eps * size


@every_causal_mechanism
def test_streaming_under_autocast_keeps_its_state_in_float32(name: str) -> None:
    mixer = build(name, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():  # so that the tiles read whole chunks
        _, state = mixer.extend(torch.randn(1, 11, D_MODEL), mixer.init_state(1))
    numbers = [part for part in state.tensors() if part.is_floating_point()]
    assert numbers
    assert all(part.dtype == torch.float32 for part in numbers)


@some_mixers
def test_mixer_that_is_not_causal_says_so(name: str) -> None:
    mixer = build(name, causal=False)
    with pytest.raises(ValueError, match=r"causal is False, so that \w+ cannot stream: build it with causal=True"):
        mixer.init_state(1)


@pytest.mark.parametrize("name", ONLY_BIDIRECTIONAL)
def test_mixer_that_cannot_be_causal_says_why(name: str) -> None:
    reason = re.escape(str(CASES[name][0].why_not_causal))
    with pytest.raises(ValueError, match=rf"causal is True, but \w+ must have causal=False: .*{reason}"):
        fresh(name, causal=True)
    mixer = build(name, causal=False)
    for stream in (lambda: mixer.init_state(1), lambda: mixer.extend(torch.zeros(1, 1, D_MODEL), None)):
        with pytest.raises(ValueError, match=f"cannot stream.*{reason}"):
            stream()


def without_values(part: Any) -> Any:
    """The same packing on the meta device."""
    if not isinstance(part, (Packing, Grid)):
        return part.to("meta") if isinstance(part, Tensor) else part
    parts = {field.name: without_values(getattr(part, field.name)) for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **parts | ({"memo": {}} if isinstance(part, Packing) else {}))


@every_mechanism_in_both_directions
def test_reading_a_packing_copies_nothing_to_the_host(name: str, causal: bool) -> None:
    """On the meta device there are no values to copy: whatever looks at one fails."""
    mixer = build(name, causal, token_shift=True)
    mask = torch.rand(1, LENGTH) > 0.3
    with small_parts():
        packing = mixer.describe((1, LENGTH), mask, torch.tensor([0, 3, 3, LENGTH]), device=mask.device)
    far = without_values(packing)
    x = torch.zeros(1, LENGTH, D_MODEL, device="meta", requires_grad=True)
    out = far.unpack(mixer.to("meta")(far.pack(x), packing=far))
    out.sum().backward()
    assert out.shape == x.shape


@every_mechanism_in_both_directions
def test_prepare_makes_the_rotations_that_a_mixer_reads(name: str, causal: bool) -> None:
    mixer = build(name, causal)
    mixer.prepare(packing := mixer.describe((2, LENGTH), device=torch.device("cpu")))
    prepared = set(packing.memo)
    mixer(torch.randn(packing.count, D_MODEL), packing=packing)
    assert not any("rotations" in key for key in set(packing.memo) - prepared)


def shifted(_module: nn.Module, _inputs: Any, normed: Tensor) -> Tensor:
    """The definition of the token shift, for rows that are whole documents."""
    rows, half = normed.view(-1, LENGTH, D_MODEL), D_MODEL // 2
    before = torch.cat([torch.zeros_like(rows[:, :1, :half]), rows[:, :-1, :half]], 1)
    return torch.cat([before, rows[..., half:]], -1).flatten(0, 1)


@some_mixers_in_both_directions
def test_token_shift_takes_the_token_before_of_the_same_document(name: str, causal: bool) -> None:
    """In whole rows, it is its definition; that padding, packs and streams are read as whole rows is a promise of mixers."""
    mixer = build(name, causal, token_shift=True).double()
    check_mixer(mixer)
    definition = copy.deepcopy(mixer)
    definition.token_shift = False
    definition.norm.register_forward_hook(shifted)
    x = torch.randn(3, LENGTH, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), definition(x), atol=1e-10, rtol=1e-10)


def test_half_of_an_odd_width_is_the_larger_one() -> None:
    assert FLASH(7, d_qk=4, token_shift=True).shifted_width == torch.zeros(7).chunk(2)[0].shape[0]


class OfAUser(nn.Module):
    """A linear map without a weight of that name, as adapters are written."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


@every_mechanism
def test_projection_may_be_a_module_of_the_user(name: str) -> None:
    causal = name in CAUSAL
    mixer, x = build(name, causal).eval(), torch.randn(2, LENGTH, D_MODEL)
    adapted = copy.deepcopy(mixer)
    for module in list(adapted.modules()):
        for part, child in module.named_children():
            if isinstance(child, nn.Linear) and not isinstance(module, OfAUser):
                setattr(module, part, OfAUser(child))
    assert any(isinstance(module, OfAUser) for module in adapted.modules())
    torch.testing.assert_close(adapted(x), mixer(x), atol=1e-5, rtol=1e-5)
    if causal:
        with torch.no_grad():
            begun, state = adapted.extend(x[:, :5], None)
            torch.testing.assert_close(
                torch.cat([begun, adapted.extend(x[:, 5:], state)[0]], 1), mixer(x), atol=1e-5, rtol=1e-5
            )


@some_mixers_in_both_directions
def test_norm_may_have_no_parameters(name: str, causal: bool) -> None:
    mixer, x = build(name, causal), torch.randn(2, LENGTH, D_MODEL)
    torch.nn.init.ones_(mixer.norm.weight)
    torch.nn.init.zeros_(mixer.norm.bias)
    bare = copy.deepcopy(mixer)
    bare.norm = nn.LayerNorm(D_MODEL, elementwise_affine=False)
    torch.testing.assert_close(bare(x), mixer(x))
    if causal:
        torch.testing.assert_close(bare.extend(x, None)[0], mixer.extend(x, None)[0])
