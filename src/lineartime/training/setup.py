"""What a run is made of, which every process creates identically: its text, its tokenizer and its model."""

import hashlib
from math import lcm
from pathlib import Path

import torch

from lineartime import checkpoint as checkpoints
from lineartime import data
from lineartime.checkpoint import HELD_OUT, WEIGHTS, check_weights
from lineartime.choices import Split
from lineartime.data.corpora import load_corpus_of_run
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.evaluation.perplexity import bits_per_byte
from lineartime.files import is_folder
from lineartime.host import cache_folder
from lineartime.layers.contract import NO_FUTURE, BrokenPromiseError, check_mixer
from lineartime.machine import choose_precision
from lineartime.models.backbone import Block
from lineartime.models.config import ModelConfig
from lineartime.models.cost import check_memory
from lineartime.models.language_model import LanguageModel, build_model
from lineartime.models.systems import nearest_preset
from lineartime.training.config import TrainConfig, errors_in_override
from lineartime.training.parallel import World


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
        self.identity = f"{training}{HELD_OUT}{self.validation.digest}"
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
            check_weights(start / WEIGHTS, config.model_config(theirs.vocab_size))
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
