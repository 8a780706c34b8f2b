"""From text to batches: corpora, tokenizers, token files, windows, loaders."""

from lineartime.data.batches import Batch, causal_batch, masked_batch, packed_batch
from lineartime.data.corpora import Corpus, LocalCorpus, load_corpus, local_text, standard_library
from lineartime.data.loaders import Loader, Rows, cached_loader, merge_states
from lineartime.data.prefetch import prefetched
from lineartime.data.streaming import stream_documents, streaming_loader
from lineartime.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from lineartime.data.tokens import TokenStream, default_cache, token_stream
from lineartime.data.train_tokenizer import tokenizer_for, train_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "JsonTokenizer",
    "Loader",
    "LocalCorpus",
    "Rows",
    "TokenStream",
    "Tokenizer",
    "cached_loader",
    "causal_batch",
    "default_cache",
    "load_corpus",
    "load_tokenizer",
    "local_text",
    "masked_batch",
    "merge_states",
    "packed_batch",
    "prefetched",
    "standard_library",
    "stream_documents",
    "streaming_loader",
    "token_stream",
    "tokenizer_for",
    "train_tokenizer",
]
