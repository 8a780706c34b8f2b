"""Export our FLASH, and models of it, to FLASH-pytorch 0.1.9, as far as that package can express them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lineartime.checkpoint.saving import check_layers
from lineartime.errors import ArgumentError, LineartimeError, typed_first_line
from lineartime.files import check_new, new_file, os_error_behind
from lineartime.foreign.flash_pytorch import MAPS, NORM_EPS, PACKAGE, ROTATED, rotary_frequencies
from lineartime.foreign.mixers import ForeignFLASH
from lineartime.foreign.positions import N_BUCKETS, BucketBias
from lineartime.foreign.weights import SUFFIXES, interleaved_order
from lineartime.layers.flash import FLASH
from lineartime.layers.residual import Norm, RMSNorm, ScaleNorm
from lineartime.models.language_model import LanguageModel, check_model

ADVICE = ": docs/transformers.md has the options to train with"
"""The end of an error for a model that FLASH-pytorch cannot hold."""
ONLY = {
    "feed_forward": None,
    "absolute_position": "scaled_sin",
    "embedding_norm": False,
    "token_types": 0,
    "norm_position": "pre",
}
"""The fields of a model for which FLASH-pytorch has one value."""


def to_flash_pytorch(model: LanguageModel | FLASH) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert a model, or a single FLASH layer, for FLASH-pytorch.

    Returns:
        The state dict, and the arguments of its `FLASHTransformer` or `FLASH`. A FLASH with rotary positions also needs
        `rotary_pos_emb=RotaryEmbedding(dim=...)`, with the `rotary_dim` in the arguments.

    Raises:
        ArgumentError: naming an option that FLASH-pytorch does not have.
    """
    if isinstance(model, FLASH):
        if type(model) not in (FLASH, ForeignFLASH):
            raise ArgumentError(
                "model", f"is a {type(model).__name__}, which may compute something else than {PACKAGE}'s FLASH."
            )
        own, options = _flash(model)
        return {name: tensor.clone() for name, tensor in own.items()}, options
    model = check_model(model, LanguageModel, "be converted", computes=False)
    check_layers(model)
    config, backbone = model.config, model.backbone
    if config.pattern:
        raise ArgumentError("pattern", f"has several mixers, but every block of {PACKAGE} is the same: convert another model.")
    if config.mixer.kind != FLASH.name:
        _require("mixer", config.mixer.kind, ForeignFLASH.name)
    for name, allowed in ONLY.items():
        _require(name, getattr(config, name), allowed)
    if config.final_norm != "same":
        _require("final_norm", config.final_norm, "layernorm")
    else:
        _require("norm", config.norm, "layernorm", "before the logits: train with final_norm=layernorm")
    if config.task == "prefix-lm":
        raise ArgumentError("task", f"is 'prefix-lm', but {PACKAGE} reads no prefix in both directions.")
    width = config.mixer.options["d_qk"]
    if not config.mixer.options["rope"]:
        raise ArgumentError("rope", f"is False, but a model of {PACKAGE} has rotary positions.")
    rotated = config.mixer.options.get("rotary_width") or width
    _require("rotary_width", rotated, min(ROTATED, width))
    embedding = backbone.embedding.weight
    head = model.lm_head
    logits = {"weight": embedding, "bias": torch.zeros_like(embedding[:, 0])} if head is None else dict(head.named_parameters())
    position, norm = backbone.get_parameter("position.scale"), dict(backbone.norm.named_parameters())
    half = torch.arange(0, config.d_model, 2, device="cpu") / config.d_model
    weights = {"token_emb.weight": embedding, "abs_pos_emb.scale": position, "abs_pos_emb.inv_freq": 10000.0**-half}
    arguments: dict[str, Any] = {}
    for place, block in enumerate(backbone.blocks):
        own, arguments = _flash(block.mixer)  # type: ignore[arg-type] # its kind was checked
        weights |= {f"layers.{place}.{name}": tensor for name, tensor in own.items()}
    weights |= {f"to_logits.0.{kind}": tensor for kind, tensor in norm.items()}
    weights |= {f"to_logits.1.{kind}": tensor for kind, tensor in logits.items()}
    arguments.pop("rotary_dim")
    arguments |= {"num_tokens": config.vocab_size, "depth": config.n_blocks, "norm_type": config.norm}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}, arguments


