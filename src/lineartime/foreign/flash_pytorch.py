"""Import GAU, FLASH and FLASHTransformer of FLASH-pytorch 0.1.9, and the unit of FLASHQuad_pytorch, from their state dicts.

Each difference from our defaults is an option of our layers and those in mixers.py: scores divided by a constant and chunk sums
that are not averaged ("paper_sum"; in GAU "paper_bias"), T5's relative bias, rotation of at most 32 features, a token shift,
and untied logits.
Its norm divides by max(rms(x), 1e-5) and ours by sqrt(mean(x^2) + 1e-10), which is the same to 1e-10 unless all x are tiny.

The unit of FLASHQuad_pytorch:

    P = relu(rope(q) rope(k)^T / n + w[j - t + n - 1])^2        n = max_position_embeddings (512), whatever the input's length

Its users found that 1 / length, and a bias read for that length, give wrong outputs at other lengths than that of training;
hence the constant. `normalization="constant"` has it here.

Shapes: d model width, e value width, s query/key width, V vocabulary.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import check_type
from lineartime.foreign.mixers import N_BUCKETS, ForeignActivation, ForeignFLASH, ForeignGAU
from lineartime.foreign.weights import StateDict, interleaved_order
from lineartime.layers.positions import MAX_TABLE_LENGTH
from lineartime.layers.residual import Norm
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import CausalLM, MaskedLM, build_model
from lineartime.ops.checks import check_positive

PACKAGE, QUAD_PACKAGE = "FLASH-pytorch", "FLASHQuad_pytorch"
NORM_EPS: dict[Norm, float] = {"scalenorm": 1e-10, "layernorm": 1e-5}
"""The epsilon of our norm that corresponds to theirs."""
MAPS = [0, 2, 1, 3]
"""The indices of its quadratic queries, linear queries, quadratic keys and linear keys among ours."""


def is_model(weights: Mapping[str, Tensor]) -> bool:
    """Whether these are the weights of a FLASHTransformer, also as a part of another module."""
    return {"token_emb.weight", "abs_pos_emb.scale"} <= _unwrapped(weights).keys()


def _unwrapped(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights of a FLASHTransformer that is the only part of a module, such as an AutoregressiveWrapper."""
    prefix = next((name.removesuffix("token_emb.weight") for name in weights if name.endswith(".token_emb.weight")), "")
    if not all(name.startswith(prefix) for name in weights):
        return weights
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def from_flash_pytorch(
    weights: Mapping[str, Tensor],
    *,
    causal: bool = False,
    group_size: int = 256,
    shift_tokens: bool | None = None,
    laplace_attn_fn: bool = False,
    sequence_length: int | None = None,
    dropout: float = 0.0,
    interpolate_factor: float = 1.0,
) -> CausalLM | MaskedLM | ForeignFLASH | ForeignGAU:
    """Build the model or layer of a FLASH-pytorch state dict, in evaluation mode.

    Args:
        weights: the state dict of a FLASHTransformer, also inside an AutoregressiveWrapper or a LightningModule, of a FLASH or
            a GAU.
        causal, group_size, shift_tokens, laplace_attn_fn: the arguments it was built with, by default those of FLASH-pytorch;
            the weights do not contain them. shift_tokens is True by default for a FLASHTransformer. Our layers always have a
            residual, and both ways they read all chunks: what was built with add_residual=False, or with
            reduce_group_non_causal_attn=False unless causal, is another function.
        sequence_length: for a causal GAU, the divisor of the scores. FLASH-pytorch divides by the length of the input, so that
            later tokens change earlier outputs; our GAU divides by this number, and agrees for inputs of this length.
        dropout: the rate it was trained with (attn_dropout of a FLASHTransformer). Ours then drops outputs of layers at this
            rate, where FLASH-pytorch drops attention weights and, in a GAU alone, outputs.
        interpolate_factor: of its rotary embedding, if it got one of its own: only 1 can be converted.

    Warns:
        UserWarning: for a dropout, which is another one than that of the original: further training differs.

    Raises:
        ArgumentError: for arguments that our layers cannot reproduce.
        LineartimeError: for weights of any other model or layer.
    """
    weights = _unwrapped(weights) if isinstance(weights, Mapping) else weights
    state = StateDict(weights, PACKAGE)
    for name, value in {"causal": causal, "laplace_attn_fn": laplace_attn_fn}.items():
        check_type(name, value, bool)
    check_type("shift_tokens", shift_tokens, bool | None)
    check_type("dropout", dropout, float)
    if interpolate_factor != 1:
        raise ArgumentError(
            "interpolate_factor", f"is {interpolate_factor}, but must be 1: our layers rotate by whole positions."
        )
    if dropout:
        what = f"{PACKAGE} drops attention weights, and ours the outputs of layers"
        warnings.warn(f"{what}: with dropout {dropout:g}, further training differs.", stacklevel=2)
    check_positive(group_size=group_size, **({} if sequence_length is None else {"sequence_length": sequence_length}))
    activation: ForeignActivation = "laplace" if laplace_attn_fn else "relu2"
    built: CausalLM | MaskedLM | ForeignFLASH | ForeignGAU
    if is_model(weights):
        shift = shift_tokens is not False
        built = _model(state, causal, {"chunk_size": group_size, "token_shift": shift, "activation": activation}, dropout)
    elif "qk_offset_scale.gamma" in weights:
        options, own = _flash(state, "")
        options |= {"chunk_size": group_size, "token_shift": bool(shift_tokens), "activation": activation, "dropout": dropout}
        built = ForeignFLASH(**options, causal=causal).to(own["gamma"].dtype)
        built.load_state_dict(own)
    elif "offsetscale.gamma" in weights:
        if causal and sequence_length is None:
            what = "is None, but must be given for a causal GAU, whose divisor is the length of what it reads"
            raise ArgumentError("sequence_length", f"{what}: give the length it was trained with.")
        options, own = _gated(state, "", "offsetscale", [0, 1], "to_out.0", rotated=0)
        own["bias.values"] *= options["d_model"] ** 0.5
        options |= {"activation": activation, "rope": False, "normalization": "paper_bias", "dropout": dropout}
        built = ForeignGAU(**options, causal=causal, max_length=sequence_length if causal else None).to(own["gamma"].dtype)
        built.load_state_dict(own)
    else:
        raise LineartimeError(f"The weights do not belong to a model or layer of {PACKAGE}: they lack token_emb.weight.")
    state.finish()
    return built.eval()


