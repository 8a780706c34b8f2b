"""What a training step costs on a GPU, counted without one: `python benchmarks/gpu_count.py [PRESET ...]`.

PyTorch traces a step of 65,536 tokens in bf16 with tensors that hold no numbers. CUDA Inductor then lowers, schedules and
writes kernels for a GPU that is only pretended. Triton compiles nothing, and nothing runs. Needs triton and g++.

    products   FLOPs by dtype, and the bytes of their operands and results
    moved      bytes that all other kernels read and write: of each tensor, what a kernel's index reaches
    kept       bytes that the forward pass leaves for the backward pass
    kernels, graphs, breaks        of a block: launched, compiled, and how often the compiler gave up within one

A block is counted alone, as the trainer compiles it, and `in a stack`: two blocks compiled together, less one. A step is all
blocks, the loss, which is not compiled, and AdamW. The forecast takes for each product the longer of the times of its
operations and of its bytes, and for each other kernel that of its bytes, at rates that a GPU reaches in practice.

What it cannot know: what is read from a cache of the GPU, how well a kernel uses the memory, and idle time between kernels. The
traced autocast is that of a CPU.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
from measure import RESULTS
from peer import FlashPytorch
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V as VIRTUALIZED
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lineartime.layers import GAU, set_backend
from lineartime.models.cost import cost
from lineartime.models.language_model import LanguageModel, build_model
from lineartime.models.systems import resolve
from lineartime.ops import cross_entropy, describe
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.packing import Packing
from lineartime.ops.triton import kernels
from lineartime.units import markdown_table

TOKENS = 65536
PRESETS = "flash-base", "flash-quad-base", "transformer++-base"
PEER = "flash-pytorch"
OUTSIDE = "ExternKernelSchedulerNode", "NopKernelSchedulerNode"
"""What Inductor does not write itself: products, and views."""
ATTENTION = "_scaled_dot_product"
ALLOCATES = "empty", "new_", "zeros", "ones", "detach"
ADAMW = 28
"""Bytes that fused AdamW moves for a parameter in float32: it reads p, g, m and v, and writes p, m and v."""


@dataclass(frozen=True)
class Gpu:
    """FLOP/s by dtype and bytes/s of a GPU: what it reaches, not what is printed on it."""

    name: str
    bandwidth: float
    bf16: float = 700e12
    fp32: float = 50e12
    attention: float = 400e12  # fused softmax attention, forward and backward together

    def seconds(self, work: "Work") -> float:
        """The time of one kernel."""
        rate = self.attention if work.what.startswith(ATTENTION) else self.bf16 if work.dtype == "bfloat16" else self.fp32
        return max(work.flops / rate, work.bytes / self.bandwidth)


GPUS = Gpu("H200", 4.0e12), Gpu("H100", 2.8e12)


@dataclass(frozen=True)
class Work:
    """One kernel: what it computes, its FLOPs, which are 0 outside of products, and the bytes that it moves."""

    what: str
    dtype: str
    flops: float
    bytes: float
    backward: bool = False


@dataclass
class Count:
    """All kernels of a computation, the bytes kept for its backward pass, compiled graphs, and where the compiler gave up."""

    work: list[Work] = field(default_factory=list)
    kept: int = 0
    graphs: int = 0
    breaks: int = 0

    def figures(self) -> "Figures":
        """All that is counted, by name."""
        products, others = ([work for work in self.work if bool(work.flops) is each] for each in (True, False))
        dtypes = sorted({work.dtype for work in products})
        return {
            **{f"MFLOP {dtype}": sum(work.flops for work in products if work.dtype == dtype) / 1e6 for dtype in dtypes},
            "products kB": sum(work.bytes for work in products) / 1e3,
            "moved kB": sum(work.bytes for work in others) / 1e3,
            "kept kB": self.kept / 1e3,
            "kernels": len(others),
            "graphs": self.graphs,
            "breaks": self.breaks,
            **{f"{gpu.name} ms": 1e3 * sum(map(gpu.seconds, self.work)) for gpu in GPUS},
        }


Figures = dict[str, float]
"""What a computation costs, by name."""


def combined(*parts: tuple[float, Figures]) -> Figures:
    """The sum of figures, each times a number."""
    names = dict.fromkeys(name for _, part in parts for name in part)
    return {name: sum(times * part.get(name, 0.0) for times, part in parts) for name in names}


# A GPU that is not there ------------------------------------------------------------------------------------------------

PROPERTIES = SimpleNamespace(
    gcnArchName="sm_90", name="H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=140 << 30,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0), "get_device_name": "H200", "get_rng_state": torch.zeros(16), "set_rng_state": None,
    "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None, "current_stream": None, "synchronize": None,
    "is_bf16_supported": True,
}  # fmt: skip
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device device(DeviceType::CUDA, 0);
static const Stream stream(Stream::DEFAULT, device);
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream exchangeStream(Stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
static impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
"""


