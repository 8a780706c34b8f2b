"""How PyTorch runs an op: whether it traces or transforms it, and in which dtypes the op computes, also under autocast."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from lineartime.machine import faster_precision


def under_transform() -> bool:
    """Whether a transform of torch.func (grad, jvp, vmap, ...) or a forward-mode derivative is being computed.

    An operator has no rule for these: a forward-mode derivative through it would be zero, without an error.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_traced() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace records the computation."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exporting() -> bool:
    """Whether torch.export records the computation. PyTorch 2.11 compiles `torch.compiler.is_exporting` as if it were true."""
    return torch.compiler._is_exporting_flag


def is_trained_compiled() -> bool:
    """Whether torch.compile records a computation to be differentiated: once, for it has no second derivatives."""
    return is_traced() and torch.is_grad_enabled() and not is_exporting() and not under_transform()


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a C++ function may read and write these tensors without PyTorch seeing it.

    The tensors must be contiguous and on the CPU, and nothing may differentiate, trace or intercept the computation.
    """
    if is_traced() or under_transform() or torch.is_autocast_enabled("cpu"):
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    with_gradients = torch.is_grad_enabled()
    return all(x is None or (has_plain_memory(x) and not (with_gradients and x.requires_grad)) for x in tensors)


def has_plain_memory(x: Tensor) -> bool:
    """Whether a tensor is of PyTorch's own class, on the CPU and contiguous."""
    return type(x) in (Tensor, Parameter) and x.device.type == "cpu" and x.is_contiguous()


AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)
"""The types of devices that have autocast: meta, for instance, has none. PyTorch 2.11 cannot compile the question."""


def matmul_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which an op multiplies matrices: that of its inputs, or that of autocast if it is on.

    It is never float16: a score above 256 overflows once squared, so float16 inputs are multiplied in float32. So are those of
    bfloat16 on processors that are faster in float32.
    """
    dtype = common_dtype(*tensors)
    return torch.float32 if dtype == torch.float16 or (dtype == torch.bfloat16 and widens(tensors[0])) else dtype


def widens(tensor: Tensor) -> bool:
    """Whether a product of bfloat16 is computed in float32, because the processor is faster so; not in code that is traced."""
    return tensor.device.type == "cpu" and not is_traced() and autocast_dtype(tensor) is None and _is_fp32_faster()


@cache
def _is_fp32_faster() -> bool:
    return faster_precision(torch.device("cpu"))[0] == "fp32"


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """The common dtype of tensors, or that of autocast if it is on; for kernels, which convert float16 themselves."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype if dtype == torch.float64 else autocast_dtype(tensors[0]) or dtype


def acc_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which sums of such numbers are accumulated: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def look_up(table: Tensor, places: Tensor) -> Tensor:
    """Rows of a table [N] or [N, d] at int places [...] -> [...] or [..., d], whose gradients are summed in float32 or better.

    PyTorch's kernels for a CPU sum them in the dtype of the table: in bfloat16, the gradient of a row stops growing after 256
    equal parts.
    """
    summed = table.device.type == "cpu" and table.requires_grad and torch.is_grad_enabled()
    wide = table.to(acc_dtype(table)) if summed else table
    return (F.embedding(places, wide) if wide.dim() == 2 else wide[places]).to(table.dtype)


def output_dtype(values: Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype that an op returns: the dtype of its values or, under autocast, the dtype in which it computes."""
    return values.dtype if autocast_dtype(values) is None else compute


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """A context without autocast, in which the op itself chooses the dtypes."""
    if tensor.device.type not in AUTOCAST:
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of a tensor, or None if autocast is off."""
    device = tensor.device.type
    if device in AUTOCAST and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
