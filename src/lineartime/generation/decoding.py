"""How the next token of a text is drawn, and texts are continued token by token from the states of what was read.

Shapes: B texts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from lineartime import models
from lineartime.errors import ArgumentError
from lineartime.fields import Between, Positive, check_fields
from lineartime.models.backbone import ModelState
from lineartime.models.decoder import MAX_STREAMS
from lineartime.models.language_model import CausalLM, are_finite, read_token
from lineartime.native import native_functions
from lineartime.ops.backends import GPU_LOCK
from lineartime.ops.modes import is_plain

SOURCE = Path(models.__file__).with_name("pick.cpp")
"""How a CPU picks, by selection in place of ranking."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw only from this many of the likeliest tokens; 0 for all tokens.
        top_p: draw only from the likeliest tokens that together reach this probability; 1 for all tokens.
        seed: the seed of the random draws; None for a different one each time.
        min_p: draw only from tokens with at least this share of the probability of the likeliest one; 0 for all tokens
            (arXiv 2407.01082).
        repetition_penalty: of tokens in the prompt and of those drawn so far, positive logits are divided by it and negative
            ones multiplied (arXiv 1909.05858); 1 for no penalty. What a `state` has read before the prompt does not count.

    Raises:
        ArgumentError: for a value of the wrong type or out of range.
    """

    temperature: Annotated[float, Between(0)] = 0.8
    top_k: Annotated[int, Between(0)] = 0
    top_p: Annotated[float, Between(above=0, most=1)] = 0.95
    seed: Annotated[int, Between(0, below=2**63)] | None = None
    min_p: Annotated[float, Between(0, 1)] = 0.0
    repetition_penalty: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def generator(self) -> torch.Generator:
        """A random number generator with this seed."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def checked_sampling(sampling: Sampling | None) -> Sampling:
    """The given sampling, or the default for None. Raises ArgumentError for anything else."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ArgumentError("sampling", f"is {sampling!r}, but must be a Sampling, for instance Sampling(temperature=0.8).")
    return Sampling() if sampling is None else sampling


def seen_in(texts: Sequence[Sequence[int]], vocab_size: int, sampling: Sampling) -> Tensor | None:
    """Which tokens each text has, bool [B, V], on the CPU; None if repetitions are not penalised."""
    if sampling.repetition_penalty == 1:
        return None
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool, device="cpu")
    for row, text in zip(seen, texts, strict=True):
        row[torch.tensor(list(text), dtype=torch.long, device="cpu")] = True
    return seen


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator, seen: Tensor | None = None) -> Tensor:
    """`pick` by the numbers of a generator, on the CPU."""
    logits = logits.float().cpu()
    return pick(logits, sampling, uniform_numbers(len(logits), generator), seen)


def uniform_numbers(count: int, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) for `pick`, on the CPU. They have one dtype everywhere: in another one, a seed draws other numbers."""
    return torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")


def pick(logits: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None = None) -> Tensor:
    """Draw a token for each text by a number in [0, 1): logits [B, V] and numbers [B] -> int64 [B]; -1 unless finite.

    The drawn tokens are added to `seen`, bool [B, V], which is needed for a penalty of repetitions alone. On a GPU, this copies
    nothing to the host, so it can be part of a CUDA graph.
    """
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    functions = native_functions(SOURCE, torch.float32) if logits.dtype == torch.float32 and is_plain(logits, uniform) else None
    if functions is None or not logits.numel():
        tokens = torch.where(are_finite(logits), _picked(logits, sampling, uniform), -1)
    else:
        tokens = torch.empty(len(logits), dtype=torch.long, device="cpu")
        how = float(sampling.temperature), sampling.top_k, float(sampling.top_p), float(sampling.min_p)
        functions.call("pick_rows", logits, uniform.double(), tokens, *logits.shape, *how)
    if seen is not None:
        seen.scatter_(1, tokens[:, None].clamp(min=0), True)
    return tokens