@cache
def register_guard() -> None:
    """Register a device guard that does nothing: PyTorch for CPUs has none for CUDA, which copies of tensors ask for."""
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

    with tempfile.TemporaryDirectory() as folder:
        library, headers = f"{folder}/guard.so", [f"-I{path}" for path in include_paths()]
        command = ["g++", "-std=c++20", "-shared", "-fPIC", *headers, "-x", "c++", "-", "-o", library]
        subprocess.run([*command, f"-L{TORCH_LIB_PATH}", "-lc10"], input=GUARD.encode(), check=True)
        ctypes.CDLL(library)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let PyTorch believe in one H200."""
    register_guard()
    with contextlib.ExitStack() as stack:
        for name, answer in ANSWERS.items():
            reply = partial(_answer, answer)
            stack.enter_context(mock.patch.object(torch.cuda, name, reply))
            if name in vars(CudaInterface):
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(reply)))
            if name in ("get_device_properties", "current_device"):
                stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(reply)))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", partial(_answer, "none")))
        _triton.has_triton.cache_clear()
        stack.callback(_triton.has_triton.cache_clear)
        yield


def _answer(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def on_gpu(x: Any, mode: FakeTensorMode) -> Any:
    """A tensor without numbers, on the GPU."""
    if not isinstance(x, Tensor):
        return x
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cuda", 0))


# Counting ---------------------------------------------------------------------------------------------------------------


class Counted(BaseException):  # which nothing catches on the way
    """All kernels are counted, and need not be compiled."""


def product(function: Any, arguments: Sequence[Any], options: dict[str, Any], out: Any, backward: bool) -> Work | None:
    """The work of a product or of fused attention; None for another function."""
    packet = getattr(function, "overloadpacket", None)
    name = str(packet).removeprefix("aten.")
    tensors = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
    moved = sum(map(size, tensors)) + sum(size(x) for x in tree_leaves(out) if isinstance(x, Tensor))
    if name.startswith(ATTENTION):  # causal: half of all pairs; two products forward, five backward
        shape, keys = tensors[backward].shape, tensors[1 + backward].shape[-2]
        flops = shape.numel() * keys * (5 if backward else 2)
    elif packet in flop_registry:
        flops = flop_registry[packet](*arguments, **options, out_val=out)
    else:
        return None
    return Work(name, str(tensors[0].dtype).removeprefix("torch."), float(flops), float(moved), backward)


def size(x: Tensor) -> int:
    """The bytes that a tensor reaches: an expanded dimension is read once."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


def reached(node: Any) -> float:
    """Bytes that a kernel moves: of each tensor, what its indices reach, but at most all of it.

    Inductor's own count takes whole tensors where it fuses, and an order between two writes in place for a read.
    """
    graph = VIRTUALIZED.graph

    def number(expression: Any) -> int:
        return int(graph.sizevars.optimization_hint(expression, fallback=0))

    outside = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)  # not what lives in registers
    mutates = any(output.get_mutations() for output in node.get_outputs())
    found: dict[str, dict[Any, float]] = {}
    for access in node.read_writes.reads | node.read_writes.writes:
        by_index = isinstance(access, MemoryDep)
        if access.name in outside and (by_index or not (mutates or isinstance(access, WeakDep))):
            key, elements = None, math.inf
            if by_index:
                key = str(access.index), tuple(map(str, access.size))
                used = zip(access.var_names, access.size, strict=True)
                elements = math.prod(number(n) for variable, n in used if variable in access.index.free_symbols)
            found.setdefault(access.name, {})[key] = elements
    moved = 0.0
    for name, accesses in found.items():
        tensor = graph.name_to_buffer.get(name) or graph.graph_inputs[name]
        moved += min(sum(accesses.values()), number(tensor.get_numel())) * tensor.get_dtype().itemsize
    return moved


