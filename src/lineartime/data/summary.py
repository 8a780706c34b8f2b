"""A summary of a text for the user."""

from collections.abc import Mapping

from lineartime.choices import Split
from lineartime.data.corpora import Corpus, LocalCorpus
from lineartime.data.readers import SPLITS
from lineartime.data.tokens import TokenStream


def describe_splits(corpus: Corpus, streams: Mapping[Split, TokenStream] | None = None) -> list[str]:
    """Describe each split of a corpus in a line: its source and, if it is encoded, its numbers of documents and tokens.

    This neither reads nor encodes the text.
    """
    streams = streams or {}
    lines = [note for source in corpus.sources if isinstance(source, LocalCorpus) for note in source.notes]
    for split in SPLITS:
        if place := corpus.describe(split):
            lines.append(f"{split + ':':<12}{place}{_counts(streams.get(split))}")
    if "all" in streams:
        lines.append(f"{'all:':<12}the whole text{_counts(streams['all'])}")
    return lines


def _counts(stream: TokenStream | None) -> str:
    if stream is None:
        return ""
    first = "the first " if stream.is_cut else ""
    count = stream.n_documents
    documents = "" if count is None else "1 document, " if count == 1 else f"{count:,} documents, "
    return f": {first}{documents}{len(stream):,} tokens"
