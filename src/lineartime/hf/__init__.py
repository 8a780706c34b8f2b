"""Integration with the transformers library: `import lineartime.hf` registers our models with its Auto classes."""

from lineartime.hf.version import check_transformers

check_transformers()  # before anything of transformers is imported

from lineartime.hf.cache import LineartimeCache
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.convert import convert, from_transformers, to_transformers
from lineartime.hf.language import LineartimeForCausalLM, LineartimeForMaskedLM
from lineartime.hf.model import LineartimeModel, LineartimePreTrainedModel
from lineartime.hf.probe import check_generation
from lineartime.hf.register import register
from lineartime.hf.tasks import (
    LineartimeForMultipleChoice,
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
)
from lineartime.hf.tokenizer import fast_tokenizer

__all__ = [
    "LineartimeCache",
    "LineartimeConfig",
    "LineartimeForCausalLM",
    "LineartimeForMaskedLM",
    "LineartimeForMultipleChoice",
    "LineartimeForQuestionAnswering",
    "LineartimeForSequenceClassification",
    "LineartimeForTokenClassification",
    "LineartimeModel",
    "LineartimePreTrainedModel",
    "convert",
    "fast_tokenizer",
    "from_transformers",
    "to_transformers",
]

register()
check_generation()
