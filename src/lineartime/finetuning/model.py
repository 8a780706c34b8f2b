"""The model to fine-tune: a pre-trained backbone, perhaps with another mixer or smaller chunks, a new head; its optimiser."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from lineartime.data.tokenizers import FRAME, Tokenizer
from lineartime.errors import ArgumentError, require_packages
from lineartime.finetuning.config import PAPER_CHUNK, Advanced, OfFLASH
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.tokenizer import fast_tokenizer
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import LanguageModel

TABLE = "bias.table"
"""The relative biases within a chunk, which has 2 C - 1 of them."""


def paired_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers for pairs of texts; the end of a document serves as [CLS] and [SEP] where there are none."""
    made = fast_tokenizer(tokenizer)
    known, end = made.get_vocab(), made.pad_token
    made.cls_token, made.sep_token = (name if name in known else end for name in FRAME)
    made.padding_side, made.chat_template = "right", None
    return made


def tuned_config(pretrained: ModelConfig, advanced: Advanced) -> ModelConfig:
    """The model to fine-tune, with the weights of the pre-trained one. Raises ArgumentError if these do not fit."""
    changed, kinds = pretrained.override(dropout=advanced.dropout), [each.kind for each in pretrained.mixers]
    chunks = [each.options["chunk_size"] for each in pretrained.mixers if "chunk_size" in each.options]
    before, mixer = min(chunks, default=0), advanced.mixer
    if advanced.chunk_size is not None and not advanced.chunk_size <= before:
        what = f"is {advanced.chunk_size}, but the model was trained with {before or 'none'}: give at most that."
        raise ArgumentError("chunk_size", what)
    chunk_size = advanced.chunk_size
    if set(kinds) & set(get_args(OfFLASH)):
        chunk_size = chunk_size or min(before, PAPER_CHUNK)
        others = {each.options.get("memory", "sum") for each in pretrained.mixers} - {"sum"}
        if others and mixer not in (None, "flash"):
            raise ArgumentError("mixer", f"is {mixer}, but the model has the memory {others.pop()}: leave it out.")
        mixer = mixer or ("flash-cls" if "flash" in kinds and not others else None)
    elif mixer is not None:
        raise ArgumentError("mixer", f"is {mixer}, but the model is one of {kinds[0]}: leave it out.")
    if chunk_size is not None:
        changed = changed.override(chunk_size=chunk_size)
    of_flash = {name: each for name, each in changed.layers.items() if each.kind in get_args(OfFLASH)}
    return changed.with_layers({name: _of_kind(mixer or each.kind, each.options) for name, each in of_flash.items()})


def _of_kind(kind: str, options: dict[str, Any]) -> LayerConfig:
    """A mixer of FLASH with the options of another one; only `flash` has the option `memory`."""
    return LayerConfig(kind, **{name: value for name, value in options.items() if kind == "flash" or name != "memory"})


def with_head(pretrained: LanguageModel, advanced: Advanced, make: Callable[[LineartimeConfig], Any], peft_task: str) -> Any:
    """A model of transformers that `make` makes, with the pre-trained backbone and a new head; with adapters, one of PEFT."""
    weights = pretrained.backbone.state_dict()
    model = make(LineartimeConfig.from_model_config(tuned_config(pretrained.config, advanced)))
    for name, tensor in model.model.backbone.state_dict().items():
        excess = weights[name].shape[-1] - tensor.shape[-1] if name.endswith(TABLE) else 0
        tensor.copy_(weights[name].narrow(-1, excess // 2, tensor.shape[-1]) if excess else weights[name])
    if not advanced.lora_rank:
        return model
    require_packages("peft", extra="finetune", purpose="LoRA")
    import peft

    linear = [name for name, part in model.model.named_modules() if isinstance(part, nn.Linear)]
    options: dict[str, Any] = {"r": advanced.lora_rank, "lora_alpha": 2 * advanced.lora_rank, "lora_dropout": advanced.dropout}
    lora = peft.LoraConfig(task_type=peft_task, target_modules=sorted({name.rpartition(".")[2] for name in linear}), **options)
    return peft.get_peft_model(model, lora)


def optimizer_for(model: nn.Module, rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, whose weight decay leaves out biases and gains of norms. Each parameter is a group, as in saved states."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    groups = [{"params": [each], "weight_decay": weight_decay if each.dim() > 1 else 0.0} for each in trained]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-6)
