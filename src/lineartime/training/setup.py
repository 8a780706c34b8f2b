"""What a run is made of, and how it is saved and resumed: its options, its text, tokenizer and model, and its checkpoints.

The main process gathers the weights and the moments of the optimiser and writes them as safetensors, which any program can
read; any number of processes can resume from them.
"""

import dataclasses
import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lineartime import checkpoint as checkpoints
from lineartime import data
from lineartime.choices import Split
from lineartime.data.corpora import load_corpus_of_run
from lineartime.errors import ArgumentError, LineartimeError, first_line, reporting_file_errors
from lineartime.evaluation import bits_per_byte
from lineartime.files import is_folder, is_there, synchronise, synchronise_folder
from lineartime.host import cache_folder
from lineartime.layers.contract import NO_FUTURE, BrokenPromiseError, check_mixer
from lineartime.machine import choose_precision
from lineartime.models.backbone import Block
from lineartime.models.config import ModelConfig
from lineartime.models.cost import check_memory
from lineartime.models.language_model import LanguageModel, build_model
from lineartime.models.systems import PRESETS, nearest_preset
from lineartime.training.config import (
    TrainConfig,
    errors_in_override,
    merged_override,
    options_of,
    recipe_config,
    with_other_steps,
)
from lineartime.training.optimizers import ModelOptimizer
from lineartime.training.parallel import World, read_environment

# Options --------------------------------------------------------------------------------------------------------------

_TEXT = ("data", "text_column", "include", "exclude", "raw_ids", "cache")  # other paths to the same text, which is checked
_MACHINE = ("device", "precision", "threads", "compile", "recompute", "batch_size", "parallel", "context_parallel")
_RUN = ("timeout", "track", "max_skipped", "keep_every", "max_time", "out", "resume", "auto_resume")
_MAY_CHANGE = (*_TEXT, *_MACHINE, *_RUN)
"""Options that may differ when a run is resumed: it may have moved to other or more machines."""

_LENGTHS = ("steps", "decay_steps")
"""Options that may differ as long as the steps taken would have had the same learning rates."""


def complete(given: Mapping[str, Any]) -> TrainConfig:
    """The options that are given, by their names, and for the others the defaults of a resumed run, `recipe` or `init_from`.

    Raises LineartimeError if they contradict each other, or the run they name cannot be read.
    """
    config = TrainConfig(**given)
    run = config.run_directory
    if checkpoints.is_checkpoint(run):
        raise ArgumentError("out", f"is {run}, which is a checkpoint: give the folder of its run, or a new one.")
    if is_there(run) and not is_folder(run):
        raise ArgumentError("out", f"is {run}, which is a file: give a folder.")
    if config.auto_resume and not config.resume and config.out is None:
        raise ArgumentError("auto_resume", "needs the folder of the run: give `out`.")
    if config.resume and (config.init_from is not None or config.recipe is not None):
        name = "init_from" if config.recipe is None else "recipe"
        raise ArgumentError(name, "starts a new run, and cannot be combined with `resume`: use one of them.")
    again = config.auto_resume or read_environment().torchelastic_restart_count > 0  # torchrun has replaced a lost process
    if config.resume or (again and config.out is not None and checkpoints.list_checkpoints(run)):
        return _resumed(run, given)
    chosen = given
    defaults = TrainConfig()
    if config.recipe is not None and config.preset in PRESETS:  # `TrainConfig.model_config` reports unknown presets
        defaults = recipe_config(config.recipe, config.preset if "preset" in given else None)
    if config.init_from is not None:
        try:
            start = checkpoints.find_checkpoint(config.init_from).absolute()
        except checkpoints.NoCheckpointError as error:
            raise ArgumentError("init_from", f"is {config.init_from}, which {error.problem}: {error.advice}.") from None
        if config.tokenizer not in (None, str(start)):
            found = f"is {config.tokenizer}, but the model of `init_from` brings the tokens that it has learnt"
            raise ArgumentError("tokenizer", f"{found}: leave it out.")
        model = options_of(checkpoints.read_model_config(start), "clm", all_values=False)
        del model["override"]["vocab_size"]  # follows from the tokenizer
        if given.get("preset", model["preset"]) != model["preset"]:  # that another preset fits is not made by overrides
            model["override"] = ()
        defaults = dataclasses.replace(defaults, **model, tokenizer=str(start))
        chosen = {**given, "init_from": start}
    asked = _applied(defaults, chosen)  # whose preset names the folder
    return _resumed(asked.run_directory, given) if again and checkpoints.list_checkpoints(asked.run_directory) else asked


