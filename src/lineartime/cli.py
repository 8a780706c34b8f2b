"""The command line: options in, calls of the library, results out. Each command's options are the fields of a dataclass."""

import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lineartime import checkpoint as checkpoints
from lineartime.bench.command import run_benchmark
from lineartime.bench.config import BenchConfig
from lineartime.catalogue import PresetsConfig, show_presets
from lineartime.data import default_cache, load_corpus, load_tokenizer, token_stream
from lineartime.data.readers import Split
from lineartime.data.tokenize import TokenizeConfig, run_tokenize
from lineartime.errors import ArgumentError, LineartimeError, ReportedError, cannot
from lineartime.evaluation import Evaluation, carried, windowed
from lineartime.generation import Sampling, generate
from lineartime.info import InfoConfig, show_info
from lineartime.machine import Device, Precision, choose_device, choose_precision
from lineartime.models import CausalLM
from lineartime.models.heads import LanguageModel
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import METRICS_FILE
from lineartime.runs.table import RunsConfig, show_runs
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import is_main_process
from lineartime.training.loop import train
from lineartime.training.resuming import complete, saved_config


@dataclass(frozen=True)
class EvalConfig:
    """Measure a trained model on a whole split: nats, bits per byte, perplexity per token and word, and loss by position."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run (its best checkpoint is taken), or of one checkpoint."""
    split: Split = "test"
    """Part of the text to measure on."""
    data: str | None = None
    """Name of a corpus, or a file or folder, which is split as for training; the default is what the model was trained on."""
    context: Literal["windowed", "carried"] = "windowed"
    """windowed: windows that start anew; carried: the split as one sequence, all that came before being context."""
    context_length: int | None = None
    """Tokens in a window, or read at a time when carried; the default is the context the model was trained with."""
    stride: int | None = None
    """Tokens from one window to the next; the default is a whole window. Smaller gives more context, and takes longer."""
    max_tokens: int | None = None
    """Measure only on so many tokens from the beginning of the split."""
    batch_size: int = 8
    """Windows computed at once."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where this machine is faster with it."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""
    json: bool = False
    """Print the result as one line of JSON."""


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with a trained causal model; text appears as it is produced."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run (its best checkpoint is taken), or of one checkpoint."""
    prompt: str = ""
    """Text to continue; empty begins a new document."""
    max_tokens: int = 500
    """Tokens to produce at the most; a model may end its document earlier."""
    temperature: float = 0.8
    """Below 1 likely tokens become likelier; 0 always takes the likeliest token."""
    top_k: int = 0
    """Draw only from so many of the likeliest tokens; 0 for all."""
    top_p: float = 0.95
    """Draw only from the likeliest tokens that together reach this probability; 1 for all."""
    seed: int | None = None
    """Seed of the draws; the default gives another text each time."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""


@dataclass(frozen=True)
class _BenchCommand(BenchConfig):
    presets: tyro.conf.Positional[tuple[str, ...]] = BenchConfig.presets
    """Models to compare, by the names that `lineartime presets` lists. Ratios are to the first one."""


_BenchCommand.__doc__ = BenchConfig.__doc__

Command = (
    Annotated[TrainConfig, tyro.conf.subcommand("train")]
    | Annotated[EvalConfig, tyro.conf.subcommand("eval")]
    | Annotated[GenerateConfig, tyro.conf.subcommand("generate")]
    | Annotated[RunsConfig, tyro.conf.subcommand("runs")]
    | Annotated[TokenizeConfig, tyro.conf.subcommand("tokenize")]
    | Annotated[PresetsConfig, tyro.conf.subcommand("presets")]
    | Annotated[_BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[InfoConfig, tyro.conf.subcommand("info")]
)


def parse(arguments: Sequence[str]) -> Command:
    """The command that the arguments give; exits with status 2 and a message for arguments that give none."""
    return tyro.cli(Command, prog="lineartime", description="Transformer quality in linear time.", args=arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error that is shown, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"lineartime {version('lineartime')}, torch {torch.__version__}")
        return 0
    try:
        _check_arguments(arguments)
        command = parse(arguments)
        match command:
            case TrainConfig():
                _train(command, arguments[1:])
            case EvalConfig():
                _eval(command)
            case GenerateConfig():
                _generate(command)
            case RunsConfig():
                show_runs(command)
            case TokenizeConfig():
                run_tokenize(command)
            case PresetsConfig():
                show_presets(command)
            case BenchConfig():
                run_benchmark(command)
            case InfoConfig():
                show_info(command)
    except ReportedError:
        time.sleep(3)  # torchrun ends all processes once one has ended: the one that has something to say comes first
        return 1
    except ArgumentError as error:
        return _fail(f"--{error.argument.replace('_', '-')} {error.predicate}")
    except LineartimeError as error:
        return _fail(str(error))
    except BrokenPipeError:  # whoever read the output, for instance `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _fail(str(cannot("use", error.filename or "a file", error)))
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            raise
        return _fail("The memory of this machine does not suffice: use a smaller --batch-size or --context-length.")
    except KeyboardInterrupt:
        return 130
    return 0


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise LineartimeError for what would be read as something else than was meant."""
    if arguments.count("--override") > 1:
        raise LineartimeError("--override is given twice: give all values after one, --override NAME=VALUE NAME=VALUE.")
    for option, value in pairwise(arguments):
        if value == "" and option in ("--out", "--data", "--tokenizer", "--cache"):
            raise LineartimeError(f"{option} is empty: give a path, or leave the option out.")


def _fail(message: str) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text("error: ", style="bold red") + Text(message))
    return 1