def _model(state: StateDict, causal: bool, chosen: dict[str, Any], dropout: float) -> CausalLM | MaskedLM:
    vocab_size, d_model = state.matrix("token_emb.weight")
    n_blocks = state.count(r"layers\.(\d+)\.")
    if not n_blocks:
        raise LineartimeError(f"The weights lack layers.0, which {PACKAGE} has.")
    weights = {
        "backbone.embedding.weight": state.take("token_emb.weight", vocab_size, d_model),
        "backbone.position.scale": state.take("abs_pos_emb.scale", 1),
        "backbone.norm.weight": state.take("to_logits.0.weight", d_model),
        "backbone.norm.bias": state.take("to_logits.0.bias", d_model),
        "lm_head.weight": state.take("to_logits.1.weight", vocab_size, d_model),
        "lm_head.bias": state.take("to_logits.1.bias", vocab_size),
    }
    state.pop("abs_pos_emb.inv_freq", None)  # the frequencies of the sinusoid, which we compute
    found = []
    for block in range(n_blocks):
        options, own = _flash(state, f"layers.{block}.")
        weights |= {f"backbone.blocks.{block}.mixer.{name}": tensor for name, tensor in own.items()}
        found.append(options)
    options = found[0]
    if any(other != options for other in found) or options.pop("d_model") != d_model or not options.pop("rope"):
        raise LineartimeError(f"The weights have layers that differ in their sizes, which a model of {PACKAGE} does not have.")
    norms: dict[str, Any] = {"norm": options.pop("norm"), "norm_eps": options.pop("norm_eps"), "final_norm": "layernorm"}
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "d_model": d_model, "n_blocks": n_blocks, "dropout": dropout}
    mixer = LayerConfig(ForeignFLASH.name, **options, **chosen)
    config = ModelConfig(task="clm" if causal else "mlm", mixer=mixer, tie_word_embeddings=False, **sizes, **norms)
    model = build_model(config).to(weights["backbone.embedding.weight"].dtype)
    model.load_state_dict(weights)
    return model


