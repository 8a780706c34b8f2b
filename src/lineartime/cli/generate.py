"""`lineartime generate`: continue a prompt."""

import dataclasses
import io
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lineartime.cli.options import Checkpoint, Device, Run, Threads, read_text
from lineartime.files import check_new
from lineartime.screen import SCREEN, Progress
from lineartime.units import size

if TYPE_CHECKING:
    import torch

    from lineartime.models.language_model import CausalLM


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `lineartime generate`."""

    run: Run
    checkpoint: Checkpoint = None
    prompt: str = ""
    """Text to continue; an empty prompt begins a new document."""
    prompt_file: Path | None = None
    """File with the text to continue, used as it is, with its last newline, without a byte order mark; - for standard input."""
    state: Path | None = None
    """File of `save_state`: the prompt continues the text that was read then, which is not read again."""
    save_state: Path | None = None
    """File for what the model remembers after the prompt, for `state`; with `max_tokens` 0, nothing is generated."""
    max_tokens: int = 500
    """Maximum number of tokens to generate; the model may end its document earlier."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation; it is cut before the first one that appears."""
    samples: int = 1
    """Number of continuations; with more than one, they are printed when all are complete."""
    temperature: float = 0.8
    """Sampling temperature: below 1, likely tokens become more likely; 0 always selects the most likely token."""
    top_k: int = 0
    """Sample only from this many of the most likely tokens; 0 for all."""
    top_p: float = 0.95
    """Sample only from the most likely tokens that together reach this probability; 1 for all."""
    min_p: float = 0.0
    """Sample only from tokens with at least this share of the probability of the most likely one; 0 for all."""
    repetition_penalty: float = 1.0
    """Make tokens of the prompt and the text so far less likely, by dividing positive logits by this; 1 for no penalty."""
    seed: int | None = None
    """Random seed; by default, every run generates a different text."""
    device: Device = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of weights and matrix products; bf16 halves the memory that is read for each token."""
    weights: Literal["own", "int8"] = "own"
    """int8 rounds the matrices of FLASH, and reads a byte a weight for each token on a CPU; own leaves them as they are."""
    compile: bool = False
    """Compile the step of a token first, which takes some seconds; useful for long texts."""
    threads: Threads = None
    json: bool = False
    """Print each continuation as one line of JSON, without the prompt before it."""


def run(options: GenerateOptions) -> None:
    """Write the prompt and its continuation to standard output, token by token, or several continuations one after another.

    A note on how the text is computed goes to standard error.
    """
    from lineartime.machine import choose_device, using_threads
    from lineartime.ops.checks import check_positive

    check_positive(samples=options.samples)
    if options.save_state is None or options.max_tokens != 0:
        check_positive(max_tokens=options.max_tokens)
    if options.save_state is not None:
        check_new("save_state", options.save_state)
    prompt, device = read_text(options, "prompt"), choose_device(options.device)
    with using_threads(options.threads):
        _generate(options, prompt, device)


def _generate(options: GenerateOptions, prompt: str, device: "torch.device") -> None:
    from lineartime.checkpoint import load_with_tokenizer
    from lineartime.generation import Sampling, load_state, read_prompt, save_state
    from lineartime.models.language_model import CausalLM, check_model
    from lineartime.text_generation import generate_samples, generate_text, prompt_ids

    sampling = Sampling(**{field.name: getattr(options, field.name) for field in fields(Sampling)})
    loaded = load_with_tokenizer(options.run, device, checkpoint=options.checkpoint)
    tokenizer, model = loaded.tokenizer, check_model(loaded.model, CausalLM, "generate")
    how = _prepare(model, options, device)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show every character
    state = None if options.state is None else load_state(model, options.state)
    notes, rest = [f"{loaded.checkpoint}: {device.type}, {how}"], prompt
    if options.max_tokens:  # checks all arguments, before the slow part
        generate_text(model, tokenizer, prompt, options.max_tokens, sampling, options.stop, state)
    if options.save_state is not None:
        with Progress("reading the prompt"):
            after = read_prompt(model, prompt_ids(tokenizer, prompt, state), state)
        save_state(model, after, options.save_state)
        written = size(options.save_state.stat().st_size)
        notes.append(f"{options.save_state}: the state after {after.position:,} tokens, {written}")
        if options.repetition_penalty == 1:  # otherwise the prompt is read again, for its tokens count
            state, rest = after, ""
    print("\n".join(notes), file=SCREEN, flush=True)
    if options.max_tokens == 0:
        return
    if options.samples == 1 and not options.json:
        try:
            print(prompt, end="")
            for piece in generate_text(model, tokenizer, rest, options.max_tokens, sampling, options.stop, state):
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
        return
    with Progress(f"drawing {options.samples} samples"):
        samples = generate_samples(model, tokenizer, rest, options.samples, options.max_tokens, sampling, options.stop, state)
    for number, sample in enumerate(samples, 1):
        if options.json:
            print(json.dumps({"sample": number, "prompt": prompt, **dataclasses.asdict(sample)}), flush=True)
        else:
            print(f"--- sample {number} of {options.samples} ---\n{prompt}{sample.text}", flush=True)


def _prepare(model: "CausalLM", options: GenerateOptions, device: "torch.device") -> str:
    """Let the model compute as the options say, and tell how it does."""
    import torch

    from lineartime.machine import why_not_compile
    from lineartime.native import SWITCH, why_not_native

    if options.precision == "bf16":
        model.to(torch.bfloat16)
    how: str = options.precision
    if options.weights == "int8":
        model.quantize()
        how += " with int8 weights"
    missing = why_not_native() if device.type == "cpu" and os.environ.get(SWITCH) != "0" else None
    if missing:
        how += f" in plain PyTorch, which is several times slower than C++, because {missing}"
    if not options.compile:
        return how
    if not model.constant_state:
        why_not: str | None = "only steps with a state of constant size can be compiled, such as those of FLASH"
    elif model.compile_for_decoding().native is not None:
        why_not = "the step of this system is one function in C++, which is faster"
    else:
        why_not = why_not_compile(device)
    if why_not:
        return f"{how}, not compiled: {why_not}"
    model.compile_step()
    return f"{how}, compiled: the first token waits for it"
