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
from lineartime.cli.texts import read_text
from lineartime.screen import SCREEN

if TYPE_CHECKING:
    import torch

    from lineartime.models.heads import CausalLM, LanguageModel


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
    """Continuations to produce; with more than one, they are printed when all are complete."""
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
    """Precision of weights and matrix products; bf16 reads half as much memory for each token."""
    compile: bool = False
    """Compile the step of a token first, which takes some seconds: for long texts."""
    threads: int | None = None
    """Threads of the CPU; the default is PyTorch's. Where other programs run too, 1 is often fastest."""
    json: bool = False
    """Print each continuation as one line of JSON, without the prompt before it."""


def run(options: Options) -> None:
    """Write the prompt and its continuation to standard output, token by token; several continuations one after another.

    A note on how they are computed goes to standard error.
    """
    from lineartime.machine import choose_device, using_threads

    prompt, device = read_text("prompt", options.prompt, "prompt_file", options.prompt_file), choose_device(options.device)
    with using_threads(options.threads):
        _generate(options, prompt, device)


def _generate(options: Options, prompt: str, device: "torch.device") -> None:
    from lineartime.checkpoint import load_with_tokenizer
    from lineartime.data.progress import Progress
    from lineartime.generation import Sampling
    from lineartime.text_generation import generate_samples, generate_text

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    loaded = load_with_tokenizer(options.run, device, checkpoint=options.checkpoint)
    model, how = _prepared(loaded.model, options, device)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show every character
    note = f"{loaded.checkpoint}: {device.type}, {how}"
    if options.samples == 1 and not options.json:
        pieces = generate_text(model, loaded.tokenizer, prompt, options.max_tokens, sampling, options.stop)
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
    with Progress(f"drawing {options.samples} samples"):
        samples = generate_samples(model, loaded.tokenizer, prompt, options.samples, options.max_tokens, sampling, options.stop)
    for number, sample in enumerate(samples, 1):
        if options.json:
            print(json.dumps({"sample": number, "prompt": prompt, **dataclasses.asdict(sample)}), flush=True)
        else:
            print(f"--- sample {number} of {options.samples} ---\n{prompt}{sample.text}", flush=True)


def _prepared(model: "LanguageModel", options: Options, device: "torch.device") -> "tuple[CausalLM, str]":
    """The model, as the options say it should compute, and how it does in words."""
    import torch

    from lineartime.machine import why_not_compile
    from lineartime.models.heads import CausalLM, check_model

    model = check_model(model, CausalLM, "generate")
    if options.precision == "bf16":
        model = model.to(torch.bfloat16)
    if not options.compile:
        return model, options.precision
    if not model.steps_in_place:
        why_not = "only the step of FLASH layers can be compiled"
    elif model.steps_in_native:
        why_not = "the step of this system is one function in C++, which is faster"
    else:
        why_not = why_not_compile(device)
    if why_not:
        return model, f"{options.precision}, not compiled: {why_not}"
    model.compile_step()
    return model, f"{options.precision}, compiled: the first token waits for it"
