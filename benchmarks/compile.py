"""When torch.compile earns back its compilation: `python benchmarks/compile.py` (about 8 minutes on 2 cores).

`--compile auto` is decided by the two numbers this gives: seconds to compile, and the part of a step that is then saved.
"""

import os
import time
from collections.abc import Callable

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # what was compiled once would otherwise cost nothing the next time

import torch
import torch.nn.functional as F
from measure import interleaved, markdown, save

import lineartime
from lineartime.models import CausalLM

PRESETS = ["flash-tiny", "flash-quad-tiny", "transformer++-tiny"]
BATCH, LENGTH = 8, 512


def step_of(model: CausalLM, forward: Callable[[torch.Tensor], torch.Tensor], bf16: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 256, (BATCH, LENGTH + 1))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = forward(ids[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    rows = []
    for preset in PRESETS:
        for bf16 in (False, True):
            torch.compiler.reset()
            plain, copy = lineartime.build(preset), lineartime.build(preset)
            cases = {"eager": step_of(plain, plain, bf16), "compiled": step_of(copy, torch.compile(copy), bf16)}
            start = time.perf_counter()
            cases["compiled"]()
            first = time.perf_counter() - start
            seconds = interleaved(cases, 8)
            rows.append(
                {
                    "preset": preset,
                    "precision": "bf16" if bf16 else "fp32",
                    "compile_seconds": first - seconds["compiled"],
                    "eager_ms": 1e3 * seconds["eager"],
                    "compiled_ms": 1e3 * seconds["compiled"],
                    "saved": 1 - seconds["compiled"] / seconds["eager"],
                }
            )
            print(rows[-1], flush=True)
    header = ["preset", "precision", "compilation", "eager step", "compiled step", "saved"]
    table = [
        [
            f"`{row['preset']}`",
            str(row["precision"]),
            f"{row['compile_seconds']:.0f} s",
            f"{row['eager_ms']:.0f} ms",
            f"{row['compiled_ms']:.0f} ms",
            f"{row['saved']:.0%}",
        ]
        for row in rows
    ]
    save("compile", rows, markdown(header, table))


if __name__ == "__main__":
    main()