def _train(config: TrainConfig, arguments: Sequence[str]) -> None:
    def reparse(defaults: TrainConfig) -> TrainConfig:
        return tyro.cli(TrainConfig, prog="lineartime train", args=arguments, default=defaults)

    config, left_out = complete(config, reparse)
    run = config.run_directory
    before = _changed(run / METRICS_FILE)
    try:
        train(config, left_out)
        if is_main_process():
            print(f"best checkpoint: {checkpoints.best_checkpoint(run)}")
    finally:  # a run that ended early has a curve to look at, too
        if is_main_process() and _changed(run / METRICS_FILE) != before:
            _draw_curve(config)


def _changed(file: Path) -> int:
    """When a file was last written to; 0 if there is none."""
    return file.stat().st_mtime_ns if file.is_file() else 0


def _draw_curve(config: TrainConfig) -> None:
    try:
        text = Path(config.data).name if config.data else load_corpus(None).name
        print(f"loss curve: {draw_curve(config.run_directory, f'{config.preset} on {text}')}")
    except LineartimeError as error:
        print(f"no loss curve: {error}")


def _load(path: Path, device: torch.device) -> tuple[Path, LanguageModel]:
    checkpoint = checkpoints.find_checkpoint(path)
    return checkpoint, checkpoints.load(checkpoint, device)


def _eval(config: EvalConfig) -> None:
    for option in ("context_length", "max_tokens", "batch_size"):
        value = getattr(config, option)
        if value is not None and value < 1:
            raise LineartimeError(f"--{option.replace('_', '-')} is {value}, but must be at least 1.")
    device = choose_device(config.device)
    checkpoint, model = _load(config.checkpoint, device)
    trained = saved_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    corpus = load_corpus(config.data or trained.data)
    # Of a corpus too large to be encoded, only what is measured on is encoded.
    stream = token_stream(corpus, config.split, tokenizer, config.cache or default_cache(), config.max_tokens)
    bf16 = choose_precision(config.precision, device) == "bf16"
    length = config.context_length or trained.context_length
    try:
        if config.context == "carried":
            if not isinstance(model, CausalLM):
                raise LineartimeError(
                    f"--context carried needs a causal model, but {checkpoint} is a masked one: use --context windowed."
                )
            if config.stride is not None:
                raise LineartimeError("--stride is for --context windowed: carried context has no windows.")
            evaluation = carried(model, stream, tokenizer, segment=length, bf16=bf16, max_tokens=config.max_tokens)
        else:
            evaluation = windowed(
                model,
                stream,
                tokenizer,
                context_length=length,
                stride=length if config.stride is None else config.stride,
                batch_size=config.batch_size,
                bf16=bf16,
                max_tokens=config.max_tokens,
            )
    except ArgumentError:
        raise
    except ValueError as error:  # more tokens than the model can read
        raise LineartimeError(str(error)) from None
    if config.json:
        perplexity = "masked_perplexity" if evaluation.masked else "perplexity"
        facts = {"checkpoint": str(checkpoint), "text": stream.name, perplexity: evaluation.perplexity}
        print(json.dumps({**facts, **dataclasses.asdict(evaluation)}))
    else:
        _print_evaluation(evaluation, str(checkpoint), stream.name)


def _print_evaluation(evaluation: Evaluation, checkpoint: str, stream: str) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"{checkpoint} on {stream}, {evaluation.tokens:,} tokens", soft_wrap=True)
    console.print(f"context         {evaluation.context}", soft_wrap=True)
    console.print(f"loss            {evaluation.loss:.4f} nats per token")
    console.print(f"perplexity      {evaluation.perplexity:.3f} per {'masked token' if evaluation.masked else 'token'}")
    if evaluation.word_perplexity is not None:
        console.print(f"                {evaluation.word_perplexity:.3f} per word")
    if evaluation.bits_per_byte is not None:
        console.print(f"bits per byte   {evaluation.bits_per_byte:.4f}")
    table = Table(
        "position" if evaluation.masked else "tokens read",
        "loss (nats)",
        "tokens",
        title="loss by position in the context",
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    for position in evaluation.by_position:
        reach = f"{position.first:,}" if position.first == position.last else f"{position.first:,} to {position.last:,}"
        table.add_row(reach, f"{position.loss:.4f}", f"{position.count:,}")
    console.print(table)


def _generate(config: GenerateConfig) -> None:
    if config.max_tokens < 1:
        raise LineartimeError(f"--max-tokens is {config.max_tokens}, but must be at least 1.")
    try:
        sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    except ValueError as error:
        raise LineartimeError(f"--{str(error).replace('_', '-', 1)}") from None
    checkpoint, model = _load(config.checkpoint, choose_device(config.device))
    if not isinstance(model, CausalLM):
        raise LineartimeError(f"{checkpoint} is a masked language model, which cannot generate: train with --task clm.")
    tokenizer = load_tokenizer(checkpoint)
    try:
        config.prompt.encode()
    except UnicodeEncodeError:
        raise LineartimeError("--prompt is not UTF-8 text: convert it to UTF-8.") from None
    prompt = tokenizer.encode(config.prompt).tolist() or [tokenizer.end_of_document]
    longest, tokens = model.config.longest_sequence, len(prompt) + config.max_tokens - 1  # the last one is not read
    if longest is not None and tokens > longest:
        raise LineartimeError(
            f"--prompt and --max-tokens make {tokens} tokens to read, but this model reads at most {longest}: ask for fewer."
        )
    decoder = tokenizer.stream_decoder()
    for token in prompt:  # what is said of a token can depend on the one before
        decoder.push(token)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    sys.stdout.write(config.prompt)
    try:
        for token in generate(model, prompt, config.max_tokens, sampling, tokenizer.end_of_document):
            sys.stdout.write(decoder.push(token))
            sys.stdout.flush()
        sys.stdout.write(decoder.flush())
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
