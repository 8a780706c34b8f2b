"""Types of options with fixed choices, and limits and defaults that several packages share.

Nothing else is imported here, so that the command line starts quickly.
"""

from typing import Literal

Device = Literal["auto", "cpu", "cuda", "mps"]
Domain = Literal["wikipedia", "web"]
Precision = Literal["auto", "fp32", "bf16"]
Task = Literal["clm", "mlm", "prefix-lm"]
RawIds = Literal["uint16", "uint32", "int32", "int64"]
"""The dtype of token ids in files that do not state it."""
ShardKind = Literal["megatron", "nanogpt"]
"""A format in which a text is written as token ids."""
Split = Literal["train", "validation", "test", "all"]
"""A part of a text; "all" is the whole text."""
Context = Literal["windowed", "carried", "documents"]
ScaleName = Literal["trial", "cpu", "gpu"]
"""How large the runs of an experiment are."""
TextName = Literal["code", "books", "wikipedia"]
"""A kind of text that an experiment uses."""

MemoryTask = Literal["recall", "copying", "induction", "selective-copying"]
"""A task for a long memory, whose texts are generated."""

MAX_CONTEXT_LENGTH = 2**24
"""The maximum number of tokens in a context whose cost is counted."""
DEFAULT_TEXT = "the Python standard library"
"""The name of the text of a run for which none is given."""
TEXT_COLUMN = "text"
"""The column of records that holds the text, unless another one is named."""
VOCAB_SIZE = 32_000
"""The default size of trained tokenizers, with which models have the parameter counts that the paper reports."""
BYTE_VOCABULARY = 258
"""The vocabulary size of the tokenizer of bytes: 256 bytes, the end of a document and the mask."""
