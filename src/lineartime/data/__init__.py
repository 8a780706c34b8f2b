"""From text to batches: corpora, tokenizers, token files, windows, loaders."""

from lineartime.data.batches import Batch, evaluation_batch, read_window, spread_windows, text_length
from lineartime.data.corpora import Corpus, LocalCorpus, is_corpus_name, load_corpus, missing_split, no_text, portable_identity
from lineartime.data.loaders import BatchMaker, CachedLoader, Loader, Rows, StreamingLoader, merge_states
from lineartime.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, read_tokenizer, tokenizer_from_json
from lineartime.data.tokens import TokenStream, describe_splits, token_stream
from lineartime.data.train_tokenizer import is_tokenizer_name, size_to_train, tokenizer_for, train_tokenizer

__all__ = [
    "Batch",
    "BatchMaker",
    "ByteTokenizer",
    "CachedLoader",
    "Corpus",
    "JsonTokenizer",
    "Loader",
    "LocalCorpus",
    "Rows",
    "StreamingLoader",
    "TokenStream",
    "Tokenizer",
    "describe_splits",
    "evaluation_batch",
    "is_corpus_name",
    "is_tokenizer_name",
    "load_corpus",
    "merge_states",
    "missing_split",
    "no_text",
    "portable_identity",
    "read_tokenizer",
    "read_window",
    "size_to_train",
    "spread_windows",
    "text_length",
    "token_stream",
    "tokenizer_for",
    "tokenizer_from_json",
    "train_tokenizer",
]
