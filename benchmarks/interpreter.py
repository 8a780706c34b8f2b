"""Import this first to repair Triton's interpreter, which runs kernels as Python on the CPU, for what our kernels do.

Unrepaired, it differs in these ways:

- It truncates to bfloat16 instead of rounding, and multiplies the bit patterns of bfloat16.
- It multiplies tf32 exactly, and so the three products of tf32 into which a product of float32 is split.
- It prepares the language at every call of a function in a kernel, which takes most of the time; once per kernel is enough.
- In Triton 3.6, the bounds of a loop are arrays of one number, which NumPy 2.4 no longer accepts as a number.
"""

# Triton may be absent, and has no types.
# mypy: disable-error-code="import-untyped, import-not-found"

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter, jit


@cache
def repair_interpreter() -> None:
    """Repair the interpreter for all kernels that it runs from now on.

    They differ from a GPU only in the order of sums, unless they add, compare or sum bfloat16 without a cast to float32: of
    bfloat16, only casts and products are repaired.
    """
    _build_exactly()
    _patch_all_of_the_language()
    interpreter.InterpretedFunction.__call__ = _call
    # Where Triton was imported before, for something else, its own functions are made for a compiler.
    for module in (tl, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, jit.JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(function.fn))


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


def _build_exactly() -> None:
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = torch.tensor(src.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits, tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return _widened(src)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        assert a.dtype.scalar == b.dtype.scalar, "a GPU multiplies only what has the same type"
        if a.dtype.scalar == tl.bfloat16:
            a, b = _widened(a), _widened(b)
        elif a.dtype.scalar == tl.float32 and str(input_precision).endswith("TF32x3"):
            (a, a_rest), (b, b_rest) = _split(a), _split(b)
            d = dot(self, a_rest, b, d, input_precision, max_num_imprecise_acc)
            d = dot(self, a, b_rest, d, input_precision, max_num_imprecise_acc)
        elif a.dtype.scalar == tl.float32 and str(input_precision).endswith("TF32"):
            a, b = _truncated(a), _truncated(b)
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def _widened(x: Any) -> Any:
    data = torch.tensor(x.data.view(np.int16)).view(torch.bfloat16).float().numpy()
    return interpreter.TensorHandle(data, tl.float32)


def _truncated(x: Any) -> Any:
    """What tensor cores read of float32."""
    return interpreter.TensorHandle((x.data.view(np.uint32) & 0xFFFFE000).view(np.float32), tl.float32)


def _rounded(x: Any) -> Any:
    """The instruction cvt.rna.tf32.f32, which the compiler takes to split float32."""
    return _truncated(interpreter.TensorHandle((x.data.view(np.uint32) + np.uint32(0x1000)).view(np.float32), tl.float32))


def _split(x: Any) -> tuple[Any, Any]:
    first = _rounded(x)
    return first, _rounded(interpreter.TensorHandle(x.data - first.data, tl.float32))


def _patch_all_of_the_language() -> None:
    patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def patch_lang(function: Any) -> Any:
        scope = patch(function)
        # Triton's own functions, such as tl.cumsum, call what is in tl.core.
        interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
        return scope

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_lang, patch_lang_tensor


if triton.knobs.runtime.interpret:
    repair_interpreter()
