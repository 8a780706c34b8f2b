"""What a model asks of a device: no copies to the host, no float64 where there is none, sums in fp32, maps of any form.

The meta device has no values, so that whoever looks at one fails. It also stands for Apple's GPUs, which have no float64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lineartime
from lineartime.generation import Sampling
from lineartime.generation.decoding import pick
from lineartime.layers import FLASH, mixer
from lineartime.models import backbone
from lineartime.ops import positions
from lineartime.ops.modes import look_up
from lineartime.ops.packing import describe
from lineartime.ops.state import State

META = torch.device("meta")
OPTIONS: dict[str, Any] = {"d_model": 16, "d_qk": 8, "vocab_size": 30}

# Copies to the host ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "token_shift"), [("flash-tiny", False), ("flash-next-tiny", True), ("flash-quad-tiny", True)]
)
def test_steps_of_training_and_decoding_copy_nothing_to_the_host(preset: str, token_shift: bool) -> None:
    with META:
        model, ids = lineartime.build(preset, token_shift=token_shift, **OPTIONS), torch.zeros(2, 40, dtype=torch.long)
    loss = model.loss(ids, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()  # this is how a copy would show
    with torch.no_grad():
        _, state = model.extend(ids[:, :1])
        logits, state = model.extend(ids[:, :1], state)
        assert logits.shape == (2, 1, 30)
        for sampling in (Sampling(temperature=0.0), Sampling(1.0, 5, 0.9)):
            assert pick(logits[:, 0], sampling, torch.zeros(2, device=META)).shape == (2,)


@pytest.mark.parametrize("preset", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny", "flash-weighted-tiny"])
def test_model_describes_a_batch_once_for_all_its_layers(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []  # for each description of a batch, in order, whether it is of streams

    def counting(*args: Any, **options: Any) -> Any:
        made.append("position" in options)
        return describe(*args, **options)

    for module in (mixer, backbone):
        monkeypatch.setattr(module, "describe", counting)
    model, ids = lineartime.build(preset, d_model=16, n_blocks=3), torch.randint(0, 258, (1, 40))
    model(ids)
    model(ids, mask=torch.rand(1, 40) > 0.3, cu_seqlens=torch.tensor([0, 7, 40]))
    assert made == [False] * 2
    model.extend(ids)
    assert made[2:] == [True]
    state = State.concatenate([model.extend(ids[:, :length])[1] for length in (5, 2)])
    made.clear()
    model.extend(torch.zeros(2, 1, dtype=torch.long), state)  # at different positions, which some mixers take one by one
    assert (made == [True]) == (preset != "flash-weighted-tiny")


# Precision ------------------------------------------------------------------------------------------------------------


class WithoutFloat64(TorchDispatchMode):
    """Fails as soon as an operation makes or takes a float64 tensor on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device == META:
                assert leaf.dtype not in (torch.float64, torch.complex128), f"{func} has a float64 tensor"
        return out


