"""The text of a run: the loader of its training text, and a stream of held-out text."""

import hashlib
from pathlib import Path

from lineartime.checkpoint.format import HELD_OUT
from lineartime.choices import Split
from lineartime.data import (
    BatchMaker,
    CachedLoader,
    Corpus,
    Loader,
    LocalCorpus,
    PrefetchedLoader,
    Rows,
    StreamingLoader,
    Tokenizer,
    TokenStream,
    describe_splits,
    joined,
    missing_split,
    no_text,
    portable_identity,
    text_length,
    token_stream,
)
from lineartime.evaluation.perplexity import bits_per_byte
from lineartime.training.config import TrainConfig


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
        self.validation = _held_out(corpus, tokenizer, cache, held_out)
        if len(self.validation) < 2:
            raise no_text(self.validation.name)
        sample = next((block[:5000] for document in corpus.documents("validation") for block in document if block.strip()), "")
        self.is_lossy = tokenizer.decode(tokenizer.encode(sample).tolist()).strip() != sample.strip()
        make = BatchMaker(tokenizer, config.task, config.seed, config.packed)
        length = text_length(config.context_length, config.task, tokenizer, config.packed)
        if config.streaming:
            shuffle = config.shuffle_documents
            loader: Loader = StreamingLoader(corpus, make, length, rows, config.lanes, shuffle)
            self.name = f"a stream of {corpus.name} in {config.lanes} lanes" + (f", shuffled by {shuffle:,}" if shuffle else "")
            self.splits = describe_splits(corpus, {"validation": self.validation})
            files = portable_identity(corpus, "train")
            training = f"a stream in {config.lanes} lanes, shuffled by {shuffle}, of text {_short_hash(files)}"
        else:
            stream = token_stream(corpus, "train", tokenizer, cache)
            loader = CachedLoader(stream, make, length, rows)
            self.name = f"{len(stream):,} tokens of {corpus.name}"
            streams: dict[Split, TokenStream] = {"train": stream, "validation": self.validation}
            # What cannot be read should show now, and not after days of training. `eval` finds the tokens in the cache.
            testing = [source for source in corpus.sources if source.describe("test")]
            local = [Corpus([source]) for source in testing if isinstance(source, LocalCorpus)]
            encoded = [token_stream(each, "test", tokenizer, cache) for each in local]
            if local and len(local) == len(testing):
                streams["test"] = joined(corpus, "test", encoded)
            self.splits = describe_splits(corpus, streams)
            training = f"{len(stream):,} tokens, digest {stream.digest}"
        self.identity = f"{training}{HELD_OUT}{self.validation.digest}"
        self.loader: Loader = PrefetchedLoader(loader)
        self._causal = config.task != "mlm"

    def bits_per_byte(self, loss: float) -> float | None:
        """A validation loss in nats per token, as bits per byte of the held-out text; None for masked tokens."""
        return bits_per_byte(loss, len(self.validation), self.validation.n_bytes) if self._causal else None


def _held_out(corpus: Corpus, tokenizer: Tokenizer, cache: Path, max_tokens: int | None) -> TokenStream:
    """The validation split, or the beginnings of that of each source, of `max_tokens` together or a few more."""
    sources = [Corpus([source]) for source in corpus.sources if source.describe("validation")]
    if max_tokens is None or len(sources) < 2:
        return token_stream(corpus, "validation", tokenizer, cache, max_tokens)
    each = -(-max_tokens // len(sources))
    return joined(corpus, "validation", [token_stream(source, "validation", tokenizer, cache, each) for source in sources])


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
