"""Integration with the transformers library: `import lineartime.hf` registers our models with its Auto classes."""

import re
import sys

from lineartime.errors import LineartimeError, missing_extra
from lineartime.host import installed_version

refused, found = None, installed_version("transformers")
if found is None:
    refused = missing_extra("transformers", "hf", "lineartime.hf")
elif not [5, 20] <= [int(number) for number in re.findall(r"\d+", found)[:2]] < [6]:  # from the oldest that is tested
    what = f"lineartime.hf needs transformers 5.20 or newer and below 6, but version {found} is installed"
    refused = LineartimeError(f"{what}: pip install 'lineartime[hf]'.")
if refused is not None and sys.argv[0] == "-m":  # which it is while `python -m lineartime.hf` starts
    sys.exit(f"error: {refused}")
if refused is not None:
    raise refused

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lineartime.hf.cache import LineartimeCache as LineartimeCache
from lineartime.hf.convert import convert as convert
from lineartime.hf.convert import from_transformers as from_transformers
from lineartime.hf.convert import to_transformers as to_transformers
from lineartime.hf.heads import LineartimeForCausalLM as LineartimeForCausalLM
from lineartime.hf.heads import LineartimeForMaskedLM as LineartimeForMaskedLM
from lineartime.hf.heads import LineartimeForQuestionAnswering as LineartimeForQuestionAnswering
from lineartime.hf.heads import LineartimeForSequenceClassification as LineartimeForSequenceClassification
from lineartime.hf.heads import LineartimeForTokenClassification as LineartimeForTokenClassification
from lineartime.hf.model import LineartimeConfig as LineartimeConfig
from lineartime.hf.model import LineartimeModel as LineartimeModel
from lineartime.hf.model import LineartimePreTrainedModel as LineartimePreTrainedModel
from lineartime.hf.tokenizer import fast_tokenizer as fast_tokenizer

MODELS = {
    transformers.AutoModel: LineartimeModel,
    transformers.AutoModelForCausalLM: LineartimeForCausalLM,
    transformers.AutoModelForMaskedLM: LineartimeForMaskedLM,
    transformers.AutoModelForQuestionAnswering: LineartimeForQuestionAnswering,
    transformers.AutoModelForSequenceClassification: LineartimeForSequenceClassification,
    transformers.AutoModelForTokenClassification: LineartimeForTokenClassification,
}
"""The model that each Auto class loads."""

transformers.AutoConfig.register(LineartimeConfig.model_type, LineartimeConfig, exist_ok=True)
for auto, kind in MODELS.items():
    auto.register(LineartimeConfig, kind, exist_ok=True)
# With label smoothing, `Trainer` shifts the labels of the classes named here, and teaches all others to copy their input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LineartimeConfig.model_type] = LineartimeForCausalLM.__name__
