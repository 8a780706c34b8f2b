"""Fine-tuning of masked language models to answer questions: `tune.finetune`, and `predict.predict` with the result."""

from lineartime.finetuning.config import Advanced, FinetuneConfig

__all__ = ["Advanced", "FinetuneConfig"]
