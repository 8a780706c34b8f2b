"""What a benchmark measures, and how: steps of models take turns and are repeated.

Shapes: B batch, T tokens, V vocabulary.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lineartime.bench.config import STREAMED, Dtype, Measure, Mode
from lineartime.generation.decoding import continuing
from lineartime.generation.prompts import prefill_batch
from lineartime.machine import autocast, shapes_only
from lineartime.models.backbone import ModelState
from lineartime.models.config import ModelConfig
from lineartime.models.language_model import CausalLM, LanguageModel, build_model

Key = TypeVar("Key")
Clock = Callable[[], float]


def synchronized(device: torch.device) -> float:
    """The current time in seconds, after all pending work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def repetitions(seconds: float, min_seconds: float) -> int:
    """How often to repeat a step that takes `seconds`, for a measurement of at least `min_seconds`."""
    return max(1, math.ceil(min_seconds / max(seconds, 1e-7)))


@dataclass(frozen=True)
class RewindingStep:
    """A step whose next call costs more than the last one: `rewind`, which is not timed, goes back before `burst` calls."""

    step: Callable[[], object]
    rewind: Callable[[], object]
    burst: int

    def __call__(self) -> object:
        """Take the step."""
        return self.step()


def timed(step: Callable[[], object], calls: int, clock: Clock) -> float:
    """The mean seconds per call, over `calls` calls."""
    burst, seconds = step.burst if isinstance(step, RewindingStep) else calls, 0.0
    for first in range(0, calls, burst):
        if isinstance(step, RewindingStep):
            step.rewind()
        start = clock()
        for _ in range(min(burst, calls - first)):
            step()
        seconds += clock() - start
    return seconds / calls


def interleaved(
    steps: Mapping[Key, tuple[Callable[[], object], int]], rounds: int, clock: Clock
) -> Iterator[tuple[Key, float | Exception]]:
    """Time all steps in turn, A B B A, so that machine noise and what ran just before affect all of them alike.

    `steps` are the steps to time, each with the calls that make one measurement. If there are several, it is first called once
    untimed, with the processor's caches as others left them. Yields a key with the seconds per call, or with the error that
    was raised, after which the step is not called again.
    """
    failed = set()
    order = list(steps.items())
    for _ in range(rounds):
        for key, (step, calls) in order:
            if key in failed:
                continue
            try:
                if calls > 1:
                    timed(step, 1, clock)
                yield key, timed(step, calls, clock)
            except Exception as error:
                failed.add(key)
                yield key, error
        order.reverse()


def median_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The median and the interquartile range, which is None for a single value."""
    if len(values) < 2:
        return values[0], None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), high - low


def step_memory(model: nn.Module, step: Callable[[], object], device: torch.device) -> int:
    """The bytes that a step holds at most above the weights, with the gradients that it leaves, on a GPU."""
    model.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def separate_compilations() -> Iterator[None]:
    """Compile each subject for its own sizes, without using the caches of earlier runs."""
    import torch._dynamo
    from torch._inductor.utils import fresh_cache

    own_sizes = torch._dynamo.config.patch(  # by default, shapes become dynamic, and compilation stops at a limit
        automatic_dynamic_shapes=False, recompile_limit=256, accumulated_recompile_limit=4096
    )
    with fresh_cache(), own_sizes:
        yield


def release(device: torch.device) -> None:
    """Return unreferenced memory to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


@dataclass(frozen=True)
class Case:
    """One case to measure: `length` is the context length, or the position for decode; `batch` counts sequences or streams."""

    measure: Measure
    length: int
    dtype: Dtype
    batch: int

    def __str__(self) -> str:
        return f"{self.measure} {'at' if self.measure == 'decode' else 'of'} {self.length:,} in {self.dtype}"

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch if self.measure == "decode" else self.batch * self.length


@dataclass(frozen=True)
class Subject:
    """A model, eager or compiled."""

    name: str
    mode: Mode
    config: ModelConfig

    def __str__(self) -> str:
        return self.name if self.mode == "eager" else f"{self.name} {self.mode}"

    def build(self) -> LanguageModel:
        """The model, freshly initialised, on PyTorch's default device."""
        return build_model(self.config)


@dataclass
class Ready:
    """A model, what takes one of its steps, and for decode the bytes of the state of one stream before it."""

    model: LanguageModel
    step: Callable[[], object]
    state_bytes: int | None = None


def prepare(subject: Subject, case: Case, device: torch.device) -> Ready:
    """Build a subject and the inputs of a case; nothing is compiled before the first step."""
    torch.manual_seed(0)
    with device:
        model = subject.build()
        ids = torch.randint(0, subject.config.vocab_size, (case.batch, case.length + 1))
    model.train(case.measure == "train")
    bf16 = case.dtype == "bf16"
    context = ids[:, :-1]

    def infer(call: Callable[..., Any], *args: Any) -> Any:
        with torch.no_grad(), autocast(device, bf16):
            return call(*args)

    if case.measure in STREAMED:
        assert isinstance(model, CausalLM)
        if bf16:
            model = model.bfloat16()  # as generation does: autocast would convert the weights for every token
        if case.measure == "prefill":
            return Ready(model, partial(infer, prefill_batch, model, context))
        if subject.mode == "compiled":
            model.compile_step()
        with torch.no_grad():
            state = state_after(model, context)
            step = _decoding(model, state, ids[:, -1])
        return Ready(model, step, state.nbytes // case.batch)
    if subject.mode == "compiled":
        model.compile_blocks()
    if case.measure == "forward":
        return Ready(model, partial(infer, model, context))

    def train() -> None:
        model.zero_grad()
        with autocast(device, bf16):
            value = model.loss(context, ids[:, 1:])
        value.backward()

    return Ready(model, train)


def _decoding(model: CausalLM, state: ModelState, tokens: Tensor) -> Callable[[], object]:
    """A step that reads one more token of each stream, from a state on, and returns the logits of the next tokens.

    If the state grows or ends, the step goes back before it has grown by more than a thirty-second, or nine tokens.
    """
    read_next = continuing(model, state.clone())

    @torch.no_grad()
    def step() -> Tensor:
        return read_next(tokens)

    @torch.no_grad()
    def rewind() -> None:
        nonlocal read_next
        read_next = continuing(model, state.clone())
        read_next(tokens)  # which makes room for those that follow

    position, longest = int(state.position.max()), model.config.longest_sequence
    if model.constant_state and longest is None:
        return step
    burst = max(8, position // 32 - 1)
    return RewindingStep(step, rewind, burst if longest is None else min(burst, longest - position - 1))


def state_after(model: CausalLM, ids: Tensor) -> Any:
    """A state with the shapes, dtypes and position of the state after ids [B, T], but filled with zeros."""
    batch, tokens = ids.shape
    with shapes_only():
        shadow = build_model(model.config.first_round)
        assert isinstance(shadow, CausalLM)
        _, shape = shadow.extend(ids.to("meta"), shadow.init_state(batch))  # a context of any length costs nothing
    state = model.init_state(batch)
    for at in range(min(2, tokens)):  # after two tokens, every part has its final dtype
        _, state = model.extend(ids[:, at : at + 1], state)

    def filled(shape: Tensor, like: Tensor) -> Tensor:
        value = tokens if like.dtype == torch.long else 0  # the position
        return torch.full(shape.shape, value, dtype=like.dtype, device=like.device)

    return ModelState(tuple(like.map(filled, block) for like, block in zip(cycle(shape.blocks), state.blocks, strict=False)))
