"""The setup of a run: its text, tokenizer and model, which every process creates identically."""

import dataclasses
import hashlib
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import torch

from lineartime import checkpoint as checkpoints
from lineartime.checkpoint.format import HELD_OUT, WEIGHTS, check_weights
from lineartime.choices import Precision, Split
from lineartime.data import (
    BatchMaker,
    CachedLoader,
    Corpus,
    Loader,
    LocalCorpus,
    Rows,
    StreamingLoader,
    Tokenizer,
    TokenStream,
    describe_splits,
    fingerprint,
    load_corpus,
    missing_split,
    no_text,
    portable_identity,
    read_tokenizer,
    ready_tokenizer,
    size_to_train,
    text_length,
    token_stream,
    tokenizer_for,
    tokenizer_from_json,
)
from lineartime.data.corpora import load_corpus_of_run
from lineartime.data.tokenizers import names_folder
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.evaluation.perplexity import bits_per_byte
from lineartime.host import cache_folder
from lineartime.layers.contract import NO_FUTURE, BrokenPromiseError, check_mixer
from lineartime.machine import choose_compile, choose_device, choose_precision, faster_precision
from lineartime.models.backbone import Block
from lineartime.models.config import ModelConfig
from lineartime.models.cost import check_memory
from lineartime.models.language_model import LanguageModel, build_model
from lineartime.models.systems import nearest_preset, resolve
from lineartime.training.config import TrainConfig, errors_in_override
from lineartime.training.parallel import Objective, World


