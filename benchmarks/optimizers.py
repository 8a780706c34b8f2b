"""The time that an optimiser adds to a training step: `python benchmarks/optimizers.py` (less than a minute on 2 cores).

The passes and the steps of all optimisers take turns, so that other load on the machine slows all of them alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from measure import save

from lineartime.choices import Precision
from lineartime.machine import autocast, choose_precision
from lineartime.markdown import markdown_table
from lineartime.models import build_model
from lineartime.models.presets import resolve
from lineartime.training.config import OptimizerName, TrainConfig
from lineartime.training.optimizers import build_optimizer

PRESET = "flash-tiny"
CPU = torch.device("cpu")
OPTIMIZERS: dict[str, tuple[OptimizerName, Precision]] = {
    "AdamW": ("adamw", "fp32"),
    "Muon, orthogonalisation in bf16": ("muon", "bf16"),
    "Muon, orthogonalisation in fp32": ("muon", "fp32"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="timings of each, of which the median is taken")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = TrainConfig(preset=PRESET)
    model = build_model(resolve(PRESET))
    ids = torch.randint(0, model.config.vocab_size, (config.batch_size, config.context_length))
    precision = choose_precision("auto", CPU)

    def passes() -> None:
        with autocast(CPU, precision == "bf16"):
            loss = model.loss(ids, ids)
        loss.backward()

    steps: dict[str, Callable[[], object]] = {"forward and backward pass": passes}
    for name, (kind, of_maps) in OPTIMIZERS.items():
        steps[name] = build_optimizer(model, TrainConfig(optimizer=kind, precision=of_maps, learning_rate=1e-9)).step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
        model.zero_grad()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [{"what": name, "seconds": value, "precision": precision} for name, value in medians.items()]
    whole = medians["forward and backward pass"]
    table = [[name, f"{1e3 * value:,.0f}", f"{value / whole:.0%}"] for name, value in medians.items()]
    save("optimizers", rows, markdown_table([f"{PRESET}, {ids.numel():,} tokens", "ms", "of the passes"], table))


if __name__ == "__main__":
    main()
