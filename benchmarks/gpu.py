"""All checks that need a GPU, in one run: `python benchmarks/gpu.py`, or some parts by name.

    smoke        one shape in three dtypes: are values and gradients those of plain PyTorch in float64?
    models       training steps of flash-base and Transformer++ at 8K, as a share of the measured peak
    generation   a token by `extend`, by `extend` as a CUDA graph, and by one that draws the token, of the eager and of the
                 compiled step; a prompt beside a forward pass
    kernels      each kernel alone: TFLOP/s, GB/s, registers and spills
    lengths      the models at 1K and 64K, flash-quad, and flash-base without compilation
    ops          quadratic attention by kernels, beside the compiled PyTorch form; mixed chunk attention and a FLASH layer,
                 compiled and not
    peers        training steps of FLASH-pytorch
    exactness    smoke at more shapes

Runs from a clone and needs PyTorch with Triton, and numpy.
The most important parts come first; after --budget seconds, the rest is left out. Ends with status 1 if a part fails, or if a
goal is missed or not measured. `--rehearse` runs everything at small sizes, with the goals of exactness alone; on a CPU, set
TRITON_INTERPRET=1.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

import argparse
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import interpreter  # noqa: F401  # repaired before kernels are defined
import torch
import triton
from gpu_exactness import Computation, compared, op_and_gradients
from gpu_report import Goal, Report
from measure import median_seconds
from peer import MISSING, Peer
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel

import lineartime
from lineartime.bench.config import Mode
from lineartime.bench.measure import (
    Case,
    Subject,
    prepare,
    release,
    separate_compilations,
    state_after,
    synchronized,
)
from lineartime.generation.decoding import Sampling, continuing, drawing
from lineartime.generation.prompts import prefill_batch
from lineartime.layers import FLASH, set_backend
from lineartime.models import CausalLM
from lineartime.models.cost import cost
from lineartime.models.systems import resolve
from lineartime.ops import MixedChunkOptions, Scales, attend, describe
from lineartime.ops.backends import Backend
from lineartime.ops.mixed_chunk import reciprocal
from lineartime.ops.triton import kernels

LENGTHS = {1024: "1K", 8192: "8K", 65536: "64K"}
TOKENS = 65536
"""In a batch."""
PRODUCTS = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 1024, 4096), (8192, 4096, 16384))
"""Sizes m, n, k of products of [m, k] and [k, n]: square ones, and shapes that occur in models."""
SOFTMAX = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""What Transformer++ attends by: the first that can run. Names of its kernels say which did."""
EXACT = "exact"
KERNELS = kernels.attention_weights_kernel, kernels.score_gradient_kernel, kernels.cross_entropy_kernel
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def goals(rehearsal: bool) -> dict[str, Goal]:
    """By key; a rehearsal has no times that mean anything."""
    exact = {EXACT: Goal("error of the kernels / of PyTorch in the same dtype", 2, at_most=True)}
    bits = {"bits": Goal("share of calls that give the same bits twice", 1)}
    if rehearsal:
        return exact | bits
    shares = {f"share {n}": Goal(f"share of the peak, flash-base compiled, T = {name}", 0.45) for n, name in LENGTHS.items()}
    ratios = {
        f"transformer++ {n}": Goal(f"transformer++ / flash, compiled, T = {LENGTHS[n]}", limit)
        for n, limit in ((1024, 1.0), (8192, 1.6), (65536, 6.0))
    }
    return {
        **exact,
        **bits,
        **shares,
        **ratios,
        "flash-pytorch": Goal("FLASH-pytorch / flash, compiled, T = 8K", 3),
        "token": Goal("ms of a token at batch 1, drawn in a CUDA graph of the compiled step", 0.6, at_most=True),
        "prompt": Goal("forward pass / a prompt that leaves a state, T = 64K", 0.5),
    }


