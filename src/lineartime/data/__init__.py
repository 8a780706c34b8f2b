"""From text to batches: corpora, tokenizers, token files, windows."""

from lineartime.data.batches import Batch, causal_batch, masked_batch, random_windows
from lineartime.data.corpora import Corpus, load_corpus, local_text, standard_library
from lineartime.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from lineartime.data.tokens import TokenStream, default_cache, token_stream

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "JsonTokenizer",
    "TokenStream",
    "Tokenizer",
    "causal_batch",
    "default_cache",
    "load_corpus",
    "load_tokenizer",
    "local_text",
    "masked_batch",
    "random_windows",
    "standard_library",
    "token_stream",
]
