"""The kernels run on the GPU where there is one, and in Triton's interpreter, on the CPU, where there is none."""

import importlib
import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = tuple(f"lineartime.ops.triton.{name}" for name in ("quadratic_kernels", "quadratic", "mixed_chunk", "cross_entropy"))


def interpret_kernels() -> None:
    """Import the kernels for the interpreter, which is chosen by what the environment says when a kernel is defined."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in KERNELS:
            importlib.import_module(name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
    repair_interpreter()


def repair_interpreter() -> None:
    """Teach the interpreter bfloat16 and tf32, and not to search all of Triton at every call of a function in a kernel.

    As it comes, it rounds to bfloat16 by truncation, multiplies the bit patterns of bfloat16, and multiplies tf32, and what is
    split into three products of tf32, exactly.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    jit: Any = importlib.import_module("triton.runtime.jit")
    tl: Any = importlib.import_module("triton.language")
    cast, dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        data = torch.tensor(x.data.view(np.int16)).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(data, tl.float32)

    def truncated(x: Any) -> Any:
        return interpreter.TensorHandle((x.data.view(np.uint32) & 0xFFFFE000).view(np.float32), tl.float32)

    def split(x: Any) -> tuple[Any, Any]:
        first = truncated(x)
        return first, truncated(interpreter.TensorHandle(x.data - first.data, tl.float32))

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = torch.tensor(src.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits, tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return widened(src)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        assert a.dtype.scalar == b.dtype.scalar, "a GPU multiplies only what has the same type"
        if a.dtype.scalar == tl.bfloat16:
            a, b = widened(a), widened(b)
        elif a.dtype.scalar == tl.float32 and str(input_precision).endswith("TF32x3"):
            (a, a_rest), (b, b_rest) = split(a), split(b)
            d = dot(self, a_rest, b, d, input_precision, max_num_imprecise_acc)
            d = dot(self, a, b_rest, d, input_precision, max_num_imprecise_acc)
        elif a.dtype.scalar == tl.float32 and str(input_precision).endswith("TF32"):
            a, b = truncated(a), truncated(b)
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    # Where Triton was imported before, for something else, its own functions are made for a compiler.
    for module in (tl, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, jit.JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(function.fn))

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpretedFunction.__call__ = call


if DEVICE == "cpu" and find_spec("triton") is not None:
    interpret_kernels()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton find the environment as it was when the kernels were defined; other tests need not know."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all that the kernels' functions have allocated so far, and filled with NaN: what is not written shows."""
    shapes: list[tuple[int, ...]] = []

    def poisoned(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        shapes.append(tuple(shape))
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    for name in KERNELS:
        monkeypatch.setattr(importlib.import_module(name), "workspace", poisoned)
    return shapes


@pytest.fixture
def device() -> str:
    return DEVICE
