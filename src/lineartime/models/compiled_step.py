"""The step of joined streams as one compiled function.

With one stream, each linear layer of a step multiplies one row by a matrix, which takes as long as reading the matrix from
memory. Matrix libraries read it at a third of the memory bandwidth. The code that torch.compile generates for a sum of
products reads it at nearly the full bandwidth, and computes norms and gates in the same pass.

Shapes: B streams, V vocabulary, K width of an input, N width of an output.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lineartime.ops.precision import acc_dtype, autocast_dtype

if TYPE_CHECKING:
    from lineartime.models.language_model import CausalLM
    from lineartime.models.streams import BackboneState

CompiledStep = Callable[["CausalLM", Tensor, "BackboneState"], Tensor]
_numbers = count()


def compiled_step() -> CompiledStep:
    """The compiled step of a model or its copies, for streams that it joined: ids [B, 1] -> logits [B, 1, V].

    The arguments are not checked. The first call compiles the step.
    """

    def step(model: "CausalLM", ids: Tensor, streams: "BackboneState") -> Tensor:
        with OneRowProducts():
            return model.logits(model.backbone.step_embedded(model.backbone.embedding(ids), streams))

    # PyTorch limits how often a code object is compiled, so each model gets its own. PyTorch also remembers the sizes
    # it has seen by the name of the code: under a shared name, sizes that differ between models would become dynamic.
    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    compiled: CompiledStep = torch.compile(step, fullgraph=True, options={"guard_filter_fn": _checked_at_each_step})
    return compiled


def _checked_at_each_step(guards: Sequence[Any]) -> list[bool]:
    """Which guards are evaluated at each step: those on tensors and options, not the hundreds on hooks and globals."""
    hooks = ("EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT")
    return [not guard.is_global and guard.guard_type not in hooks for guard in guards]


class OneRowProducts(TorchFunctionMode):
    """Computes products of one row with a matrix as sums, if the values to be added are contiguous in memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or its equivalent for one row."""
        kwargs = kwargs or {}
        if function is F.linear and type(args[1]) in (Tensor, nn.Parameter) and _is_row(args[0], args[1].mT):
            return linear_row(*args, **kwargs)
        if function is torch.bmm and _is_row(*args):
            return bmm_row(*args)
        return function(*args, **kwargs)


def _is_row(x: Tensor, matrix: Tensor) -> bool:
    rows = 1 if matrix.dim() == 2 else len(matrix)
    return x.numel() == rows * x.shape[-1] and matrix.stride(-2) == 1 and autocast_dtype(x) is None


def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for one row: [..., K] with a weight [N, K] -> [..., N]."""
    dtype = acc_dtype(x)
    out = (x.reshape(1, -1).to(dtype) * weight.to(dtype)).sum(-1)
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def bmm_row(x: Tensor, matrices: Tensor) -> Tensor:
    """`torch.bmm` with one row per matrix: [B, 1, K] with [B, K, N] -> [B, 1, N]."""
    dtype = acc_dtype(x)
    return (x.to(dtype) * matrices.mT.to(dtype)).sum(-1)[:, None].to(x.dtype)
