"""Does your packed batch leak? `python examples/packing.py MODEL`, for instance gpt2, a folder, or flash-tiny.

Two random documents become one row, as `DataCollatorWithFlattening` of transformers packs them. Then the first document is
changed. If the logits of the second one move, it has read the first: training and evaluation are silently wrong. The status is
1 if any call leaks.

MODEL is a folder or a name for `from_pretrained`, a preset of lineartime, or a type of models of transformers; of the last two,
a small model with random weights is made, for what leaks does not depend on weights.
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, DataCollatorWithFlattening
from transformers.utils import logging

import lineartime
import lineartime.hf  # registers its models with transformers

SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PACKS: dict[str, dict[str, bool]] = {
    "position_ids": {},
    "position_ids and cu_seq_lens": {"return_flash_attn_kwargs": True},
    "position_ids and seq_idx": {"return_seq_idx": True},
}
"""How a batch says where documents begin."""
LEAKS = 1e-4
"""Relative to the largest logit; of a pack that does not leak, nothing moves, or rounding on some GPUs."""


def build(name: str, masked: bool = False, **options: Any) -> Any:
    """A model of transformers, in evaluation mode; `options` are those of the configuration of a random one."""
    auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    torch.manual_seed(0)
    if name in lineartime.presets():
        small = {"vocab_size": 300, "n_blocks": 2, **options}
        config = lineartime.hf.LineartimeConfig.from_preset(name, "mlm" if masked else "clm", **small)
    elif name in CONFIG_MAPPING:
        config = AutoConfig.for_model(name, **{**SMALL, **SPECIAL, **options})
    else:
        return auto.from_pretrained(name).eval()
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)  # many models hardly attend at first
    return model


def moved(model: Any, pack: str = "position_ids", **call: Any) -> tuple[float, float]:
    """How far the logits of the second document move, relative to the largest: if the first one changes, and if it goes.

    The model gets what `call` says with the batch, or in its place.
    """
    collate, size = DataCollatorWithFlattening(**PACKS[pack]), model.config.vocab_size
    first, second = (torch.randint(size, (n,), generator=torch.Generator().manual_seed(n)) for n in (37, 50))

    def read(*documents: Tensor) -> Tensor:
        batch = collate([{"input_ids": each.tolist()} for each in documents])
        del batch["labels"]
        on_device = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        with torch.no_grad():
            logits: Tensor = model(**{**on_device, **call}).logits
        return logits[0, -len(second) :].double()

    packed, changed, alone = read(first, second), read((first + 1) % size, second), read(second)
    return tuple(float((packed - other).abs().max() / alone.abs().max()) for other in (changed, alone))  # type: ignore[return-value]


def main() -> None:
    """Say of each way to call the model whether it leaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--masked", action="store_true", help="a masked language model")
    options = parser.parse_args()
    logging.set_verbosity_error()
    model, leaks = build(options.model, options.masked), False
    for call in ({}, {"use_cache": False}) if not options.masked else ({},):
        for pack in PACKS:
            try:
                changed, alone = moved(model, pack, **call)
            except Exception as error:  # of any model: to refuse a pack is no leak
                said = f"refused: {str(error).splitlines()[0]}"
            else:
                leaks |= changed > LEAKS
                said = f"LEAKS, by {changed:.0%}" if changed > LEAKS else f"separate ({alone:.0e} from alone)"
            print(f"{options.model} with {pack}{', use_cache=False' if call else ''}: {said}")
    sys.exit(leaks)


if __name__ == "__main__":
    main()
