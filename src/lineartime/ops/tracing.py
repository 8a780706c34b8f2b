"""Whether PyTorch traces or transforms a computation, and whether plain code can read the memory of a tensor."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


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


def is_known(condition: bool) -> bool:
    """Whether a condition on sizes holds: in compiled code, for all sizes that the code is for; in exported code, never.

    Otherwise, code for any length would be compiled once where the condition holds, and again where it does not.
    """
    if is_exporting():
        return False
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a third of a second to import

        return statically_known_true(condition)
    return condition


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
