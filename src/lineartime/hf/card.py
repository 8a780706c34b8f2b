"""The model card: README.md of a folder that is loaded with transformers."""

from collections.abc import Mapping
from pathlib import Path

from lineartime.checkpoint import has_training_state, read_training_state, read_validation_loss
from lineartime.choices import Task
from lineartime.errors import ArgumentError
from lineartime.host import installed_version
from lineartime.models.config import ModelConfig
from lineartime.models.systems import nearest_preset, system_of
from lineartime.runs.record import texts_of

_KINDS: dict[Task, str] = {
    "clm": "A causal language model",
    "mlm": "A masked language model",
    "prefix-lm": "A prefix language model (it reads its prompt in both directions, and continues it causally)",
}


def model_card(config: ModelConfig, name: str, parameters: int, training: Mapping[str, str] | None = None) -> str:
    """The card of a language model saved in a folder of this name. `training` are facts about its training, for a table."""
    masked = config.task == "mlm"
    auto = "AutoModelForMaskedLM" if masked else "AutoModelForCausalLM"
    longest, kinds = config.longest_sequence, [mixer.kind for mixer in config.mixers]
    tags = "\n".join(f"- {kind}" for kind in dict.fromkeys(kinds))
    try:
        system = f"blocks of {', '.join(kinds)}, in turn" if config.pattern else system_of(nearest_preset(config)).describe()
    except ArgumentError:  # no preset has this combination of layers
        system = f"blocks of {kinds[0]}"
    facts = {
        "blocks": config.n_blocks,
        "width": config.d_model,
        "vocabulary": f"{config.vocab_size:,} tokens",
        "longest text": "no limit" if longest is None else f"{longest:,} tokens",
        **(training or {}),
    }
    table = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: {"fill-mask" if masked else "text-generation"}
tags:
- lineartime
{tags}
---

# {name}

{_KINDS[config.task]} of {parameters:,} parameters, saved by lineartime {installed_version("lineartime") or ""}:
{system}.

| | |
| --- | --- |
{table}

Transformers loads it where lineartime is installed (`pip install '.[hf]'` in its source tree); no remote code is run:

```python
import lineartime.hf  # registers the model with transformers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

`lineartime convert {name} DESTINATION` turns this folder back into one that the commands of lineartime read.
"""


def training_facts(checkpoint: Path) -> dict[str, str]:
    """What a checkpoint records about its training; nothing for a model alone. Texts are named without their folders."""
    if not has_training_state(checkpoint):
        return {}
    state, loss = read_training_state(checkpoint), read_validation_loss(checkpoint)
    options = state.config
    texts = ", ".join(Path(text).name for text in texts_of(options))
    facts = {"trained on": texts, "steps": f"{state.step:,}"}
    if step := options.get("tokens_per_batch"):
        facts["tokens per step"] = f"{step:,}"
    if length := options.get("context_length"):
        facts["context in training"] = f"{length:,} tokens"
    if loss is not None:
        facts["held-out loss"] = f"{loss:.4f} nats per token"
    return {fact: value.replace("|", "\\|") for fact, value in facts.items()}