class Compiler:
    """A backend of torch.compile that counts, and returns functions of tensors without numbers."""

    def __init__(self) -> None:
        self.count = Count()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        run = torch.fx.GraphModule(graph, torch.fx.Graph())
        run.graph.output(run.graph.graph_copy(graph.graph, {}))
        run.recompile()
        mode, backward = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor)), bool(options.get("is_backward"))
        values = {node: node.meta["val"] for node in graph.graph.nodes if "val" in node.meta}
        for node in graph.graph.nodes:
            arguments: Any = torch.fx.map_arg(node.args, lambda given: values.get(given, given))
            if work := product(node.target, arguments, node.kwargs, values.get(node), backward):
                self.count.work.append(work)
        if not backward:
            left: Any = graph.graph.output_node()
            results = {left.args[0][place] for place in left.meta["user_visible_output_idxs"]}
            static = set(options["static_input_idxs"])
            parameters = {node for place, node in enumerate(graph.graph.find_nodes(op="placeholder")) if place in static}
            kept = (node for node in left.all_input_nodes if node in values and node not in results | parameters)
            self.count.kept += sum(map(size, (values[node] for node in kept)))
            self.count.graphs += 1
        with mode:
            for node in graph.graph.nodes:
                node.meta.pop("tensor_meta", None)
                if "val" in node.meta:
                    node.meta["val"] = tree_map(partial(on_gpu, mode=mode), node.meta["val"])
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            graph.recompile()
            inputs = [on_gpu(x, mode) for x in inputs]
        until_code = mock.patch.object(GraphLowering, "compile_to_module", self._kernels())
        with contextlib.suppress(Counted), pretended_gpu(), until_code:
            compile_fx.compile_fx_inner(graph, inputs, **options)
        return make_boxed_func(run.forward)

    def _kernels(self) -> Callable[[GraphLowering], None]:
        """In place of the method that writes a module: schedule and write the kernels, count them, and stop."""

        def count(lowered: GraphLowering) -> None:
            lowered.codegen()
            for node in lowered.scheduler.nodes:
                if type(node).__name__ not in OUTSIDE:
                    self.count.work.append(Work(origins(node), "", 0.0, reached(node), bool(lowered.is_backward)))
            raise Counted

        return count


def origins(node: Any) -> str:
    """The operators that a kernel fuses."""
    found = [str(of.target) for part in node.get_nodes() for of in getattr(part.node, "origins", ())]
    return " ".join(dict.fromkeys(name.removeprefix("aten.").split(".")[0] for name in found))


class Operators(TorchDispatchMode):
    """Counts operators that nobody compiles: each is a kernel that reads its inputs and writes its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Count()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, function.overloadpacket.__name__
        with self:  # look inside; in the loss, the GPU's kernel stands in place of operators
            if function is cross_entropy._operator:
                return cross_entropy._linear_cross_entropy(*args)
            if function is torch.ops.aten.matmul.default:
                return function.decompose(*args, **options)
        out = function(*args, **options)
        if work := product(function, args, options, out, backward=False):
            self.count.work.append(work)
        elif not function.is_view and isinstance(tree_leaves(out)[0], Tensor) and not name.startswith(ALLOCATES):
            moved = sum(size(x) for x in tree_leaves((args, options, out)) if isinstance(x, Tensor))
            self.count.work.append(Work(name, "", 0.0, float(moved)))
        return out

    def loss_kernel(self, logits: Tensor, targets: Tensor, ignored: int, keep: bool) -> Tensor:
        """In place of `kernels.cross_entropy_`, which reads logits and writes their gradient in their place."""
        self.count.work.append(Work("cross_entropy_", "", 0.0, float(size(logits) * (1 + keep))))
        return logits.new_empty(len(logits), dtype=torch.float32)


def of_step(forward: Callable[[], Tensor]) -> None:
    """A forward pass in bf16, and its backward pass."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = forward()
    out.float().sum().backward()