class Run:
    """The parts, for one device."""

    def __init__(self, report: Report, device: torch.device, small: bool, rounds: int, dtypes: list[str]) -> None:
        self.report, self.device, self.small, self.rounds, self.dtypes = report, device, small, rounds, dtypes
        self.size = "tiny" if small else "base"
        self.lengths_of_models = [64] if small else [8192, 1024, 65536]  # the most important first
        self.mode: Mode = "eager" if small else "compiled"
        self._peak = 1e12 if small else 0.0
        self._steps: dict[int, float | None] = {}  # milliseconds of FLASH, by length

    def seconds(self, step: Callable[[], object]) -> float | None:
        """The median seconds of a step; None if there is too little memory."""
        clock = partial(synchronized, self.device)
        return median_seconds({"": step}, self.rounds, clock, 0.0 if self.small else 0.2)[""]

    def seconds_of_kernel(self, launch: Callable[[], object]) -> float | None:
        """The same without the time of a launch, which may be longer than the kernel, and with the GPU's cache cleared."""
        if self.device.type != "cuda":
            return self.seconds(launch)
        milliseconds: float = triton.testing.do_bench(launch, return_mode="median")
        return milliseconds / 1e3

    @property
    def peak(self) -> float:
        """FLOP/s of the fastest of several matrix products in bf16, measured once."""
        for m, n, k in () if self._peak else PRODUCTS:
            a, b = (torch.randn(shape, dtype=torch.bfloat16, device=self.device) for shape in ((m, k), (k, n)))
            seconds = self.seconds(partial(torch.mm, a, b))
            self._peak = max(self._peak, 2 * m * n * k / (seconds or math.inf))
        return self._peak

    # Exactness --------------------------------------------------------------------------------------------------------

    def smoke(self) -> None:
        if len(self.dtypes) > 1:
            self._compile_side_by_side()
        self._check_all([(65, 16, 24)] if self.small else [(1000, 128, 1536)], causal=(True,))

    def exactness(self) -> None:
        self._check_all(
            [(17, 16, 24)] if self.small else [(1, 128, 256), (257, 64, 96), (2048, 512, 1024)], causal=(True, False)
        )

    def _compile_side_by_side(self) -> None:
        """Have a process for each dtype do the same first: compiling takes most of the time, and kernels stay on disk.

        A rehearsal in the interpreter compiles nothing: it starts one of them, to see that it runs.
        """
        with TemporaryDirectory(prefix="lineartime-gpu-") as folder:
            command = [sys.executable, __file__, "smoke", *(["--rehearse"] if self.small else []), "--out"]
            running = [
                subprocess.Popen([*command, f"{folder}/{dtype}", "--dtypes", dtype], stdout=subprocess.DEVNULL)
                for dtype in (self.dtypes[:1] if self.small else self.dtypes)
            ]
            try:
                for process in running:
                    process.wait()
            finally:
                for process in running:
                    process.kill()
                    process.wait()
            if not list(Path(folder).glob("*/gpu.json")):
                self.report.failed.append("smoke: the processes that should compile kernels wrote nothing")

    def _check_all(self, sizes: list[tuple[int, int, int]], causal: tuple[bool, ...]) -> None:
        for dtype in (DTYPES[name] for name in self.dtypes):
            for length, d_qk, d_value in sizes:
                inputs = [torch.randn(2, length, width, device=self.device) for width in (d_qk, d_qk, d_value)]
                bias = torch.randn(2 * length - 1, device=self.device)
                for each in causal:
                    run = op_and_gradients(dtype, inputs, bias, partial(attention, causal=each))
                    self._add_errors(f"quadratic, causal={each}", dtype, [*inputs[0].shape, d_value], run)

    def _add_errors(self, what: str, dtype: torch.dtype, shape: list[int], run: Computation) -> None:
        found = compared(dtype, run)
        if EXACT in self.report.goals:
            self.report.reach(EXACT, found.worst_ratio)
        self.report.reach("bits", float(found.same_bits))
        self.report.add("errors", what=what, dtype=str(dtype).removeprefix("torch."), shape=shape, **found.row())

    # Models -----------------------------------------------------------------------------------------------------------

    def models(self) -> None:
        """One model in memory at a time, at the length that matters most; each compilation may take a minute."""
        self._compare_at(self.lengths_of_models[0], profile=True)

    def lengths(self) -> None:
        """The other lengths, and models without a goal."""
        for length in self.lengths_of_models[1:]:
            self._compare_at(length)
        for length in self.lengths_of_models[:2]:
            self._time_model(self._subject("flash-quad", self.mode), length)
        self._time_model(self._subject("flash", "eager"), self.lengths_of_models[0])

    def peers(self) -> None:
        """What others have written, at the length that matters most; PyTorch compiles it whole, which takes minutes."""
        if MISSING:
            self.report.add("train", model="flash-pytorch", ms=f"not measured: {MISSING}")
        else:
            config, length = resolve(f"flash-{self.size}", "clm"), self.lengths_of_models[0]
            peer = self._time_model(Peer("flash-pytorch", self.mode, config), length)
            ours = self._steps.get(length)
            if not self.small and ours and peer:
                self.report.reach("flash-pytorch", peer / ours)
        self.report.add("train", model="flash-linear-attention", ms="not measured: it has neither GAU nor FLASH")

    def _compare_at(self, length: int, profile: bool = False) -> None:
        """Time FLASH and Transformer++."""
        ours = self._steps[length] = self._time_model(self._subject("flash", self.mode), length, profile)
        other = self._time_model(self._subject("transformer++", self.mode), length, profile)
        if not self.small and ours and other:
            self.report.reach(f"transformer++ {length}", other / ours)

    def _subject(self, name: str, mode: Mode) -> Subject:
        return Subject(f"{name}-{self.size}", mode, resolve(f"{name}-{self.size}", "clm"))

    def _time_model(self, subject: Subject, length: int, profile: bool = False) -> float | None:
        """Milliseconds of a training step in bf16 with AdamW; None if it fails or has too little memory, which a row says."""
        case = Case("train", length, "bf16", 1 if self.small else TOKENS // length)
        release(self.device)  # what the last one left
        ms, begin = None, time.monotonic()
        row: dict[str, Any] = {"model": str(subject), "length": length, "tokens": case.tokens}
        try:
            with separate_compilations(), sdpa_kernel(SOFTMAX, set_priority=True):
                ready = prepare(subject, case, self.device)
                optimizer = torch.optim.AdamW(ready.model.parameters(), lr=1e-4, fused=True)

                def step() -> None:
                    ready.step()
                    optimizer.step()

                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds = self.seconds(step)
                ms = None if seconds is None else 1e3 * seconds
                row["ms"] = "out of memory" if ms is None else round(ms, 2)
                if self.device.type == "cuda":
                    row["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                if seconds is not None:
                    row |= self._share_of_peak(subject, case, case.tokens / seconds)
                if profile and seconds is not None:
                    names = self._profile(str(subject), length, step)
                    row["attention"] = ", ".join(name for name in names if re.search("sdpa|flash|fmha|softmax", name)) or "-"
        except Exception as error:  # another model may still run, and what has been measured counts
            what = f"{type(error).__name__}: {error}"
            self.report.failed.append(f"{subject} at {length}: {what}"[:300])
            row["ms" if ms is None else "then"] = what[:200]
        self.report.add("train", **row, took_s=round(time.monotonic() - begin, 1))
        torch.compiler.reset()
        return ms

    def _share_of_peak(self, subject: Subject, case: Case, tokens_per_second: float) -> dict[str, Any]:
        """The model's operations as a share of the peak of matrix products."""
        if isinstance(subject, Peer):
            forward = subject.forward_flops(case.length)
        else:
            forward = cost(subject.config, case.length).flops_per_token
        share = 3 * forward * tokens_per_second / self.peak
        if not self.small and str(subject) == "flash-base compiled":
            self.report.reach(f"share {case.length}", share)
        return {"share_of_peak": f"{share:.1%}", "peak_tflops": round(self.peak / 1e12, 1)}

    def _profile(self, model: str, length: int, step: Callable[[], object]) -> list[str]:
        """Report the kernels that take the most time of a step, and return their names."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            synchronized(self.device)
        # The time of a kernel is also that of the operator on the host that launched it, and of annotations around it.
        kind, own = (
            (DeviceType.CUDA, "self_device_time_total")
            if self.device.type == "cuda"
            else (DeviceType.CPU, "self_cpu_time_total")
        )
        events = [event for event in profiler.key_averages() if event.device_type == kind and not event.is_user_annotation]
        total = sum(getattr(event, own) for event in events) or 1.0
        longest = sorted(events, key=lambda event: getattr(event, own), reverse=True)[:15]
        for event in longest:
            spent = getattr(event, own)
            self.report.add(
                "profile",
                model=model,
                length=length,
                kernel=event.key[:80],
                calls=event.count,
                ms=round(spent / 1e3, 3),
                share=f"{spent / total:.1%}",
            )
        return [event.key[:80] for event in longest]

    # Generation -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generation(self) -> None:
        """Milliseconds per token."""
        model = lineartime.build(f"flash-{self.size}").to(self.device).eval()
        assert isinstance(model, CausalLM)
        compiled = deepcopy(model)
        compiled.compile_step()
        for position in [64] if self.small else [1024, 65536]:
            ids = torch.zeros(1, position, dtype=torch.long, device=self.device)
            state, token = state_after(model, ids), ids[:, :1]
            steps: dict[str, Callable[[], object]] = {"extend": partial(model.extend, token, state.clone())}  # in place
            if self.device.type == "cuda":
                recorded = continuing(model, state.clone())
                if not torch.allclose(recorded(token[:, 0]), model.extend(token, state.clone())[0][:, 0], atol=1e-3):
                    self.report.failed.append(f"generation at {position}: the CUDA graph does not give the logits of extend")
                steps["graph"] = partial(recorded, token[:, 0])
                # As `generate` takes a token, without and with --compile: drawn inside the graph.
                for name, drawer in (("drawing", model), ("compiled drawing", compiled)):
                    steps[name] = partial(drawing(drawer, state.clone(), Sampling(), torch.Generator()), token[:, 0])
            steps["prompt"] = partial(prefill_batch, model, ids)
            steps["forward"] = partial(last_logits, model, ids)
            ms = {name: None if (s := self.seconds(step)) is None else round(1e3 * s, 3) for name, step in steps.items()}
            if not self.small and ms.get("compiled drawing"):
                self.report.reach("token", float(ms["compiled drawing"] or 0.0))
            if position == 65536 and ms["prompt"] and ms["forward"]:
                self.report.reach("prompt", ms["forward"] / ms["prompt"])
            self.report.add("generation", position=position, **{f"{name}_ms": value for name, value in ms.items()})

    # Kernels ----------------------------------------------------------------------------------------------------------

    def kernels(self) -> None:
        """Each kernel of flash-quad-base alone, of one sequence, and what the compiler made of it."""
        d_qk, d_value, length, count = (16, 24, 16, 2) if self.small else (128, 1536, 2048, TOKENS // 2048)
        dtype = torch.float32 if self.small else torch.bfloat16
        q, k = (torch.randn(count, length, d_qk, device=self.device, dtype=dtype) for _ in range(2))
        v, d_out = (torch.randn(count, length, d_value, device=self.device, dtype=dtype) for _ in range(2))
        bias, rows = torch.randn(2 * length - 1, device=self.device), torch.rand(count, length, device=self.device)
        options: dict[str, Any] = {"causal": True, "activation": "relu2", "pairs": kernels.Pairs(0, length, 0, length)}
        of_pairs = partial(kernels.attention_weights, q, k, bias, rows, 0.1, dtype=dtype, **options)
        weights = of_pairs()
        gradient = partial(kernels.score_gradient, q, k, v, bias, rows, d_out, 0.1, dtype=dtype, **options)
        inside = count * length**2  # causal: half of all pairs, twice
        cases: dict[str, tuple[Callable[[], Tensor], float, float]] = {
            "attention_weights": (of_pairs, inside * d_qk, 2 * q.numel() + weights.numel()),
            "score_gradient": (
                lambda: gradient()[0],
                inside * (d_qk + d_value),
                2 * v.numel() + 2 * q.numel() + 2 * weights.numel(),
            ),
            "products of weights and values": (
                partial(torch.matmul, weights, v),
                inside * d_value,
                2 * v.numel() + weights.numel(),
            ),
        }
        for name, (launch, flops, numbers) in cases.items():
            seconds = self.seconds_of_kernel(launch)
            if seconds is None:
                continue
            self.report.add(
                "kernels",
                kernel=name,
                ms=round(1e3 * seconds, 3),
                tflops=round(flops / seconds / 1e12, 1),
                gb_per_s=round(numbers * q.element_size() / seconds / 1e9),
            )
        memory = torch.empty(2**20 if self.small else 2**30, device=self.device, dtype=torch.uint8)
        seconds = self.seconds(memory.clone)
        if seconds:
            self.report.add(
                "kernels", kernel="copy of memory", ms=round(1e3 * seconds, 3), gb_per_s=round(2 * len(memory) / seconds / 1e9)
            )
        for row in compiled_kernels():
            self.report.add("compiled", **row)

    # Ops --------------------------------------------------------------------------------------------------------------

    def ops(self) -> None:
        """Forward and backward at the sizes of -base, bf16: kernels, compiled PyTorch, eager PyTorch."""
        d_qk, d_value, chunk = (16, 24, 16) if self.small else (128, 1536, 256)
        dtype = torch.float32 if self.small else torch.bfloat16
        for length in [64] if self.small else [8192, 1024, 65536]:
            batch = 1 if self.small else TOKENS // length
            widths = (d_qk, d_qk, d_qk, d_qk, d_value)
            maps = [torch.randn(batch, length, n, device=self.device, dtype=dtype).requires_grad_() for n in widths]
            tokens = torch.randn(batch, length, d_value // 2, device=self.device, dtype=dtype).requires_grad_()
            layer = FLASH(d_value // 2, d_qk=d_qk, chunk_size=chunk, causal=True).to(self.device, dtype)
            set_backend(layer, "torch")
            cases: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
                "mixed chunk": (partial(attention, chunk_size=chunk), maps),
                "FLASH": (layer, [tokens]),
                "quadratic": (attention, [*maps[:2], maps[4]]),
            }
            for name, (op, inputs) in cases.items():
                if name == "quadratic" and length > 16384:
                    continue
                compiled = torch.compile(op, dynamic=False, backend="aot_eager" if self.small else "inductor")
                forms = {"compiled": compiled, "plain": op}
                if name == "quadratic":
                    forms["kernels"] = partial(op, backend="triton")
                seconds = {form: self.seconds(partial(forward_and_backward, run, inputs)) for form, run in forms.items()}
                ms = {f"{form}_ms": None if s is None else round(1e3 * s, 3) for form, s in seconds.items()}
                self.report.add("ops", op=name, length=length, batch=batch, **ms)


def last_logits(model: CausalLM, ids: Tensor) -> Tensor:
    """Those after the last of the tokens [B, T], by a forward pass."""
    return model.logits(model.backbone(ids)[:, -1])


def attention(
    *inputs: Tensor, bias: Tensor | None = None, chunk_size: int | None = None, causal: bool = True, backend: Backend = "torch"
) -> Tensor:
    """Attention of rows [B, T, ...]: of queries, keys and values or, in chunks, of both parts' queries and keys, and values.

    `bias` is that of each distance, [2 T - 1].
    """
    packing = describe(inputs[0].shape, device=inputs[0].device)
    q, k, *linear, v = map(packing.pack, inputs)
    q_lin, k_lin = linear or (None, None)
    scales, of_length = Scales(q.shape[-1] ** -0.5, reciprocal, reciprocal), None if bias is None else lambda n: bias
    out, _ = attend(
        q, k, q_lin, k_lin, v, packing, MixedChunkOptions(chunk_size, causal, scales, bias=of_length, backend=backend)
    )
    return packing.unpack(out)


def forward_and_backward(op: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    out, parameters = op(*inputs), op.parameters() if isinstance(op, nn.Module) else ()
    torch.autograd.grad(out, [*inputs, *parameters], out.detach())


def compiled_kernels() -> Iterator[dict[str, Any]]:
    """Registers, spills and shared memory of every kernel that was launched; none in the interpreter."""
    for function in KERNELS:
        for compiled in getattr(function, "device_caches", {}).values():
            for kernel in compiled[0].values():
                yield {
                    "kernel": function.__name__,
                    "warps": kernel.metadata.num_warps,
                    "stages": kernel.metadata.num_stages,
                    "registers": getattr(kernel, "n_regs", None),  # of kernels that were launched
                    "spills": getattr(kernel, "n_spills", None),
                    "shared": kernel.metadata.shared,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--budget", type=float, default=540, help="seconds that all parts may take together")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, to check that everything runs")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case, of which the median is taken")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of smoke and exactness")
    parser.add_argument("parts", nargs="*", help="some of the parts above; all by default")
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.rehearse):
        sys.exit("gpu.py needs a GPU, and PyTorch sees none: use --rehearse for a trial at small sizes.")
    if not (torch.cuda.is_available() or kernels.INTERPRETED):
        sys.exit("PyTorch sees no GPU: set TRITON_INTERPRET=1 to rehearse on a CPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    report = Report(options.out, goals(options.rehearse), options.budget, gpu=gpu, rehearsal=options.rehearse)
    run = Run(report, device, options.rehearse, 1 if options.rehearse else options.rounds, options.dtypes)
    every = (run.smoke, run.models, run.generation, run.kernels, run.lengths, run.ops, run.peers, run.exactness)
    parts = {part.__name__: part for part in every}
    for name in options.parts:
        if name not in parts:
            sys.exit(f"{name} is not a part: give some of {', '.join(parts)}.")
    for name in options.parts or parts:
        torch.manual_seed(0)  # a part computes the same, whatever ran before it
        report.attempt(name, parts[name])
    for line in report.missed():
        print("missed:", line)
    sys.exit(1 if report.missed() else 0)


if __name__ == "__main__":
    main()