def _picked(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """`pick` for finite logits."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities, tokens = _ranked(logits.float(), sampling)
    if sampling.min_p:
        enough = probabilities >= sampling.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(enough, probabilities, 0.0)
    # Sums on a GPU may be added in another order each time; in float64, a seed still repeats its text.
    sums = probabilities.cumsum(-1, dtype=torch.float64 if probabilities.is_cuda else uniform.dtype)
    # Keep the shortest head of the ranking that reaches top_p: the tokens before each kept one do not reach it.
    kept = torch.full_like(sums[:, :1], sums.shape[-1], dtype=torch.long)
    if sampling.top_p < 1:
        kept = (sums - probabilities < sampling.top_p).sum(-1, keepdim=True)
    last = (kept - 1).clamp(min=0)  # of logits that are NaN, no token is kept
    total = sums.gather(-1, last)
    # The product may be rounded up to the total, which no token exceeds.
    reached = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = (sums <= reached).sum(-1, keepdim=True).minimum(last)  # a wrong index would end the process of a GPU
    return (place if tokens is None else tokens.gather(-1, place))[:, 0]


def _ranked(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The probabilities of the likeliest tokens in descending order, and these tokens: both [B, n].

    Equal logits rank by id. If no ranking is needed, the probabilities of all tokens in order, and None.
    """
    # Relative to the largest logit, so that no temperature overflows; a GPU multiplies by the inverse, which must be finite.
    temperature = max(sampling.temperature, torch.finfo(logits.dtype).tiny)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_k:
        tokens = likeliest(logits, min(sampling.top_k, logits.shape[-1]))
        return scores.gather(-1, tokens).softmax(-1), tokens
    probabilities = scores.softmax(-1)
    if sampling.top_p == 1:
        return probabilities, None
    tokens = logits.argsort(dim=-1, descending=True, stable=True)
    return probabilities.gather(-1, tokens), tokens


def likeliest(logits: Tensor, count: int) -> Tensor:
    """The tokens of the largest logits in descending order, float32 [..., V] -> int64 [..., count]; equal ones rank by id."""
    bits = (logits + 0.0).view(torch.int32)  # of -0, which equals 0, that of 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # as the logits are
    return ((ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)).topk(count).indices


def continuing(model: CausalLM, state: ModelState) -> Callable[[Tensor], Tensor]:
    """Continue texts by one more token each, int64 [B] -> logits [B, V]. The state is consumed.

    With a state of constant size on a GPU, this is one CUDA graph.
    """
    device = next(model.parameters()).device
    if _can_record(model):
        changed, tokens = list(state.tensors()), torch.zeros_like(state.position)
        return recorded(lambda drawn: read_token(model, drawn, state)[0], (tokens,), changed)
    decoder = model.compile_for_decoding()

    def read(tokens: Tensor) -> Tensor:
        nonlocal state
        logits, state = decoder.extend(tokens.to(device), state)
        return logits

    return read


def drawing(
    model: CausalLM, state: ModelState, sampling: Sampling, generator: torch.Generator, seen: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Continue texts by the tokens that were drawn last, int64 [B], and draw the next ones. The state is consumed.

    Where one function reads a token, on a CPU or as a CUDA graph, it also draws the next one. The generator is on the CPU, and
    so are the tokens of the texts, `seen`, bool [B, V], for a penalty of repetitions.
    """
    count = len(state)
    if _can_record(model):
        tokens = torch.zeros_like(state.position)
        uniform = torch.zeros(count, dtype=torch.float64, device=tokens.device)
        seen = None if seen is None else seen.to(tokens.device)
        changed = [*state.tensors(), *(() if seen is None else (seen,))]

        def read_and_pick(tokens: Tensor, uniform: Tensor) -> Tensor:
            return pick(read_token(model, tokens, state)[0], sampling, uniform, seen)

        step = recorded(read_and_pick, (tokens, uniform), changed)
        return lambda tokens: step(tokens, uniform_numbers(count, generator))
    native = model.compile_for_decoding().native
    if native is None or seen is not None or count > MAX_STREAMS:
        read_next = continuing(model, state)
        return lambda tokens: draw(read_next(tokens), sampling, generator, seen)
    draw_next, how = native.draw, (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return lambda tokens: draw_next(tokens, uniform_numbers(count, generator), *how, state)


def _can_record(model: CausalLM) -> bool:
    return next(model.parameters()).is_cuda and model.constant_state


def recorded(function: Callable[..., Tensor], inputs: Sequence[Tensor], changed: Sequence[Tensor]) -> Callable[..., Tensor]:
    """A function of tensors as a CUDA graph, which launches the hundreds of kernels of a token at once.

    The function launches the same at each call, and copies nothing to the host. It reads its arguments from `inputs`, and
    changes `changed` in place, which stay as they are until the first call. The result takes tensors on any device; its next
    call overwrites the tensor that it returns.
    """
    before = [tensor.clone() for tensor in changed]
    # A process records one graph at a time, and must not wait for the whole device meanwhile. Weights are cast anew under
    # autocast: the copies in its cache end with the context.
    kind = inputs[0].device.type
    casting = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)
    with GPU_LOCK, torch.cuda.device(inputs[0].device), casting:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # the graph must not record what the first calls set up
            for _ in range(3):
                function(*inputs)
                for tensor, value in zip(changed, before, strict=True):  # each time: there may be no position after the next
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # On a stream of this device and this graph: by default, all graphs share one stream, on the device of the first, and
        # the workspaces of its matrix products.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            out = function(*inputs)

    def replay(*given: Tensor, _memory: object = (function, changed)) -> Tensor:  # a graph does not keep its memory alive
        for tensor, value in zip(inputs, given, strict=True):
            tensor.copy_(value, non_blocking=True)
        graph.replay()
        return out

    return replay
