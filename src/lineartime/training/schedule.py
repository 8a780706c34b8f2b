"""The learning rate of each step.

With a peak P, S steps, W of them warm-up, D of them decay, and x = (step - W) / (S - W), from 0 after the warm-up to 1 just
after the last step, the rate of a step, counted from 0, is P (step + 1) / W during the warm-up, and then

    linear:   P (1 - x)
    cosine:   F + (P - F) (1 + cos(pi x)) / 2, where the floor F is P / 10
    constant: P
    wsd:      P, and in the last D steps P (S - step) / D

Source of wsd (warm-up, stable, decay): MiniCPM, arXiv 2404.06395, section 4.
"""

import dataclasses
import math

from lineartime.errors import ArgumentError
from lineartime.training.config import TrainConfig

COSINE_FLOOR = 0.1
"""The final learning rate of a cosine schedule, as a share of the peak."""
LONGEST_WARMUP = 1000
"""The maximum default of the warm-up at a constant rate, which may end sooner or later than the run was started for."""
_COMPARED = 1000
"""At how many of the steps taken the rates of two schedules are compared."""


def warmup_steps(config: TrainConfig) -> int:
    """The number of steps over which the learning rate rises; by default, a tenth of all."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    tenth = config.steps // 10
    return tenth if config.schedule in ("linear", "cosine") else min(tenth, LONGEST_WARMUP)


def decay_steps(config: TrainConfig) -> int:
    """The number of last steps over which the learning rate of "wsd" falls: by default, a fifth of all after the warm-up."""
    if config.decay_steps is not None:
        return config.decay_steps
    return max(1, min(config.steps // 5, config.steps - warmup_steps(config)))


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0."""
    warmup, peak = warmup_steps(config), config.learning_rate
    left, falling = config.steps - step, max(1, config.steps - warmup)
    if step < warmup:
        return peak * (step + 1) / warmup
    match config.schedule:
        case "linear":
            return peak * left / falling
        case "cosine":
            floor = COSINE_FLOOR * peak
            return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / falling)) / 2
        case "constant":
            return peak
        case "wsd":
            return peak * min(1.0, left / decay_steps(config))


def describe_schedule(config: TrainConfig) -> str:
    """The schedule in a few words."""
    ends = {
        "linear": "linear schedule to zero",
        "cosine": "cosine schedule to a tenth of the peak",
        "constant": "constant after the warm-up",
        "wsd": f"constant, then linear to zero over the last {decay_steps(config):,}",
    }
    return f"{ends[config.schedule]}, warm-up steps: {warmup_steps(config):,}"


def with_other_steps(started: TrainConfig, asked: TrainConfig, taken: int) -> TrainConfig:
    """The options of a run, with its own warm-up, that goes on to the steps and the steps of decay of `asked`.

    Raises ArgumentError if the `taken` steps would have had other learning rates, or more were taken than are asked for.
    """
    if asked.steps <= warmup_steps(started):
        found = f"is {asked.steps}, but the run was started with a warm-up of {warmup_steps(started)} steps"
        raise ArgumentError("steps", f"{found}: ask for more.")
    if asked.decay_steps is not None and started.schedule != "wsd":
        found = f"is {asked.decay_steps}, but the {started.schedule} schedule of this run has no decay"
        raise ArgumentError("decay_steps", f"{found}: leave it out.")
    if asked.steps < taken:
        raise ArgumentError("steps", f"is {asked.steps}, but the run has taken {taken} steps: ask for at least as many.")
    changed = dataclasses.replace(started, steps=asked.steps, decay_steps=asked.decay_steps, warmup_steps=warmup_steps(started))
    compared = {round(number * max(0, taken - 1) / _COMPARED) for number in range(_COMPARED + 1)} if taken else set()
    if any(learning_rate(step, changed) != learning_rate(step, started) for step in compared):
        name = "steps" if asked.steps != started.steps else "decay_steps"
        raise ArgumentError(
            name,
            f"is {getattr(asked, name)}, but the run was started with {getattr(started, name)}, and some of the {taken} steps "
            f"taken would have had other learning rates ({started.schedule} schedule): leave it out, or start a new run from "
            "its weights with `init_from`; a run with `schedule='constant'`, or wsd before its decay, can go on.",
        )
    return changed