class Text:
    """The text of a run, encoded (unless it is streamed) and ready to be read. `rows` are this process's share of a step.

    Attributes:
        is_lossy: whether decoding fails to restore the beginning of the held-out text, so that losses per byte leave some out.
        identity: a description that changes with the text, training or held out, and not with its path.
        splits: a line that describes each split of the text.

    Raises LineartimeError for text that cannot be read or is too short.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, config: TrainConfig, rows: Rows, cache: Path) -> None:
        if corpus.describe("train") is None:
            raise missing_split(corpus, "train")
        held_out = config.eval_windows * config.context_length + 1 if config.streaming else None
        self.validation = token_stream(corpus, "validation", tokenizer, cache, held_out)
        if len(self.validation) < 2:
            raise no_text(self.validation.name)
        sample = next((block[:5000] for document in corpus.documents("validation") for block in document if block.strip()), "")
        self.is_lossy = tokenizer.decode(tokenizer.encode(sample).tolist()).strip() != sample.strip()
        make = BatchMaker(tokenizer, config.task, config.seed, config.packed)
        length = text_length(config.context_length, config.task, tokenizer, config.packed)
        if config.streaming:
            self.loader: Loader = StreamingLoader(corpus, make, length, rows)
            self.name = f"a stream of {corpus.name}"
            self.splits = describe_splits(corpus, {"validation": self.validation})
            training = f"a stream of text {hashlib.sha256(portable_identity(corpus, 'train').encode()).hexdigest()[:12]}"
        else:
            stream = token_stream(corpus, "train", tokenizer, cache)
            self.loader = CachedLoader(stream, make, length, rows)
            self.name = f"{len(stream):,} tokens of {corpus.name}"
            streams: dict[Split, TokenStream] = {"train": stream, "validation": self.validation}
            # What cannot be read should show now, and not after days of training. `eval` finds the tokens in the cache.
            if corpus.describe("test") and all(isinstance(source, LocalCorpus) for source in corpus.sources):
                streams["test"] = token_stream(corpus, "test", tokenizer, cache)
            self.splits = describe_splits(corpus, streams)
            training = f"{len(stream):,} tokens, digest {stream.digest}"
        self.identity = f"{training}{HELD_OUT}{self.validation.digest}"
        self._causal = config.task != "mlm"

    def bits_per_byte(self, loss: float) -> float | None:
        """A validation loss in nats per token, as bits per byte of the held-out text; None for masked tokens."""
        return bits_per_byte(loss, len(self.validation), self.validation.n_bytes) if self._causal else None


@dataclass(frozen=True)
class Setup:
    """The parts of a run before its first step."""

    config: TrainConfig  # the options, with "auto" and defaults resolved
    device: torch.device
    tokenizer: Tokenizer
    text: Text  # the text to train on and to evaluate on
    objective: Objective  # the model and its loss
    slice_unit: int  # with context parallelism, the length of a sequence must be a multiple of this
    tokens_per_step: int  # over all processes
    why_not_compiled: str = ""  # why the model is not compiled, although it was asked for or would save time

    @property
    def model(self) -> LanguageModel:
        """The model."""
        return self.objective.model

    def summary(self, world: World) -> str:
        """A one-line summary of the run."""
        config = self.config
        processes = "" if world.size == 1 else f" x {world.size} processes ({config.parallel})"
        if world.context_parallel > 1:
            processes += f", {world.context_parallel} per sequence"
        compiled = ", compiled" if config.compile == "on" else ""
        if self.why_not_compiled:
            compiled = f", not compiled because {self.why_not_compiled}"
        return (
            f"{config.preset}: {self.model.n_parameters:,} parameters, vocabulary of {self.tokenizer.vocab_size:,}, "
            f"{self.device.type}{processes}, {config.precision}{compiled}; "
            f"{config.steps:,} steps of {self.tokens_per_step:,} tokens, from {self.text.name}, to {config.run_directory}"
        )


def set_up(config: TrainConfig, world: World, start: Path | None) -> Setup:
    """Build a run's model, with the weights of a checkpoint `start` if there is one, and open its text.

    Raises LineartimeError for options that are incompatible with each other, the text or this machine.
    """
    weights = start or config.init_from
    with world.raise_on_all_ranks():
        device = choose_device(config.device, world.local_rank)
        rows = config.rows(world.data_rank, world.data_ranks)
        cache = config.cache or cache_folder()
        if start is None and weights is not None:
            check_start(config, weights)
    corpus: Corpus = world.local_main_first("the corpus", lambda: _corpus(config, start))
    tokenizer: Tokenizer = world.local_main_first("the tokenizer", lambda: _tokenizer(config.tokenizer, start, corpus, cache))
    # Each machine trains a tokenizer, and unigram tokenizers of the same text differ from one training to the next.
    definition = world.share(tokenizer.to_json)
    if definition != tokenizer.to_json():
        tokenizer = tokenizer_from_json(definition, "the tokenizer of the main process")
    with world.raise_on_all_ranks():
        if start is None and weights is not None and fingerprint(tokenizer) != fingerprint(read_tokenizer(weights)):
            raise _unfit("tokenizer", f"is {config.tokenizer or 'bytes'}", "has learnt the tokens of another one")
        # A run keeps its model, whatever its preset means today.
        model_config = config.model_config(tokenizer.vocab_size) if start is None else checkpoints.read_model_config(start)
        ranks, chunk_size = config.context_parallel, lcm(*_chunk_sizes(model_config))
        slice_unit = ranks * chunk_size
        if ranks > 1 and config.context_length % slice_unit:
            processes = f"{ranks} processes (`context_parallel`) x chunk_size {chunk_size}"
            problem = f"is {config.context_length}, but must be a multiple of {slice_unit}: {processes}."
            raise ArgumentError("context_length", problem)
        _check_memory(model_config, config, rows, device, world)
        torch.manual_seed(config.seed)
        with errors_in_override():
            model = build_model(model_config).to(device)
        if weights is not None:
            checkpoints.load_into(model, weights)
        objective = Objective(model, world.context_group)
    text: Text = world.local_main_first("the text", lambda: Text(corpus, tokenizer, config, rows, cache))
    _check_same_run(config, text, world)
    tokens_per_step = rows.per_step * config.context_length
    tokens, parameters = tokens_per_step * config.steps, objective.model.n_parameters
    precision, (compiled, why_not_compiled) = world.share(
        lambda: (choose_precision(config.precision, device), choose_compile(config.compile, device, parameters, tokens))
    )
    if config.recompute:
        objective.model.recompute_blocks()
    if compiled:
        objective.model.compile_blocks()
    # Checkpoints store the resolved options, so that a resumed run computes the same.
    resolved = dataclasses.replace(
        config, precision=precision, compile="on" if compiled else "off", tokens_per_batch=tokens_per_step
    )
    return Setup(resolved, device, tokenizer, text, objective, slice_unit, tokens_per_step, why_not_compiled)


def _corpus(config: TrainConfig, start: Path | None) -> Corpus:
    """The text of a run. If a resumed run is not given another place of it, an error says that it is the run's."""
    is_known = start is not None and config.to_dict()["data"] == checkpoints.read_training_state(start).config.get("data")
    load = load_corpus_of_run if is_known else load_corpus
    return load(config.data, config.text_column, config.include, config.exclude)


def _tokenizer(choice: str | None, start: Path | None, corpus: Corpus, cache: Path) -> Tokenizer:
    """The tokenizer of the checkpoint to resume from; otherwise that of a name or a path, such as another run's folder."""
    if start is not None:
        return read_tokenizer(start)
    if choice is not None and names_folder(choice):
        return checkpoints.load_tokenizer(choice)
    return tokenizer_for(choice, corpus, cache)


def _chunk_sizes(model: ModelConfig) -> list[int]:
    """The chunk size of each mixer; 1 for one without chunks."""
    return [int(mixer.options.get("chunk_size", 1)) for mixer in model.mixers]