def compiled(build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> Count:
    """Count a step of a module, compiled, with the arguments that come with it."""
    torch.compiler.reset()
    counters.clear()
    compiler = Compiler()
    uncached = inductor.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with FakeTensorMode(allow_non_fake_inputs=True), uncached[0], uncached[1]:
        module, arguments = build()
        of_step(partial(torch.compile(module, dynamic=False, backend=compiler), *arguments))
    compiler.count.breaks = sum(counters["graph_break"].values())
    return compiler.count


class Blocks(nn.Module):
    """Some blocks of a model, one after the other."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.blocks = model.backbone.blocks

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        for block in self.blocks:
            x = block(x, packing)
        return x


def model_of(preset: str, n_blocks: int) -> LanguageModel:
    """A model with fewer blocks, as it runs on a GPU where no kernel is taken: its attention is plain PyTorch."""
    model = build_model(dataclasses.replace(resolve(preset, "clm"), n_blocks=n_blocks))
    if any(isinstance(layer, GAU) for layer in model.modules()):
        set_backend(model, "torch")
    return model


def of_blocks(preset: str, n_blocks: int, length: int) -> Count:
    """A step of some blocks, compiled together."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        model = model_of(preset, n_blocks)
        packing = describe((TOKENS // length, length), device=torch.device("cpu"))
        next(iter(model.backbone.blocks)).mixer.prepare(packing)
        return Blocks(model), (torch.randn(TOKENS, model.config.d_model, requires_grad=True), packing)

    return compiled(build)


def of_rest(preset: str) -> Count:
    """What a step computes outside of blocks, without the compiler: embedding, final norm, logits and loss."""
    operators = Operators()
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.dict(cross_entropy.LOGITS, cpu=cross_entropy.LOGITS["cuda"]))
        stack.enter_context(mock.patch.object(cross_entropy, "_can_fuse", partial(_answer, True)))
        stack.enter_context(mock.patch.object(cross_entropy, "is_readable", partial(_answer, False)))
        stack.enter_context(mock.patch.object(kernels, "cross_entropy_", operators.loss_kernel))
        backbone = model_of(preset, 1).backbone
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        with operators:
            of_step(lambda: linear_cross_entropy(backbone.norm(backbone.embedding(ids)), backbone.embedding.weight, ids))
    return operators.count


def of_peer(n_blocks: int, length: int) -> Count:
    """A step of FLASH-pytorch at the sizes of flash-base, compiled whole."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = FlashPytorch(dataclasses.replace(resolve("flash-base", "clm"), n_blocks=n_blocks))

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.model(ids).float().flatten(0, 1), ids.flatten())

    return compiled(lambda: (Loss(), (torch.zeros(TOKENS // length, length, dtype=torch.long),)))


def adamw(preset: str) -> Figures:
    """The figures of fused AdamW."""
    moved = ADAMW * cost(resolve(preset, "clm"), 1).parameters
    return Count([Work("adamw", "", 0.0, float(moved))]).figures()


def rows_of(preset: str, length: int) -> Iterator[tuple[str, Figures]]:
    """The rows of a preset in the table."""
    one, two = (of_blocks(preset, n, length).figures() for n in (1, 2))
    n_blocks, rest = resolve(preset, "clm").n_blocks, combined((1, of_rest(preset).figures()), (1, adamw(preset)))
    yield f"{preset}, a block", one
    yield f"{preset}, a block in a stack", combined((1, two), (-1, one))
    yield f"{preset}, loss and AdamW", rest
    yield f"{preset}, a step", combined((n_blocks, one), (1, rest))


def rows_of_peer(length: int) -> Iterator[tuple[str, Figures]]:
    """The rows of FLASH-pytorch, whose blocks are compiled with the loss."""
    one, two = (of_peer(n, length).figures() for n in (1, 2))
    block, n_blocks = combined((1, two), (-1, one)), resolve("flash-base", "clm").n_blocks
    yield f"{PEER}, a block in a stack", block
    yield f"{PEER}, a step", combined((1, one), (n_blocks - 1, block), (1, adamw("flash-base")))


def as_table(rows: dict[str, Figures]) -> str:
    """MFLOP and kB a token, ms of all tokens."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    head = [f"PyTorch {torch.__version__}, {TOKENS:,} tokens; MFLOP and kB are of one token.", ""]

    def shown(name: str, value: float) -> str:
        of_token = name.startswith("MFLOP") or name.endswith("kB")
        return f"{value / TOKENS:,.1f}" if of_token else f"{value:,.1f}".removesuffix(".0")

    cells = [[title, *(shown(name, row.get(name, 0.0)) for name in names)] for title, row in rows.items()]
    return "\n".join(head) + "\n" + markdown_table(["", *names], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=[*PRESETS, PEER], help=f"presets, or {PEER}; these by default")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    options = parser.parse_args()
    rows: dict[str, Figures] = {}
    for preset in options.presets:
        rows |= rows_of_peer(options.length) if preset == PEER else rows_of(preset, options.length)
        print(as_table(rows), flush=True)
    (RESULTS / "gpu_count.md").write_text(as_table(rows))


if __name__ == "__main__":
    main()
