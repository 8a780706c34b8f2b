"""`lineartime generate`: continue a prompt."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from lineartime.checkpoint import Which
from lineartime.choices import Device
from lineartime.errors import ArgumentError, LineartimeError


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained causal model; text appears as it is produced."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one checkpoint."""
    checkpoint: Which | None = None
    """Checkpoint of the run: best, last, or the step of one; the default is the best, by validation loss."""
    prompt: str = ""
    """Text to continue; an empty one begins a new document."""
    max_tokens: int = 500
    """Tokens to produce at most; the model may end its document earlier."""
    temperature: float = 0.8
    """Below 1, likely tokens become more likely; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw only from this many of the most likely tokens; 0 for all."""
    top_p: float = 0.95
    """Draw only from the most likely tokens that together reach this probability; 1 for all."""
    seed: int | None = None
    """Seed of the draws; by default every run produces another text."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of matrix products. Token by token, bf16 is seldom faster than fp32."""
    threads: int | None = None
    """Threads of the CPU; the default is PyTorch's. Where other programs run too, 1 is often fastest."""


def run(options: Options) -> None:
    """Write the prompt and its continuation to standard output, token by token; a note on how goes to standard error."""
    from lineartime.machine import using_threads

    with using_threads(options.threads):
        _generate(options)


def _generate(options: Options) -> None:
    from lineartime.checkpoint import find_checkpoint, load, load_tokenizer
    from lineartime.generation import Sampling, generate
    from lineartime.layers.checks import check_positive
    from lineartime.machine import autocast, choose_device
    from lineartime.models import CausalLM

    check_positive(max_tokens=options.max_tokens)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    checkpoint = find_checkpoint(options.run, options.checkpoint)
    device = choose_device(options.device)
    model = load(checkpoint, device)
    if not isinstance(model, CausalLM):
        raise LineartimeError(f"{checkpoint} is a masked language model, which cannot generate: train with --task clm.")
    tokenizer = load_tokenizer(checkpoint)
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise ArgumentError("prompt", "is not UTF-8 text: convert it to UTF-8.") from None
    prompt = tokenizer.encode(options.prompt).tolist() or [tokenizer.end_of_document]
    longest, tokens = model.config.longest_sequence, len(prompt) + options.max_tokens - 1  # the model never reads the last one
    if longest is not None and tokens > longest:
        raise LineartimeError(
            f"--prompt and --max-tokens make {tokens} tokens to read, but this model reads at most {longest}: ask for fewer."
        )
    decoder = tokenizer.stream_decoder()
    for token in prompt:  # the text of a token can depend on the token before
        decoder.push(token)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show every character
    print(f"{checkpoint}: {device.type}, {options.precision}", file=sys.stderr, flush=True)
    sys.stdout.write(options.prompt)
    try:
        with autocast(device, options.precision == "bf16"):
            for token in generate(model, prompt, options.max_tokens, sampling, tokenizer.end_of_document):
                sys.stdout.write(decoder.push(token))
                sys.stdout.flush()
        sys.stdout.write(decoder.flush())
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