@pytest.mark.parametrize(  # one of each kind of positions, norms and sums
    "system", ["flash", "flash-quad", "transformer", "transformer++", "performer", "cosformer", "mixed-chunk", "linformer"]
)
def test_training_and_streaming_make_no_float64(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_cpu(at: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:  # as Apple's GPUs get it
        return at.new_empty(2, *at.shape, n, dtype=dtype)

    monkeypatch.setattr(positions, "_rotary_table", from_the_cpu)
    task: Any = "mlm" if system == "linformer" else "clm"
    model: Any = lineartime.build(f"{system}-tiny", task, n_blocks=1).to(META)
    ids = torch.zeros(2, 150, dtype=torch.long, device=META)
    with WithoutFloat64():
        model.loss(ids, ids).backward()
        if task == "clm":
            _, state = model.extend(ids, model.init_state(2))
            model.extend(ids[:, :3], state)


TOKENS = 4096  # a sum over tokens that is taken in bf16 stops growing at 256 equal parts


def assert_gradients_are_close(model: nn.Module, inputs: Tensor, half: nn.Module, *, autocast: bool) -> None:
    """Compare the gradients of `half` with those of a model in fp32 that has the same weights."""
    gradients = []
    for each, enabled in ((model, False), (half, autocast)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logits = each(inputs)
        F.cross_entropy(logits.float().flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % 3).backward()
        gradients.append({name: parameter.grad.float() for name, parameter in each.named_parameters()})
    for name, exact in gradients[0].items():
        assert (gradients[1][name] - exact).norm() / exact.norm() < 0.1, name


@pytest.mark.parametrize(
    ("system", "options"),
    [
        ("flash", {"d_qk": 8, "chunk_size": 32}),  # a table of relative biases
        ("combiner", {"n_heads": 2, "chunk_size": 32}),  # a norm of summaries
        ("flash-quad", {"d_qk": 8}),  # rotary biases
        ("transformer", {"n_heads": 2, "absolute_position": "learned", "max_positions": TOKENS // 16}),
    ],
)
def test_sums_over_tokens_of_a_bf16_model_are_exact(system: str, options: dict[str, int]) -> None:
    sizes = {"d_model": 16, "n_blocks": 1, "vocab_size": 8, **options}
    model, half = (lineartime.build(f"{system}-tiny", **sizes) for _ in range(2))
    half.load_state_dict(model.state_dict())
    assert_gradients_are_close(model, torch.randint(8, (16, TOKENS // 16)), half.bfloat16(), autocast=False)


def test_norms_of_layers_sum_over_tokens_in_fp32_under_autocast() -> None:
    model, half = (nn.Sequential(nn.Linear(3, 16), FLASH(16, d_qk=8, chunk_size=32), nn.Linear(16, 3)) for _ in range(2))
    half.load_state_dict(model.state_dict())  # under autocast, bf16 enters the layer
    assert_gradients_are_close(model, torch.randn(4, TOKENS // 4, 3), half, autocast=True)


@pytest.mark.parametrize("width", [(), (4,)])  # a table of biases, and of vectors
def test_rows_that_are_looked_up_often_get_all_of_their_gradient(width: tuple[int, ...]) -> None:
    table = torch.zeros(3, *width, dtype=torch.bfloat16, requires_grad=True)
    look_up(table, torch.zeros(TOKENS, dtype=torch.long)).sum().backward()
    assert table.grad is not None
    assert table.grad[0].unique().item() == TOKENS


# Dense maps whose weights another library keeps in a form of its own, as quantisation does ------------------------------


class Packed(Tensor):
    """A weight that knows nothing but `F.linear`: it has no numbers of its own to read."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Packed":
        packed = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        packed.inner = inner
        return packed

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.linear:
            return F.linear(args[0], args[1].inner, *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise AssertionError(f"{function} reads weights that have no numbers")


ONE_OF_EACH = {config.mixer.kind: name for name, config in lineartime.presets().items() if name.endswith("-tiny")}
CASES = [(name, 1) for name in sorted(ONE_OF_EACH.values())]
CASES += [("flash-tiny", 6), ("transformer++-tiny", 6)]  # many rows are another form of the maps


@pytest.mark.parametrize(("preset", "n_streams"), CASES)
def test_packed_weights_give_what_the_weights_give(preset: str, n_streams: int) -> None:
    model: Any = lineartime.build(preset, d_model=32, n_blocks=2, vocab_size=30).eval()
    ids = torch.randint(0, 30, (n_streams, 12))
    with torch.no_grad():
        expected = model(ids)
        maps = [part for part in model.modules() if isinstance(part, nn.Linear)]
        for part in maps:
            part.weight = nn.Parameter(Packed(part.weight.detach()), requires_grad=False)
        assert maps
        torch.testing.assert_close(model(ids), expected)
        read, state = model.extend(ids[:, :5])
        decoder, steps = model.compile_for_decoding(), []
        for tokens in ids[:, 5:].T:
            logits, state = decoder.extend(tokens, state)
            steps.append(logits)
    torch.testing.assert_close(torch.cat([read, torch.stack(steps, 1)], 1), expected, atol=1e-5, rtol=1e-5)