def _applied(defaults: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Apply the given options to defaults, and merge `override` field by field."""
    asked = dataclasses.replace(defaults, **{"override": (), **given})
    return dataclasses.replace(asked, override=merged_override(defaults.override, asked.override))


def _resumed(run: Path, given: Mapping[str, Any]) -> TrainConfig:
    """The options with which a run was started, and those given now that may differ. Raises ArgumentError for others."""
    try:
        last = checkpoints.last_checkpoint(run)
    except checkpoints.NoCheckpointError as error:
        raise ArgumentError("out", f"is {run}, which {error.problem}: give the folder of the run to resume.") from None
    started = saved_config(last)
    asked = dataclasses.replace(_applied(started, given), out=run, resume=True)
    for name in given:
        value, before = getattr(asked, name), getattr(started, name)
        if name == "tokenizer":  # None means this
            before = before or "bytes"
        same = value == before
        if name == "init_from" and before is not None:  # recorded with the checkpoint that the weights were taken from
            same = Path(before).is_relative_to(Path(value).absolute())
        if not same and name not in (*_MAY_CHANGE, *_LENGTHS):
            found = f"is {value}, but the run in {run} was started with {before}"
            raise ArgumentError(name, f"{found}: leave it out to resume that run, or give another folder, `out`.")
    if any(getattr(asked, name) != getattr(started, name) for name in _LENGTHS):
        started = with_other_steps(started, asked, checkpoints.read_training_state(last).step)
    changed = {name: getattr(asked, name) for name in _MAY_CHANGE}
    return dataclasses.replace(started, **changed)


def saved_config(checkpoint: Path) -> TrainConfig:
    """The options with which a checkpoint's run was started. Raises LineartimeError if they cannot be read."""
    state = checkpoints.read_training_state(checkpoint)
    try:
        return TrainConfig.from_dict(state.config)
    except ValueError as error:
        raise LineartimeError(
            f"The options in {checkpoint} come from another version of lineartime, or are damaged: {error}"
        ) from None


def starting_point(config: TrainConfig) -> Path | None:
    """The checkpoint to start from, if any. Removes what killed processes left behind."""
    run = config.run_directory
    if not config.resume and checkpoints.list_checkpoints(run):
        raise LineartimeError(f"{run} already holds a run: resume it with `resume=True`, or give another `out`.")
    checkpoints.remove_partial(run)
    return checkpoints.last_checkpoint(run) if config.resume else None


# Text, tokenizer and model --------------------------------------------------------------------------------------------


class Text:
    """The text of a run, encoded (unless it is streamed) and ready to be read. `rows` are this process's share of a step.

    Attributes:
        is_lossy: whether decoding fails to restore the beginning of the held-out text, so that losses per byte leave some out.
        identity: a description that changes with the text, training or held out, and not with its path.
        splits: a line that describes each split of the text.

    Raises LineartimeError for text that cannot be read or is too short.
    """

    def __init__(self, corpus: data.Corpus, tokenizer: data.Tokenizer, config: TrainConfig, rows: data.Rows) -> None:
        if corpus.describe("train") is None:
            raise data.missing_split(corpus, "train")
        cache = config.cache or cache_folder()
        held_out = config.eval_windows * config.context_length + 1 if config.streaming else None
        self.validation = data.token_stream(corpus, "validation", tokenizer, cache, held_out)
        if len(self.validation) < 2:
            raise data.no_text(self.validation.name)
        documents = corpus.documents("validation") if self.validation.n_bytes else iter(())
        sample = next((block[:5000] for document in documents for block in document if block.strip()), "")
        self.is_lossy = tokenizer.decode(tokenizer.encode(sample).tolist()).strip() != sample.strip()
        make = data.BatchMaker(tokenizer, config.task, config.seed, config.packed)
        length = data.text_length(config.context_length, config.task, tokenizer, config.packed)
        streams: dict[Split, data.TokenStream] = {"validation": self.validation}
        if config.streaming:
            self.loader: data.Loader = data.StreamingLoader(corpus, make, length, rows)
            self.name = f"a stream of {corpus.name}"
            training = f"a stream of text {hashlib.sha256(corpus.identity('train').encode()).hexdigest()[:12]}"
        else:
            stream = data.token_stream(corpus, "train", tokenizer, cache)
            self.loader = data.CachedLoader(stream, make, length, rows)
            self.name = f"{len(stream):,} tokens of {corpus.name}"
            streams = {"train": stream, **streams}
            # What cannot be read should show now, and not after days of training. `eval` finds the tokens in the cache.
            if corpus.describe("test") and all(isinstance(source, data.LocalCorpus) for source in corpus.sources):
                streams["test"] = data.token_stream(corpus, "test", tokenizer, cache)
            training = f"{len(stream):,} tokens, digest {stream.digest}"
        self.splits = data.describe_splits(corpus, streams)
        self.identity = f"{training}{checkpoints.HELD_OUT}{self.validation.digest}"
        self._causal = config.task != "mlm"

    def bits_per_byte(self, loss: float) -> float | None:
        """A validation loss in nats per token, as bits per byte of the held-out text; None for masked tokens."""
        return bits_per_byte(loss, len(self.validation), self.validation.n_bytes) if self._causal else None


def read_corpus(config: TrainConfig, start: Path | None) -> data.Corpus:
    """The text of a run. If a resumed run is not given another place of it, an error says that it is the run's."""
    is_known = start is not None and config.to_dict()["data"] == checkpoints.read_training_state(start).config.get("data")
    load = load_corpus_of_run if is_known else data.load_corpus
    return load(config.data, config.text_column, config.include, config.exclude, config.raw_ids)


def make_tokenizer(config: TrainConfig, world: World, start: Path | None, corpus: data.Corpus) -> data.Tokenizer:
    """The tokenizer of the checkpoint to resume from; otherwise that of a name or a path, such as another run's folder."""

    def make() -> data.Tokenizer:
        if start is not None:
            return data.read_tokenizer(start)
        return choose_tokenizer(config.tokenizer, corpus, config.cache or cache_folder())

    tokenizer: data.Tokenizer = world.local_main_first("the tokenizer", make)
    # Each machine trains a tokenizer, and may have another version of the library or of the text.
    definition = world.share(tokenizer.to_json)
    if definition != tokenizer.to_json():
        tokenizer = data.tokenizer_from_json(definition, "the tokenizer of the main process")
    return tokenizer


def choose_tokenizer(choice: str | None, corpus: data.Corpus, cache: Path) -> data.Tokenizer:
    """The tokenizer of a name or a path, such as another run's folder; a folder with the name of a tokenizer is not meant."""
    if choice is not None and not data.is_tokenizer_name(choice) and is_folder(choice):
        return checkpoints.load_tokenizer(choice)
    return data.tokenizer_for(choice, corpus, cache)


def make_model(
    config: TrainConfig, world: World, start: Path | None, vocab_size: int, rows: data.Rows, device: torch.device
) -> LanguageModel:
    """The model of a run, with the weights of the checkpoint `start` or of `init_from` if there is one.

    Raises LineartimeError for options that do not fit it, and for one that needs more memory than the machine has.
    """
    # A run keeps its model, whatever its preset means today.
    model_config = config.model_config(vocab_size) if start is None else checkpoints.read_model_config(start)
    chunk_sizes = [int(mixer.options.get("chunk_size", 1)) for mixer in model_config.mixers]
    if world.context_parallel > 1 and config.context_length % (unit := slice_unit(model_config, world)):
        multiple = f"a multiple of {unit}, for {world.context_parallel} processes (`context_parallel`) read whole chunks"
        raise ArgumentError("context_length", f"is {config.context_length}, but must be {multiple}.")
    chunk_size = min(*chunk_sizes, config.context_length)  # shorter sequences are read in shorter chunks
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
        torch.manual_seed(config.seed)
        model = build_model(model_config).to(device)
    weights = start or config.init_from
    if weights is not None:
        checkpoints.load_into(model, weights)
    return model


def slice_unit(model: ModelConfig, world: World) -> int:
    """With context parallelism, the length of a sequence must be a multiple of this: a whole chunk for each process."""
    return world.context_parallel * lcm(*(int(mixer.options.get("chunk_size", 1)) for mixer in model.mixers))


_MAY_DIFFER = ("data", "tokenizer", "cache", "device", "threads")
"""Options whose values may differ between the machines of a run: paths, and what suits a machine."""


def check_same_run(config: TrainConfig, text: Text, world: World) -> None:
    """Raise LineartimeError unless all processes have the same options and the same text."""
    own = {name: value for name, value in config.to_dict().items() if name not in _MAY_DIFFER} | {"the text": text.identity}
    first, *others = world.gather(own)
    for rank, other in enumerate(others, start=1):
        for name in first:
            if other[name] != first[name]:
                found = f"{name} is {other[name]} in process {rank}, and {first[name]} in process 0"
                raise LineartimeError(f"{found}: start all processes with the same options and the same text.")


def check_start(config: TrainConfig, start: Path) -> None:
    """Raise ArgumentError, naming the option, unless the weights of a checkpoint fit the model that the options describe."""
    theirs = checkpoints.read_model_config(start)
    with errors_in_override("preset", "init_from"):
        try:
            checkpoints.check_weights(start / checkpoints.WEIGHTS, config.model_config(theirs.vocab_size))
        except checkpoints.UnfitWeightsError as error:
            if config.preset != (nearest := nearest_preset(theirs)):
                found = f"is {config.preset}, but the model of `init_from` is {nearest}: leave it out."
                raise ArgumentError("preset", found) from None
            what = f"is {start}, whose weights do not fit the model that is asked for: {error}. Leave out what changes it in "
            raise ArgumentError("init_from", f"{what}`override` or `task`.") from None


def start_notes(config: TrainConfig, tokenizer: data.Tokenizer, model: ModelConfig) -> list[str]:
    """Sentences about what the user of a new run might not expect, for instance a tokenizer that is smaller than its name says.

    Raises BrokenPromiseError for a mixer of the user's own that reads later tokens: its losses would mean nothing. A broken
    promise that does not concern training is a note.
    """
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
    wanted = None if config.tokenizer is None else data.size_to_train(config.tokenizer)
    if wanted is not None and tokenizer.vocab_size < wanted:
        smaller = f"The tokenizer has {tokenizer.vocab_size:,} tokens instead of {wanted:,}"
        notes.append(f"{smaller}, because the text is too short for more.")
    return notes


# Checkpoints ----------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes the checkpoints of a run in the background, one at a time.

    Every process of the run has a writer, and all of them must call `begin` together. That of the main process writes.
    """

    def __init__(
        self, config: TrainConfig, model: LanguageModel, optimizer: ModelOptimizer, tokenizer: data.Tokenizer, world: World
    ) -> None:
        self._run = config.run_directory
        self._keep_every = config.keep_every
        self._model = model
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._is_main = world.is_main
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, state: checkpoints.TrainingState) -> None:
        """Copy the contents of a checkpoint and write it in the background. Raises as `finish` for the previous checkpoint."""
        self.finish()
        weights = _whole(self._model.state_dict(), keep=self._is_main)
        moments = _whole(self._optimizer.moments(), keep=self._is_main)
        if self._is_main:
            self._thread = threading.Thread(target=self._write, args=(weights, moments, state), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until the checkpoint is on disk. Raises LineartimeError if it could not be written; others are kept."""
        self.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise LineartimeError if a checkpoint could not be written."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, weights: dict[str, Tensor], moments: dict[str, Tensor], state: checkpoints.TrainingState) -> None:
        target = checkpoints.checkpoint_path(self._run, state.step)
        partial = checkpoints.partial_path(target)
        try:
            then = "resume the run with `resume=True`" if checkpoints.list_checkpoints(self._run) else "train again"
            with reporting_file_errors("write", f"the checkpoint {target}", then):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                checkpoints.write_files(partial, weights, self._model.config, self._tokenizer, state, moments)
                synchronise_folder(partial)
                partial.rename(target)
                synchronise(self._run)
            checkpoints.prune(self._run, self._keep_every)
        except BaseException as error:  # `finish` raises it in the main thread
            shutil.rmtree(partial, ignore_errors=True)
            self._error = error


def restore_moments(checkpoint: Path, optimizer: ModelOptimizer, step: int) -> None:
    """Load the moments of a checkpoint into an optimiser that has taken `step` steps. Each process loads its part.

    Raises LineartimeError if they are damaged, or are not those of this optimiser.
    """
    folder = checkpoint / checkpoints.OPTIMIZER_FOLDER
    if step == 0 and not folder.is_dir():  # it was written before the first step
        return
    optimizer.start_at(step)
    try:
        files: list[Any] = [safe_open(file, framework="pt") for file in folder.glob("*.safetensors")]
        for name, moment in optimizer.moments().items():
            whole = _read_whole(name, moment, files).to(moment.device)
            if isinstance(moment, DTensor):
                whole = distribute_tensor(whole, moment.device_mesh, moment.placements, src_data_rank=None)
            moment.copy_(whole)
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError) as error:
        why = first_line(error).rstrip(".") if folder.is_dir() else f"{checkpoints.OPTIMIZER_FOLDER} is missing"
        what = f"The optimiser's part of the checkpoint {checkpoint} is damaged, or of another optimiser ({why})"
        new = f"start another run from its weights with `init_from={checkpoint}`"
        raise LineartimeError(f"{what}: restore it from a copy, or {new}.") from None


def _read_whole(name: str, like: Tensor, files: list[Any]) -> Tensor:
    """Read a tensor, which the first runs have divided over the files of several processes. Raises ValueError for another size.

    The metadata of such a file tells where its slices of the tensors begin.
    """
    whole, found = torch.empty(like.shape, dtype=like.dtype, device="cpu"), 0
    for file in files:
        if name in file.keys():  # noqa: SIM118  # it is not a dict
            own, slices = file.get_tensor(name), json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            first = slices[name]["saved_offsets"] if name in slices else [0] * own.dim()
            whole[tuple(slice(i, i + n) for i, n in zip(first, own.shape, strict=True))] = own
            found += own.numel()
    if found != like.numel():
        raise ValueError(f"{name} has {found:,} numbers, but needs {like.numel():,}")
    return whole


def _whole(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Copies of tensors on the CPU, gathered from their parts; empty unless `keep`."""
    copies = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # every process must call it
        if keep:
            copies[name] = whole.detach().to("cpu", copy=True)
    return copies
