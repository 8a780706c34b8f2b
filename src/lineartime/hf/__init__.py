"""Integration with the transformers library: `import lineartime.hf` registers our models with its Auto classes."""

import sys

from lineartime.errors import LineartimeError
from lineartime.hf.version import check_transformers

try:
    check_transformers()  # before anything of transformers is imported
except LineartimeError as error:
    if sys.argv[0] == "-m":  # which it is while `python -m lineartime.hf` starts
        sys.exit(f"error: {error}")
    raise

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lineartime.hf.cache import LineartimeCache
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.convert import convert, from_transformers, to_transformers
from lineartime.hf.language import LineartimeForCausalLM, LineartimeForMaskedLM
from lineartime.hf.model import LineartimeModel, LineartimePreTrainedModel
from lineartime.hf.tasks import (
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

MODELS = {
    AutoModel: LineartimeModel,
    AutoModelForCausalLM: LineartimeForCausalLM,
    AutoModelForMaskedLM: LineartimeForMaskedLM,
    AutoModelForQuestionAnswering: LineartimeForQuestionAnswering,
    AutoModelForSequenceClassification: LineartimeForSequenceClassification,
    AutoModelForTokenClassification: LineartimeForTokenClassification,
}
"""The model that each Auto class loads."""

AutoConfig.register(LineartimeConfig.model_type, LineartimeConfig, exist_ok=True)
for auto, kind in MODELS.items():
    auto.register(LineartimeConfig, kind, exist_ok=True)
# With label smoothing, `Trainer` shifts the labels of the classes named here, and teaches all others to copy their input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LineartimeConfig.model_type] = LineartimeForCausalLM.__name__
