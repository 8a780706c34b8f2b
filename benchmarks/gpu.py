"""All checks that need a GPU, in one run: `python benchmarks/gpu.py --out DIR`, or some parts by name.

1. The kernels: their errors, values and gradients, against float64, beside those of plain PyTorch in the same dtype.
2. The op: mixed chunk attention forward and backward by the kernels, beside the compiled PyTorch form.
3. The models: training steps of the -base presets and of the peers that are installed, with their share of the measured peak.
4. Generation: a token by `extend`, by `step`, and by `step` as a CUDA graph.

Needs PyTorch with Triton, and numpy. Ends with status 1 if a goal is missed or a part fails. `--rehearse` runs everything at
small sizes, on a CPU too if TRITON_INTERPRET=1 is set.
"""

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import lineartime
from lineartime.bench.config import Dtype, Mode, Peer
from lineartime.bench.measure import median_seconds, peak_flops, release, synchronized
from lineartime.bench.peers import check_peer
from lineartime.bench.subjects import Case, Subject, forward_flops_per_token, prepare, state_after
from lineartime.errors import LineartimeError
from lineartime.generation.streams import recorded_step
from lineartime.models import CausalLM
from lineartime.models.presets import resolve
from lineartime.ops import mixed_chunk_attention, quadratic_attention

