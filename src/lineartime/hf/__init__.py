"""Integration with the transformers library: `import lineartime.hf` registers our models with its Auto classes."""

import re
import sys

from lineartime.errors import LineartimeError, missing_extra
from lineartime.host import installed_version

# The oldest version that the tests have passed with, and the first one that is refused unseen; before anything is imported.
if (found := installed_version("transformers")) is None:
    refused: LineartimeError | None = missing_extra("transformers", "hf", "lineartime.hf")
elif not [5, 20] <= [int(number) for number in re.findall(r"\d+", found)[:2]] < [6]:
    what = f"lineartime.hf needs transformers 5.20 or newer and below 6, but version {found} is installed"
    refused = LineartimeError(f"{what}: pip install 'lineartime[hf]'.")
else:
    refused = None
if refused is not None:
    if sys.argv[0] == "-m":  # which it is while `python -m lineartime.hf` starts
        sys.exit(f"error: {refused}")
    raise refused

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
