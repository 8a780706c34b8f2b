"""Generation: read the prompt once, then extend the text token by token from the state; no token is read twice.

Shapes: N tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.fields import check_fields
from lineartime.layers.checks import check_positive
from lineartime.layers.streams import tensors_of
from lineartime.models.backbone import BackboneState
from lineartime.models.heads import CausalLM, check_model

Ids = Iterable[int] | Tensor
"""Token ids: any sequence of whole numbers, a numpy array [N], or a tensor [N]."""

PREFILL = 1024
"""Tokens of a prompt that a causal model reads at a time."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw only from this many of the likeliest tokens; 0 for all.
        top_p: draw only from the likeliest tokens that together reach this probability; 1 for all.
        seed: of the random draws; None for a different one each time.

    Raises:
        ArgumentError: for a value of the wrong type or outside what its argument allows.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.temperature >= 0:
            raise ArgumentError("temperature", f"is {self.temperature}, but must not be negative.")
        if self.top_k < 0:
            raise ArgumentError("top_k", f"is {self.top_k}, but must not be negative; 0 allows all tokens.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", f"is {self.seed}, but must be from 0 to 2^63 - 1.")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", f"is {self.top_p}, but must be above 0 and at most 1.")

    def generator(self) -> torch.Generator:
        """A random number generator with this seed."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def generate(
    model: CausalLM, prompt: Ids, max_tokens: int, sampling: Sampling | None = None, stop_token: int | None = None
) -> Iterator[int]:
    """Continue a prompt, and yield each token as soon as it is drawn.

    Args:
        model: a causal language model, in evaluation mode; one of task "prefix-lm" reads the prompt as its prefix.
        prompt: token ids, at least one: a sequence, a numpy array [N] or a tensor [N].
        max_tokens: the largest number of tokens to draw.
        sampling: how to draw them; the default is `Sampling()`.
        stop_token: a token that ends the text; it is not yielded.

    Raises:
        ArgumentError: for an empty prompt, an id outside the vocabulary, more tokens than the model can read, or an argument
            of the wrong type.
    """
    (ids,), sampling = _checked(model, [prompt], max_tokens, sampling, stop_token)
    return _tokens(model, ids, max_tokens, sampling, stop_token)


def _tokens(
    model: CausalLM, prompt: Sequence[int], max_tokens: int, sampling: Sampling, stop_token: int | None
) -> Iterator[int]:
    """`generate` without its checks, which a generator would put off until its first token."""
    generator = sampling.generator()
    with torch.no_grad():
        logits, state = prefill(model, prompt)
    device = logits.device
    for drawn in range(max_tokens):
        token = draw(logits, sampling, generator)
        if token == stop_token:
            return
        yield token
        if drawn + 1 < max_tokens:
            with torch.no_grad():
                new, state = model.extend(torch.tensor([[token]], device=device), state)
            logits = new[0, -1]


def generate_batch(
    model: CausalLM,
    prompts: Sequence[Ids],
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    ended: Callable[[int, int], bool] | None = None,
) -> list[list[int]]:
    """Continue several prompts of any lengths together; no text depends on the other prompts.

    The model reads each prompt by itself, and equal prompts once; then every step adds a token to each text, in the same time
    and memory however long they are. On a GPU, the step is recorded once as a CUDA graph.

    Args:
        model: a causal language model, in evaluation mode, that can step (`model.can_step`), as FLASH can.
        prompts: token ids, at least one in each.
        max_tokens, sampling, stop_token: as for `generate`; one generator draws for all texts.
        ended: called with the number of a text and its new token; the text ends with this token if it returns True.

    Returns:
        The tokens drawn for each prompt, without the stop token.

    Raises:
        ArgumentError: as for `generate`.
        ValueError: for a model that can only continue one prompt at a time.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or getattr(prompts, "ndim", 1) == 0:
        raise ArgumentError("prompts", f"is {prompts!r}, but must be a sequence of prompts, each of them token ids.")
    if ended is not None and not callable(ended):
        raise ArgumentError("ended", f"is {ended!r}, but must be a function of the number of a text and its new token.")
    if not len(prompts):
        return []
    read_by, sampling = _checked(model, prompts, max_tokens, sampling, stop_token)
    generator = sampling.generator()
    texts: list[list[int]] = [[] for _ in prompts]
    growing = set(range(len(prompts)))
    with torch.no_grad():
        once = {ids: prefill(model, ids) for ids in dict.fromkeys(read_by)}
        read = [once[ids] for ids in read_by]
        logits = torch.stack([last for last, _ in read])
        streams = model.join_streams([state for _, state in read])
        step = recorded_step(model, streams, len(prompts)) if logits.is_cuda else partial(model.step, streams=streams)
        for drawn in range(max_tokens):
            tokens = [draw(row, sampling, generator) if text in growing else 0 for text, row in enumerate(logits.float().cpu())]
            growing -= {text for text in growing if tokens[text] == stop_token}
            for text in sorted(growing):
                texts[text].append(tokens[text])
                if ended is not None and ended(text, tokens[text]):
                    growing.remove(text)
            if not growing or drawn + 1 == max_tokens:
                break
            logits = step(torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return texts


def _checked(
    model: object, prompts: Sequence[Ids], max_tokens: int, sampling: Sampling | None, stop_token: int | None
) -> tuple[list[tuple[int, ...]], Sampling]:
    """The ids of each prompt, and how to draw; ArgumentError for what `generate` cannot work with."""
    known = check_model(model, CausalLM, "generate").config
    check_positive(max_tokens=max_tokens)
    sampling = chosen(sampling)
    if stop_token is not None:
        token_ids("stop_token", [stop_token], known.vocab_size)
    found = [token_ids("prompt", prompt, known.vocab_size) for prompt in prompts]
    longest = known.longest_sequence
    for ids in found:
        if not ids:
            raise ArgumentError("prompt", "is empty, but must hold at least one token, for instance the end of a document.")
        tokens = len(ids) + max_tokens - 1  # the model never reads the last one
        if longest is not None and tokens > longest:
            raise ArgumentError(
                "max_tokens",
                f"is {max_tokens} after a prompt of {len(ids)} tokens, which makes {tokens} tokens to read, but this model "
                f"reads at most {longest}: ask for fewer, or shorten the prompt.",
            )
    return found, sampling


def chosen(sampling: Sampling | None) -> Sampling:
    """The sampling that was given, or the usual one; ArgumentError for anything else."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ArgumentError("sampling", f"is {sampling!r}, but must be a Sampling, for instance Sampling(temperature=0.8).")
    return Sampling() if sampling is None else sampling


def token_ids(argument: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids as whole numbers; ArgumentError, naming the argument and the id, for anything else.

    Args:
        argument: the name of the argument.
        given: a sequence of whole numbers, a numpy array [N] or a tensor [N].
        vocab_size: ids are below this.
    """
    if isinstance(given, str):
        raise ArgumentError(argument, "is a text, but must be token ids: encode it with the model's tokenizer.")
    if getattr(given, "ndim", 1) != 1:
        raise ArgumentError(argument, f"has shape {list(given.shape)}, but must be the token ids of one text, [N].")
    try:
        values = given.tolist() if hasattr(given, "tolist") else list(given)
    except TypeError:
        raise ArgumentError(argument, f"is {given!r}, but must be a sequence of token ids.") from None
    ids = []
    for value in values:
        try:
            if isinstance(value, bool):
                raise TypeError
            ids.append(index(value))
        except TypeError:
            raise ArgumentError(argument, f"holds {value!r}, but must hold token ids, which are whole numbers.") from None
        if not 0 <= ids[-1] < vocab_size:
            raise ArgumentError(
                argument,
                f"holds the id {value}, but this model's vocabulary has {vocab_size:,} tokens: ids are from 0 to "
                f"{vocab_size - 1}.",
            )
    return tuple(ids)


def recorded_step(model: CausalLM, streams: BackboneState, batch: int) -> Callable[[Tensor], Tensor]:
    """`model.step` as a CUDA graph, which launches the hundreds of kernels of a token at once."""
    ids = torch.zeros(batch, 1, dtype=torch.long, device=streams[0].position.device)
    before = [tensor.clone() for tensor in tensors_of(streams)]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # the graph must not record what the first calls set up
        for _ in range(3):
            model.step(ids, streams)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.step(ids, streams)
    for tensor, value in zip(tensors_of(streams), before, strict=True):
        tensor.copy_(value)  # undo the trial steps

    def step(tokens: Tensor) -> Tensor:
        ids.copy_(tokens)
        graph.replay()
        return logits

    return step


def read(model: CausalLM, ids: Tensor) -> tuple[Tensor, BackboneState]:
    """Read the beginning of streams, ids [B, N]: the last logits [B, V], and the state.

    A model of task "prefix-lm" reads them as a prefix, all at once, and others `PREFILL` tokens at a time.
    """
    if model.config.task == "prefix-lm":
        hidden, state = model.backbone.read_prefix(ids)
        return model.logits(hidden[:, -1]), state
    state = model.init_state(ids.shape[0])
    for piece in ids.split(PREFILL, dim=1):
        hidden, state = model.backbone.extend(piece, state)
    return model.logits(hidden[:, -1]), state


def prefill(model: CausalLM, prompt: Sequence[int]) -> tuple[Tensor, BackboneState]:
    """Read a prompt: the logits [V] after its last token, and the state."""
    logits, state = read(model, torch.tensor([prompt], device=next(model.parameters()).device))
    return logits[0], state


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from logits [V]."""
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Relative to the largest logit and in float64, so that no temperature overflows.
    ranked, tokens = ((logits - logits.max()).double() / sampling.temperature).sort(descending=True)
    if sampling.top_k:
        ranked, tokens = ranked[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = ranked.softmax(0)
    # Keep the shortest head of the ranking that reaches top_p: the tokens before each kept one do not reach it.
    probabilities[probabilities.cumsum(0) - probabilities >= sampling.top_p] = 0.0
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