def write_flash_pytorch(model: LanguageModel, file: str | Path) -> dict[str, Any]:
    """Save a model as a state dict of FLASH-pytorch into a new file; returns the arguments of its FLASHTransformer.

    The format follows the suffix: that of safetensors, or that of torch.save.

    Raises:
        ArgumentError: naming an option that FLASH-pytorch does not have, or for a file that exists or has another suffix.
        LineartimeError: if it cannot be written.
    """
    file = Path(file)
    check_destination(file)
    weights, arguments = to_flash_pytorch(model)
    with new_file("destination", file) as partial:
        try:
            if file.suffix == ".safetensors":
                save_file(weights, partial)
            else:
                torch.save(weights, partial)
        except SafetensorError as error:
            raise os_error_behind(error) from None
        except RuntimeError as error:  # raised by PyTorch's writer if the disk is full
            raise LineartimeError(
                f"Cannot write {file} ({typed_first_line(error)}): free some space, then try again."
            ) from None
    return arguments


def check_destination(file: Path) -> None:
    """Raise ArgumentError, naming the destination, for a file that exists, or whose suffix is not that of a weight file."""
    if file.suffix not in SUFFIXES:
        raise ArgumentError("destination", f"is {file}, but must end in one of {', '.join(SUFFIXES)}: add one of them.")
    check_new("destination", file)


def _flash(layer: FLASH) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict of FLASH-pytorch's FLASH, and the arguments of its constructor."""
    activation: str = layer.activation
    if activation not in ("relu2", "laplace"):
        raise ArgumentError("activation", f"is {activation!r}, but {PACKAGE} has only 'relu2' and 'laplace'{ADVICE}.")
    _require("normalization", layer.normalization, "paper_sum")
    _require("memory", layer.memory, "sum")
    if isinstance(layer.norm, RMSNorm):
        raise ArgumentError("norm", f"is 'rmsnorm', but {PACKAGE} has only 'layernorm' and 'scalenorm'{ADVICE}.")
    norm: Norm = "scalenorm" if isinstance(layer.norm, ScaleNorm) else "layernorm"
    eps, wanted = float(layer.norm.eps), NORM_EPS[norm]  # type: ignore[arg-type] # PyTorch types a submodule as any Module
    if eps > wanted if norm == "scalenorm" else eps != wanted:
        allowed = "at most " if norm == "scalenorm" else ""
        raise ArgumentError("norm_eps", f"is {eps}, but must be {allowed}{wanted} for the {norm} of {PACKAGE}.")
    if layer.bias is not None and not isinstance(layer.bias, BucketBias):
        raise ArgumentError("bias_form", f"is 'auto', but {PACKAGE} has only a relative bias by buckets{ADVICE}.")
    d_qk, width = layer.d_qk, layer.d_value
    rotated = (getattr(layer, "rotary_width", None) or d_qk) if layer.rope else 0
    back = torch.tensor(interleaved_order(d_qk, rotated), device="cpu").argsort()
    maps = torch.tensor(MAPS, device="cpu").argsort()
    weights: dict[str, Tensor] = {}
    if layer.rope:
        weights["rotary_pos_emb.freqs"] = rotary_frequencies(rotated)
    values = torch.zeros(N_BUCKETS, device="cpu") if layer.bias is None else layer.bias.values.detach().cpu() * d_qk**-0.5
    weights["rel_pos_bias.relative_attention_bias.weight"] = values[:, None]
    weights |= {f"norm.{name}": tensor for name, tensor in layer.norm.named_parameters()}
    for kind, tensor in layer.to_gate_value_base.named_parameters():
        gate, value, base = tensor.detach().cpu().split([width, width, d_qk])
        weights |= {f"to_hidden.0.{kind}": torch.cat([value, gate]), f"to_qk.0.{kind}": base[back]}
    for name in ("gamma", "beta"):
        weights[f"qk_offset_scale.{name}"] = layer.get_parameter(name).detach().cpu()[maps][:, back]
    weights |= {f"to_out.{kind}": tensor for kind, tensor in layer.to_output.named_parameters()}
    arguments = {
        "dim": layer.d_model,
        "group_size": layer.chunk_size,
        "query_key_dim": d_qk,
        "expansion_factor": layer.expansion,
        "causal": layer.causal,
        "shift_tokens": layer.token_shift,
        "laplace_attn_fn": activation == "laplace",
        "rotary_dim": rotated,
    }
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}, arguments


def _require(option: str, value: object, allowed: object, what: str = "") -> None:
    """Raise ArgumentError unless an option has the only value that FLASH-pytorch supports."""
    if value != allowed:
        raise ArgumentError(option, f"is {value!r}, but {PACKAGE} has only {allowed!r}{f' {what}' if what else ''}{ADVICE}.")