def _flash(state: StateDict, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options that the weights of a FLASH determine, and its weights under our names."""
    name = f"{prefix}rotary_pos_emb.freqs"
    freqs = state.pop(name, torch.empty(0))
    rotated, half = 2 * freqs.numel(), freqs.dtype in (torch.float16, torch.bfloat16)
    usual = 10000 ** (-torch.arange(0, rotated, 2) / max(rotated, 1))
    if not torch.allclose(freqs.flatten().float(), usual, rtol=1e-2 if half else 1e-5, atol=0):
        what = "holds other frequencies than 10000^(-2 i / n), which ours have alone: they were rescaled, or learned"
        raise LineartimeError(f"{name} {what}.")
    options, own = _gated(state, prefix, "qk_offset_scale", MAPS, "to_out", rotated)
    own["bias.values"] *= options["d_qk"] ** 0.5
    rotary_width = rotated if 0 < rotated < options["d_qk"] else None
    return {**options, "rope": rotated > 0, "rotary_width": rotary_width, "normalization": "paper_sum"}, own


def _gated(
    state: StateDict, prefix: str, scales: str, maps: list[int], output: str, rotated: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The sizes of a gated unit, and its weights under our names; `maps` locates its queries and keys among ours."""
    d_qk, d_model = state.matrix(f"{prefix}to_qk.0.weight")
    width = state.matrix(f"{prefix}to_hidden.0.weight")[0] // 2
    if width % d_model or d_qk % 2 or rotated > d_qk:
        what = f"values of width {width} and queries of width {d_qk} of which {rotated} are rotated"
        raise LineartimeError(f"The weights have {what}, but ours have a multiple of {d_model} and an even number.")
    order = interleaved_order(d_qk, rotated)
    own = {}
    for kind, shape in (("weight", (d_model,)), ("bias", ())):
        value, gate = state.take(f"{prefix}to_hidden.0.{kind}", 2 * width, *shape).chunk(2)
        own[f"to_gate_value_base.{kind}"] = torch.cat([gate, value, state.take(f"{prefix}to_qk.0.{kind}", d_qk, *shape)[order]])
    for name in ("gamma", "beta"):
        own[name] = state.take(f"{prefix}{scales}.{name}", len(maps), d_qk)[maps][:, order]
    own["to_output.weight"] = state.take(f"{prefix}{output}.weight", d_model, width)
    own["to_output.bias"] = state.take(f"{prefix}{output}.bias", d_model)
    bias = f"{prefix}rel_pos_bias.relative_attention_bias.weight"
    own["bias.values"] = state.take(bias, N_BUCKETS, 1)[:, 0].clone()
    norm, of_norm = _norm(state, f"{prefix}norm.", "g", d_model)
    options = {"d_model": d_model, "d_qk": d_qk, "expansion": width // d_model, "bias_form": "buckets"}
    return {**options, "norm": norm, "norm_eps": NORM_EPS[norm]}, {**own, **of_norm}


def _norm(state: StateDict, prefix: str, scalar: str, d_model: int) -> tuple[Norm, dict[str, Tensor]]:
    """The kind of a norm, and its weights under our names; that of a scalar is a ScaleNorm."""
    if prefix + scalar in state:
        return "scalenorm", {"norm.g": state.take(prefix + scalar, 1)}
    return "layernorm", {f"norm.{kind}": state.take(prefix + kind, d_model) for kind in ("weight", "bias")}


def from_flash_quad(weights: Mapping[str, Tensor], *, causal: bool = False, eps: float = 1e-5) -> ForeignGAU:
    """Build the unit of a state dict of FLASHQuad_pytorch's GAU, in evaluation mode.

    Args:
        weights: of one GAU, also as the only one of a model.
        causal: whether it is called with causal=True.
        eps: the `layer_norm_eps` of its configuration.

    Raises:
        LineartimeError: for weights of something else, or of a unit that ours cannot be.
    """
    state = StateDict(weights, QUAD_PACKAGE).part("uv.weight")
    (rows, d_model), (_, width), n = state.matrix("uv.weight"), state.matrix("o.weight"), (state["w"].numel() + 1) // 2
    d_qk = rows - 2 * width
    if width % d_model or d_qk < 2 or d_qk % 2 or n > MAX_TABLE_LENGTH:
        what = f"has values of width {width}, keys of width {d_qk} and biases of {n} tokens"
        ours = f"ours have a multiple of {d_model}, an even number and at most {MAX_TABLE_LENGTH}"
        raise LineartimeError(f"The weights of {QUAD_PACKAGE} are of a unit that {what}, but {ours}.")
    for unused in ("a", "b"):  # of a bias for longer inputs, which it never reads
        state.take(unused, 1, d_qk)
    own = {
        "to_gate_value_base.weight": state.take("uv.weight", rows, d_model),
        "to_gate_value_base.bias": state.take("uv.bias", rows),
        "to_output.weight": state.take("o.weight", d_model, width),
        "to_output.bias": state.take("o.bias", d_model),
        "gamma": state.take("weight", 2, d_qk),
        "beta": state.take("bias", 2, d_qk),
        "bias.table": state.take("w", 2 * n - 1),
    }
    norm, of_norm = _norm(state, "LayerNorm.", "scala", d_model)
    own |= of_norm
    state.finish()
    unit = ForeignGAU(
        d_model, d_qk=d_qk, expansion=width // d_model, normalization="constant", max_length=n, causal=causal, norm=norm,
        norm_eps=eps,
    ).to(own["gamma"].dtype)  # fmt: skip
    unit.load_state_dict(own)
    return unit.eval()
