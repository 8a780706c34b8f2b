"""`lineartime generate`: continue a prompt."""

import dataclasses
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from lineartime.checkpoint import Which
from lineartime.choices import Device
from lineartime.errors import Argument, ArgumentError, reporting
from lineartime.screen import SCREEN

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained causal model; text appears as it is produced."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one checkpoint."""
    checkpoint: Which | None = None
    """Checkpoint of the run: best, last, or the step of one; the default is the best, by validation loss."""
    prompt: str = ""
    """Text to continue; an empty one begins a new document."""
    prompt_file: Path | None = None
    """File with the text to continue, exactly as it is, its last newline included; - for standard input."""
    max_tokens: int = 500
    """Tokens to produce at most; the model may end its document earlier."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation; it is cut before the first one to appear."""
    samples: int = 1
    """Continuations to produce; with more than one, each is printed when it is complete."""
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
    json: bool = False
    """Print each continuation as one line of JSON, without the prompt before it."""


def run(options: Options) -> None:
    """Write the prompt and its continuation to standard output, token by token; several continuations one after another.

    A note on how they are computed goes to standard error.
    """
    from lineartime.machine import autocast, choose_device, using_threads

    prompt, device = _prompt(options), choose_device(options.device)
    with using_threads(options.threads), autocast(device, options.precision == "bf16"):
        _generate(options, prompt, device)


def _generate(options: Options, prompt: str, device: "torch.device") -> None:
    from lineartime.checkpoint import find_checkpoint, load, load_tokenizer
    from lineartime.generation import Sampling
    from lineartime.models.heads import CausalLM, check_model
    from lineartime.text_generation import generate_samples, generate_text

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    checkpoint = find_checkpoint(options.run, options.checkpoint)
    model = check_model(load(checkpoint, device), CausalLM, "generate")
    tokenizer = load_tokenizer(checkpoint)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show every character
    note = f"{checkpoint}: {device.type}, {options.precision}"
    if options.samples == 1 and not options.json:
        pieces = generate_text(model, tokenizer, prompt, options.max_tokens, sampling, options.stop)
        print(note, file=SCREEN, flush=True)
        sys.stdout.write(prompt)
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        return
    print(note, file=SCREEN, flush=True)
    samples = generate_samples(model, tokenizer, prompt, options.samples, options.max_tokens, sampling, options.stop)
    for number, sample in enumerate(samples, 1):
        if options.json:
            print(json.dumps({"sample": number, "prompt": prompt, **dataclasses.asdict(sample)}), flush=True)
        else:
            print(f"--- sample {number} of {options.samples} ---\n{prompt}{sample.text}", flush=True)


def _prompt(options: Options) -> str:
    """The text to continue, from one of the two options."""
    if options.prompt_file is None:
        return options.prompt
    if options.prompt:
        raise ArgumentError("prompt_file", "cannot be combined with ", Argument("prompt"), ": use one or the other.")
    try:
        if options.prompt_file == Path("-"):
            return sys.stdin.buffer.read().decode()
        with reporting("read", options.prompt_file):
            return options.prompt_file.read_bytes().decode()
    except UnicodeDecodeError:
        raise ArgumentError("prompt_file", f"is {options.prompt_file}, which is not UTF-8 text: convert it to UTF-8.") from None