GOALS = {
    "kernels, error of the kernels / of PyTorch": "<= 2",
    "op, PyTorch compiled / kernels": ">= 2",
    "share of the peak, flash-base training": ">= 45 %",
    "transformer++ / flash, 1K, 8K, 64K": ">= 1.0, 1.6, 6",
    "FLASH-pytorch / flash": ">= 3",
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, to check that everything runs")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case, of which the median is taken")
    parser.add_argument("parts", nargs="*", help="some of kernels, ops, models, generation; all by default")
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.rehearse):
        sys.exit("gpu.py needs a GPU, and PyTorch sees none: use --rehearse for a trial at small sizes.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    run = Run(options.out, device, options.rehearse, options.rounds)
    parts = {"kernels": run.check_kernels, "ops": run.time_ops, "models": run.time_models, "generation": run.time_generation}
    unknown = [name for name in options.parts if name not in parts]
    if unknown:
        sys.exit(f"{unknown[0]} is not a part: give some of {', '.join(parts)}.")
    for name in options.parts or parts:
        run.attempt(parts[name])
    for missed in run.missed:
        print("missed:", missed)
    sys.exit(1 if run.missed else 0)


class Run:
    """The results of all parts so far, and where they go."""

    def __init__(self, out: Path, device: torch.device, small: bool, rounds: int) -> None:
        self.out, self.device, self.small, self.rounds = out, device, small, 1 if small else rounds
        self.rows: dict[str, list[Row]] = {}
        self.missed: list[str] = []
        out.mkdir(parents=True, exist_ok=True)

    def attempt(self, part: Callable[[], None]) -> None:
        """Run one part; record its error, if any, so that the other parts still run."""
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.missed.append(f"{part.__name__} failed")
            self.add("failed", part=part.__name__, error=f"{type(error).__name__}: {error}"[:500])

    def add(self, table: str, **row: Any) -> None:
        """Add a row, print it, and write all results so far."""
        self.rows.setdefault(table, []).append(row)
        print(table, row, flush=True)
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else None
        machine = {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "rehearsal": self.small}
        (self.out / "gpu.json").write_text(
            json.dumps({"machine": machine, "goals": GOALS, "tables": self.rows}, indent=1) + "\n"
        )
        (self.out / "gpu.md").write_text(f"{json.dumps(machine)}\n\n" + "\n".join(map(self._markdown, self.rows)))

    def expect(self, met: bool, what: str) -> None:
        """Record a goal unless it is met. At the small sizes of a rehearsal, only exactness is a goal."""
        if not met:
            self.missed.append(what)

    def _markdown(self, table: str) -> str:
        columns = list(dict.fromkeys(key for row in self.rows[table] for key in row))
        cells = [[str(row.get(key, "")) for key in columns] for row in self.rows[table]]
        lines = [columns, ["---"] * len(columns), *cells]
        return f"## {table}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def seconds(self, steps: dict[str, Callable[[], object]]) -> dict[str, float | None]:
        """The median seconds of each step, measured in turn; None if there is too little memory."""
        return median_seconds(steps, self.rounds, partial(synchronized, self.device), 0.0 if self.small else 0.3)

    # 1. The kernels ---------------------------------------------------------------------------------------------------

    def check_kernels(self) -> None:
        """Errors against float64, relative to the largest value, in every dtype, at ragged lengths and head sizes."""
        sizes = (
            [(65, 16, 24)]
            if self.small
            else [(1, 128, 256), (63, 128, 256), (257, 64, 96), (1000, 128, 1536), (2048, 512, 1024)]
        )
        dtypes = [torch.bfloat16, torch.float16, torch.float32]
        if self.device.type == "cpu":
            print("bfloat16 is left out: Triton's interpreter cannot multiply it")
            dtypes = dtypes[1:]
        for dtype in dtypes:
            for length, d_qk, d_value in sizes:
                chunk = 16 if self.small else 256
                maps = [torch.randn(2, length, width, device=self.device) for width in (d_qk, d_qk, d_qk, d_qk, d_value)]
                biases = {n: torch.randn(n, n, device=self.device) for n in (chunk, length)}
                for causal in (True, False):
                    mixed: Callable[..., Tensor] = partial(mixed_chunk_attention, chunk_size=chunk, causal=causal)
                    self._check(f"mixed chunk, causal={causal}", dtype, maps, biases[chunk], mixed)
                    quadratic: Callable[..., Tensor] = partial(quadratic_attention, causal=causal)
                    self._check(f"quadratic, causal={causal}", dtype, [*maps[:2], maps[4]], biases[length], quadratic)

    def _check(self, what: str, dtype: torch.dtype, maps: list[Tensor], bias: Tensor, op: Callable[..., Tensor]) -> None:
        def run(backend: str, number: torch.dtype) -> list[Tensor]:
            inputs = [x.to(dtype).to(number).requires_grad_() for x in (*maps, bias)]
            out = op(*inputs[:-1], bias=inputs[-1], backend=backend)
            upstream = (
                (torch.arange(out.numel(), device=out.device) * 7 % 17 - 8).view_as(out).to(out.dtype)
            )  # exact in every dtype
            return [x.double() for x in (out, *torch.autograd.grad(out, inputs, upstream))]

        exact = run("torch", torch.float64)
        kernels, again, plain = run("triton", dtype), run("triton", dtype), run("torch", dtype)
        errors = [
            [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(result, exact, strict=True)]
            for result in (kernels, plain)
        ]
        smallest = torch.finfo(dtype).eps / 8  # kernels may round where PyTorch happens to be exact
        worst = max(a / max(b, smallest) for a, b in zip(*errors, strict=True))
        same_bits = all(torch.equal(a, b) for a, b in zip(kernels, again, strict=True))
        self.expect(same_bits, f"{what}, {dtype}: the same bits twice")
        self.expect(self.small or worst <= 2, f"{what}, {dtype}: errors at most twice those of PyTorch, not {worst:.1f} times")
        self.add(
            "kernels",
            what=what,
            dtype=str(dtype).removeprefix("torch."),
            shape=[*maps[0].shape, maps[-1].shape[-1]],
            error=f"{max(errors[0]):.1e}",
            error_of_pytorch=f"{max(errors[1]):.1e}",
            worst_ratio=round(worst, 2),
            same_bits=same_bits,
        )

    # 2. The op --------------------------------------------------------------------------------------------------------

    def time_ops(self) -> None:
        """Forward and backward at the sizes of -base, bf16: kernels, compiled PyTorch, eager PyTorch."""
        d_qk, d_value, chunk = (16, 24, 16) if self.small else (128, 1536, 256)
        for length in [64] if self.small else [1024, 8192, 65536]:
            batch = 1 if self.small else 65536 // length
            maps = [
                torch.randn(batch, length, width, device=self.device, dtype=torch.bfloat16).requires_grad_()
                for width in (d_qk, d_qk, d_qk, d_qk, d_value)
            ]

            mixed = partial(mixed_chunk_attention, chunk_size=chunk, causal=True)
            quadratic = partial(quadratic_attention, causal=True)
            for name, attend, inputs in (("mixed chunk", mixed, maps), ("quadratic", quadratic, [*maps[:2], maps[4]])):
                if name == "quadratic" and length > 16384:
                    continue
                plain = partial(attend, backend="torch")
                compiled = torch.compile(plain, dynamic=False, backend="aot_eager" if self.small else "inductor")
                forms: dict[str, Callable[..., Tensor]] = {
                    "kernels": partial(attend, backend="triton"),
                    "compiled": compiled,
                    "plain": plain,
                }
                seconds = self.seconds({form: partial(forward_and_backward, op, inputs) for form, op in forms.items()})
                fast, slow = seconds["kernels"], seconds["compiled"]
                good = bool(self.small or (fast and (not slow or slow >= 2 * fast)))
                self.expect(good, f"{name}, T = {length}: kernels twice as fast as compiled PyTorch")
                self.add(
                    "op",
                    op=name,
                    length=length,
                    batch=batch,
                    **{f"{key}_ms": None if value is None else round(1e3 * value, 3) for key, value in seconds.items()},
                    compiled_over_kernels=round(slow / fast, 2) if fast and slow else None,
                )

    # 3. The models ----------------------------------------------------------------------------------------------------

    def time_models(self) -> None:
        """Training steps in bf16, with equal tokens in a batch, compiled and eager."""
        dtype: Dtype = "bf16"
        modes: tuple[Mode, ...] = ("eager",) if self.small else ("eager", "compiled")
        size = "tiny" if self.small else "base"
        peers = [peer for peer in get_args(Peer) if _is_there(peer)]
        for length in [64] if self.small else [1024, 8192, 65536]:
            case = Case("train", length, dtype, 1 if self.small else 65536 // length)
            subjects = [
                Subject(f"{name}-{size}", mode, resolve(f"{name}-{size}", "clm"))
                for name in ("flash", "flash-quad", "transformer++")
                for mode in modes
                if not (name == "flash-quad" and length > 16384)
            ]
            config = resolve(f"flash-{size}", "clm")
            subjects += [Subject(peer, modes[-1], config, is_peer=True) for peer in peers]
            peak = peak_flops(self.device, dtype) if not self.small else 1e12
            for subject in subjects:  # one model in memory at a time; ratios are of medians
                self._time_model(subject, case, peak)
                torch.compiler.reset()
                release(self.device)

    def _time_model(self, subject: Subject, case: Case, peak: float) -> None:
        try:
            ready = prepare(subject, case, self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = self.seconds({"step": ready.step})["step"]
        except Exception as error:
            self.add("train", model=str(subject), length=case.length, error=f"{type(error).__name__}: {error}"[:200])
            return
        flops = forward_flops_per_token(subject, case.length)
        self.add(
            "train",
            model=str(subject),
            length=case.length,
            tokens=case.tokens,
            ms="out of memory" if seconds is None else round(1e3 * seconds, 2),
            share_of_peak=None if seconds is None or flops is None else f"{3 * flops * case.tokens / seconds / peak:.1%}",
            peak_tflops=round(peak / 1e12, 1),
            memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else None,
        )

    # 4. Generation ----------------------------------------------------------------------------------------------------

    def time_generation(self) -> None:
        """Milliseconds per token, after 1,024 and after 65,536 tokens."""
        model = lineartime.build("flash-tiny" if self.small else "flash-base").to(self.device).eval()
        assert isinstance(model, CausalLM)
        for position in [64] if self.small else [1024, 65536]:
            with torch.no_grad():
                ids = torch.zeros(1, position, dtype=torch.long, device=self.device)
                state = state_after(model, ids)
                token = ids[:, :1]

                def by_extend(state: Any = state, token: Tensor = token) -> None:
                    with torch.no_grad():
                        model.extend(token, state)

                streams = model.join_streams([state])

                def by_step(streams: Any = streams, token: Tensor = token) -> None:
                    with torch.no_grad():
                        model.step(token, streams)

                steps: dict[str, Callable[[], object]] = {"extend": by_extend, "step": by_step}
                if self.device.type == "cuda":
                    recorded = recorded_step(model, model.join_streams([state]))
                    same = torch.allclose(recorded(token), model.extend(token, state)[0], atol=1e-3)
                    self.expect(same, f"generation at {position}: the CUDA graph gives the logits of extend")
                    steps["graph"] = partial(recorded, token)
                seconds = self.seconds(steps)
            self.add(
                "generate",
                position=position,
                **{f"{k}_ms": None if s is None else round(1e3 * s, 3) for k, s in seconds.items()},
            )


def forward_and_backward(op: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    out = op(*inputs)
    torch.autograd.grad(out, inputs, out.detach())


def _is_there(peer: Peer) -> bool:
    try:
        check_peer(peer, torch.device("cuda"))
    except LineartimeError:
        return False
    return True


if __name__ == "__main__":
    main()