def _check_memory(model_config: ModelConfig, config: TrainConfig, rows: Rows, device: torch.device, world: World) -> None:
    """Raise ArgumentError for a model or a step that needs more memory than the machine has, before anything is allocated."""
    chunk_size = min(*_chunk_sizes(model_config), config.context_length)  # shorter sequences are read in shorter chunks
    length = -(-config.context_length // chunk_size) * chunk_size  # and longer ones are padded to whole chunks
    with errors_in_override("context_length", "batch_size", "tokens_per_batch"):
        check_memory(
            model_config,
            device,
            copies=4,  # weights, gradients and the two moments of AdamW
            processes=world.size if config.parallel == "fsdp" else 1,
            sequences=rows.at_once,
            tokens=rows.at_once * length // world.context_parallel,
            kept_blocks=1 if config.recompute else model_config.n_blocks,
            number_bytes=2 if choose_precision(config.precision, device) == "bf16" else 4,
            step_tokens=config.context_length * rows.per_step // rows.ranks,
        )


_MAY_DIFFER = ("data", "tokenizer", "cache", "device", "threads")
"""Options whose values may differ between the machines of a run: paths, and what suits a machine."""


def _check_same_run(config: TrainConfig, text: Text, world: World) -> None:
    """Raise LineartimeError, in every process, unless all processes have the same options and the same text."""
    own = {name: str(value) for name, value in config.to_dict().items() if name not in _MAY_DIFFER}
    own["the text"] = text.identity
    first, *others = world.gather(own)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                error = LineartimeError(
                    f"Process {rank} was started for another run than process 0: {name} is {other[name]} there, and {value} in "
                    "process 0. Start all processes with the same options and the same text."
                )
                raise world.reported_by_main(error)


def check_start(config: TrainConfig, start: Path) -> None:
    """Raise ArgumentError, naming the option, unless the weights of a checkpoint fit the model that the options describe."""
    theirs = checkpoints.read_model_config(start)
    size, nearest = _vocab_size(config.tokenizer), nearest_preset(theirs)
    if size != theirs.vocab_size:
        raise _unfit("tokenizer", f"is {config.tokenizer}, which has {size:,} tokens", f"has {theirs.vocab_size:,}")
    ours = config.model_config(size)
    with errors_in_override("preset", "init_from"):
        try:
            check_weights(start / WEIGHTS, ours)
        except checkpoints.UnfitWeightsError as error:
            if config.preset != nearest:
                raise _unfit("preset", f"is {config.preset}", f"is {nearest}") from None
            what = f"is {start}, whose weights do not fit the model that is asked for: {error}. Leave out what changes it in "
            raise ArgumentError("init_from", what, "`override`", " or ", "`task`", ".") from None
    # A preset of another size is a mistake, although the overrides that are taken from the other run make it fit.
    named, found = (resolve(name, config.task) for name in (config.preset, nearest))
    if (named.d_model, named.n_blocks) != (found.d_model, found.n_blocks):
        raise _unfit("preset", f"is {config.preset}", f"is {nearest}")


def start_notes(config: TrainConfig, tokenizer: Tokenizer, model: ModelConfig) -> list[str]:
    """Sentences about what the user of a new run might not expect, for instance a tokenizer that is smaller than its name says.

    Raises BrokenPromiseError for a mixer of the user's own that reads later tokens: its losses would mean nothing.
    """
    notes = _check_own_mixer(model)
    wanted = None if config.tokenizer is None else size_to_train(config.tokenizer)
    if wanted is not None and tokenizer.vocab_size < wanted:
        smaller = f"The tokenizer has {tokenizer.vocab_size:,} tokens instead of {wanted:,}"
        notes.append(f"{smaller}, because the text is too short for more.")
    if config.init_from is not None and checkpoints.has_training_state(config.init_from):
        before = checkpoints.read_training_state(config.init_from).config.get("context_length")
        if before is not None and before != config.context_length:
            now = f"context_length is {config.context_length:,}"
            notes.append(f"The weights were trained on {before:,} tokens at a time; now, {now}.")
    return notes


def precision_notes(precision: Precision, before: Precision | None, device: torch.device) -> list[str]:
    """A sentence about the precision of a run, if it may surprise; `before` is that of the run that is resumed."""
    faster, reason = faster_precision(device)
    if before not in (None, precision):
        return [f"Computing in {precision}, and no longer in {before}."]
    if precision != faster and (precision == "bf16" or before is not None):
        return [f"Computing in {precision}; {faster} would be faster here, because {reason}."]
    return []


def _check_own_mixer(model: ModelConfig) -> list[str]:
    """Check the mixers that are not of the library. A broken promise that does not concern training is a note."""
    notes = []
    for own in (each for each in dict.fromkeys(model.mixers) if each.layer.__module__.partition(".")[0] != "lineartime"):
        with torch.random.fork_rng(devices=[]):
            mixer = Block(model, own).mixer
        try:
            check_mixer(mixer)
        except LineartimeError as error:
            if isinstance(error, BrokenPromiseError) and error.promise == NO_FUTURE:
                raise
            notes.append(str(error))
    return notes


def _unfit(option: str, given: str, there: str) -> ArgumentError:
    return ArgumentError(option, f"{given}, but the model of `init_from` {there}: leave it out.")


def _vocab_size(choice: str | None) -> int:
    """The number of tokens of a tokenizer; of one that is still to be trained, the number in its name."""
    if choice is not None and names_folder(choice):
        return checkpoints.load_tokenizer(choice).vocab_size
    size = None if choice is None else size_to_train(choice)
    return ready_tokenizer(choice).vocab_size if size is None else size
