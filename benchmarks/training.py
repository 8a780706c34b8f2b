"""The overhead of training: `python benchmarks/training.py` (about 20 minutes on 2 cores), or some parts by name.

    waiting      the share of a step that flash-base, at 8,192 tokens per step, waits for data
    checkpoints  the time of writing a checkpoint, as a share of the default interval between two
    processes    the throughput of 2 processes of one thread, as a share of that of 1 process with 2 threads

Each part runs `lineartime train` as a user would and reads its metrics. Results go to
benchmarks/results/training.json and training.md; parts that are not run keep their earlier results.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import RESULTS

from lineartime.markdown import markdown_table
from lineartime.training.config import TrainConfig

FILE = RESULTS / "training.json"


def run(options: list[str], processes: int = 1, threads: int = 2) -> list[dict[str, float]]:
    """Train, and return the metrics of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, "-m", "lineartime"]
        if processes > 1:
            start = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                "-m",
                "lineartime",
            ]
        command = [*start, "train", *options, "--out", f"{folder}/run", "--compile", "off"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "loss" in line]


def waiting() -> dict[str, Any]:
    """Train flash-base with a vocabulary of 32,000 on the default text; the first step fills the queue and is not counted."""
    options = [
        "--preset",
        "flash-base",
        "--tokenizer",
        "bpe-32000",
        "--context-length",
        "1024",
        "--batch-size",
        "2",
        "--tokens-per-batch",
        "8192",
    ]
    steps = run([*options, "--steps", "4", "--eval-every", "100", "--eval-windows", "1"])
    return {
        "tokens_per_second": [step["tokens_per_second"] for step in steps[1:]],
        "waiting": [step["waiting"] for step in steps[1:]],
    }


def checkpoints() -> dict[str, Any]:
    """Time steps with a checkpoint before every fourth one, and the other steps of the same run.

    A checkpoint costs the time that the caller waits, the slowdown of the next step while the rest is written, and the time to
    finish writing after that step.
    """
    results: dict[str, Any] = {"interval": TrainConfig().eval_every}
    for preset, context, steps in (("flash-tiny", 512, 40), ("flash-base", 512, 8)):
        script = CHECKPOINT_SCRIPT.format(preset=preset, context=context, steps=steps)
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        results[preset] = json.loads(done.stdout.splitlines()[-1])
    return results


CHECKPOINT_SCRIPT = """
import json, tempfile, time
from pathlib import Path
from lineartime.training.config import TrainConfig
from lineartime.training.interrupts import Stop
from lineartime.training.loop import prepare
from lineartime.runs.reporter import NullReporter

with tempfile.TemporaryDirectory() as folder:
    config = TrainConfig(preset="{preset}", context_length={context}, steps=1000, compile="off", out=Path(folder) / "run")
    trainer = prepare(config)
    def step():
        start = time.perf_counter()
        trainer.take_step(NullReporter(), Stop())
        return time.perf_counter() - start
    for _ in range(2):
        step()
    blocked, during, plain = [], [], []
    for number in range({steps}):
        if number % 4 == 0:
            start = time.perf_counter()
            trainer.save()
            blocked.append(time.perf_counter() - start)
            during.append(step())
            start = time.perf_counter()
            trainer.writer.finish()
            blocked[-1] += time.perf_counter() - start
        else:
            plain.append(step())
    trainer.text.loader.close()
    print(json.dumps({{"blocked": blocked, "during": during, "plain": plain}}))
"""


def processes() -> dict[str, Any]:
    """Train flash-tiny at 8,192 tokens per step: one process and two processes take turns, A B A B."""
    options = ["--preset", "flash-tiny", "--context-length", "1024", "--tokens-per-batch", "8192", "--steps", "8"]
    options += ["--eval-every", "100", "--eval-windows", "1"]
    speeds: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(3):
        one = run([*options, "--batch-size", "8"], 1, threads=2)
        two = run([*options, "--batch-size", "4"], 2, threads=1)
        speeds["one"].append(statistics.median(step["tokens_per_second"] for step in one[1:]))
        speeds["two"].append(statistics.median(step["tokens_per_second"] for step in two[1:]))
    return speeds


def figures(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    if "waiting" in results:
        share = statistics.median(results["waiting"]["waiting"])
        rows.append(["share of a step spent waiting for data, flash-base, 8,192 tokens", "< 2%", f"{share:.3%}"])
    for preset in ("flash-tiny", "flash-base"):
        if "checkpoints" in results:
            found = results["checkpoints"][preset]
            step = statistics.median(found["plain"])
            cost = statistics.median(a + max(0.0, b - step) for a, b in zip(found["blocked"], found["during"], strict=True))
            share = cost / (step * results["checkpoints"]["interval"])
            what = f"a checkpoint of {preset} every {results['checkpoints']['interval']} steps: {cost:.2f} s"
            rows.append([what, "< 2%", f"{share:.2%}"])
    if "processes" in results:
        one, two = results["processes"]["one"], results["processes"]["two"]
        ratio = statistics.median(b / a for a, b in zip(one, two, strict=True))
        rows.append(["throughput of 2 processes (DDP) / of 1 with 2 threads", ">= 85%", f"{ratio:.0%}"])
    return rows


PARTS = {"waiting": waiting, "checkpoints": checkpoints, "processes": processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything by default")
    results = json.loads(FILE.read_text()) if FILE.is_file() else {}
    for name in parser.parse_args().parts or PARTS:
        results[name] = PARTS[name]()
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    table = markdown_table(["what", "goal", "measured"], figures(results))
    (RESULTS / "training.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
