"""Integration with the transformers library: `import lineartime.hf` registers our models with its Auto classes."""

from lineartime.hf.version import check_transformers

check_transformers()  # before anything of transformers is imported

from lineartime.hf.cache import LineartimeCache  # noqa: E402
from lineartime.hf.config import LineartimeConfig  # noqa: E402
from lineartime.hf.convert import convert, from_transformers, to_transformers  # noqa: E402
from lineartime.hf.language import LineartimeForCausalLM, LineartimeForMaskedLM  # noqa: E402
from lineartime.hf.model import LineartimeModel, LineartimePreTrainedModel  # noqa: E402
from lineartime.hf.register import register  # noqa: E402
from lineartime.hf.tasks import (  # noqa: E402
    LineartimeForMultipleChoice,
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
)
from lineartime.hf.tokenizer import fast_tokenizer  # noqa: E402

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
