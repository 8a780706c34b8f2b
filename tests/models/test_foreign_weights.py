"""Dense maps whose weights another library keeps in a form of its own, as quantisation does, in every form of a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lineartime
from lineartime.models.language_model import CausalLM

TINY = {name: config for name, config in lineartime.presets().items() if name.endswith("-tiny")}


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


CASES = [(name, 1) for name in sorted({config.mixer.kind: name for name, config in TINY.items()}.values())]
CASES += [("flash-tiny", 6), ("transformer++-tiny", 6)]  # many rows are another form of the maps


@pytest.mark.parametrize(("preset", "n_streams"), CASES)
def test_packed_weights_give_what_the_weights_give(preset: str, n_streams: int) -> None:
    sizes: dict[str, Any] = {"d_model": 32, "n_blocks": 2, "vocab_size": 30}
    model = lineartime.build(preset, **sizes).eval()
    assert isinstance(model, CausalLM)
    ids = torch.randint(0, 30, (n_streams, 12))
    with torch.no_grad():
        expected = model(ids)
        packed = 0
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(Packed(part.weight.detach()), requires_grad=False)
                packed += 1
        assert packed
        torch.testing.assert_close(model(ids), expected)
        read, state = model.extend(ids[:, :5])
        decoder, steps = model.compile_for_decoding(), []
        for tokens in ids[:, 5:].T:
            logits, state = decoder.extend(tokens, state)
            steps.append(logits)
    torch.testing.assert_close(torch.cat([read, torch.stack(steps, 1)], 1), expected, atol=1e-5, rtol=1e-5)
