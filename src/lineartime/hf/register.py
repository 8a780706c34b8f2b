"""Register the models of lineartime with the Auto classes of transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lineartime.hf.config import LineartimeConfig
from lineartime.hf.language import LineartimeForCausalLM, LineartimeForMaskedLM
from lineartime.hf.model import LineartimeModel
from lineartime.hf.tasks import (
    LineartimeForMultipleChoice,
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
)

MODELS = {
    AutoModel: LineartimeModel,
    AutoModelForCausalLM: LineartimeForCausalLM,
    AutoModelForMaskedLM: LineartimeForMaskedLM,
    AutoModelForMultipleChoice: LineartimeForMultipleChoice,
    AutoModelForQuestionAnswering: LineartimeForQuestionAnswering,
    AutoModelForSequenceClassification: LineartimeForSequenceClassification,
    AutoModelForTokenClassification: LineartimeForTokenClassification,
}
"""The model that each Auto class loads."""


def register() -> None:
    """Register the configuration and the models of lineartime with the Auto classes."""
    AutoConfig.register(LineartimeConfig.model_type, LineartimeConfig, exist_ok=True)
    for auto, model in MODELS.items():
        auto.register(LineartimeConfig, model, exist_ok=True)
    # With label smoothing, `Trainer` shifts the labels of the classes named here, and teaches all others to copy their input.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LineartimeConfig.model_type] = LineartimeForCausalLM.__name__
