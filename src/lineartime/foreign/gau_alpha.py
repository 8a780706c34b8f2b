"""Import GAU-alpha, the public Chinese masked language model of GAUs, in the layout of the package gau_alpha 0.0.3.

Its norms have no parameters and follow the residuals and the embeddings; here they are ScaleNorms with a scalar of 1. By
default, it has no biases; here they are 0. Its rotary positions rotate neighbouring features, which are reordered.

Shapes: d model width, e value width, s query/key width, V vocabulary.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lineartime.data.tokenizers import JsonTokenizer
from lineartime.errors import ArgumentError, LineartimeError, missing_extra, reporting_file_errors
from lineartime.fields import Between, decode
from lineartime.foreign.mixers import ForeignActivation, ForeignGAU
from lineartime.foreign.weights import StateDict, interleaved_order
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import CausalLM, MaskedLM, build_model

PACKAGE = "GAU-alpha"
MODEL_TYPE = "gau_alpha"
VOCABULARY = "vocab.txt"
_ACTIVATIONS: dict[str, ForeignActivation] = {"softmax_plus": "softmax_plus", "softmax": "softmax", "squared_relu": "relu2"}


@dataclass(frozen=True)
class _Config:
    """What a configuration of GAU-alpha says that its weights do not; the defaults are those of gau_alpha."""

    layer_norm_eps: Annotated[float, Between(above=0, below=1)] = 1e-12
    hidden_act: Literal["swish", "silu"] = "swish"
    normalization: Literal["softmax_plus", "softmax", "squared_relu"] = "softmax_plus"
    attention_scale: bool = True
    hidden_dropout_prob: Annotated[float, Between(0, below=1)] = 0.1
    attention_probs_dropout_prob: Annotated[float, Between(0, below=1)] = 0.1


def from_gau_alpha(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> CausalLM | MaskedLM:
    """Build the masked language model that a state dict and a config.json of GAU-alpha describe, in evaluation mode.

    Args:
        weights: of a GAUAlphaForMaskedLM, or of a GAUAlphaModel, whose token embedding then also serves as the output layer.
        config: its configuration; missing values take the defaults of gau_alpha. Sizes are those of the weights, and the model
            drops outputs of layers at its hidden_dropout_prob.

    Warns:
        UserWarning: for dropout of attention weights or of embeddings, which ours does not have: further training differs.

    Raises:
        LineartimeError: for a configuration or weights that do not fit.
    """
    try:
        given: _Config = decode(_Config, {each.name: config[each.name] for each in fields(_Config) if each.name in config})
    except ArgumentError as error:
        raise LineartimeError(f"The configuration of {PACKAGE} describes no model of lineartime: {error}") from None
    state = StateDict(weights, PACKAGE)
    prefix = "gau_alpha." if any(name.startswith("gau_alpha.") for name in weights) else ""
    first = f"{prefix}encoder.layer.0.gau."
    (vocab_size, d_model), (_, width) = (
        state.matrix(name) for name in (f"{prefix}embeddings.word_embeddings.weight", f"{first}o_dense.weight")
    )
    d_qk = state.matrix(f"{first}i_dense.weight")[0] - 2 * width
    if width % d_model or d_qk < 2 or d_qk % 2:
        what = f"has values of width {width} and keys of width {d_qk}, but ours have a multiple of {d_model} and an even number"
        raise LineartimeError(f"The weights of {PACKAGE} are of a model that {what}.")
    n_blocks = state.count(rf"{prefix}encoder\.layer\.(\d+)\.")
    if (layers := config.get("num_hidden_layers", n_blocks)) != n_blocks:
        raise LineartimeError(f"The weights of {PACKAGE} have {n_blocks} layers, but its configuration has {layers}.")
    embedding = state.take(f"{prefix}embeddings.word_embeddings.weight", vocab_size, d_model)
    types = f"{prefix}embeddings.token_type_embeddings.weight"
    token_types = state.matrix(types)[0]
    one = embedding.new_ones(1)
    own = {
        "backbone.embedding.weight": embedding,
        "backbone.token_types.weight": state.take(types, token_types, d_model),
        "backbone.embedding_norm.g": one,
    }
    logits = "cls.predictions.decoder.weight"
    head = state.take(logits, *embedding.shape) if logits in state else embedding
    tied = torch.equal(head, embedding)
    if not tied:
        own |= {"lm_head.weight": head, "lm_head.bias": embedding.new_zeros(len(embedding))}
    for block in range(n_blocks):
        layer = {**_layer(state, f"{prefix}encoder.layer.{block}.gau.", d_model, width, d_qk), "norm.g": one}
        if not given.attention_scale:  # our GAU always divides scores by sqrt(s)
            layer["gamma"][0] *= d_qk**0.5
            layer["beta"][0] *= d_qk**0.5
        own |= {f"backbone.blocks.{block}.mixer.{name}": tensor for name, tensor in layer.items()}
    state.finish()
    activation = _ACTIVATIONS[given.normalization]
    mixer = LayerConfig(ForeignGAU.name, d_qk=d_qk, expansion=width // d_model, activation=activation, relative_bias=False)
    parts: dict[str, Any] = {"vocab_size": vocab_size, "d_model": d_model, "n_blocks": n_blocks, "token_types": token_types}
    parts |= {"norm": "scalenorm", "norm_eps": given.layer_norm_eps, "norm_position": "post", "final_norm": "none"}
    parts |= {"embedding_norm": True, "absolute_position": "none", "tie_word_embeddings": tied}
    lost = {"attention weights": given.attention_probs_dropout_prob, "embeddings": given.hidden_dropout_prob}
    if any(lost.values()):
        rates = " and ".join(f"{rate:g} of {name}" for name, rate in lost.items() if rate)
        what = f"This model of {PACKAGE} was trained with dropout {rates}, which ours does not have"
        warnings.warn(f"{what}: it computes the same, but further training differs.", stacklevel=2)
    ours = ModelConfig(task="mlm", mixer=mixer, dropout=given.hidden_dropout_prob, **parts)
    model = build_model(ours).to(embedding.dtype)
    model.load_state_dict(own)
    return model.eval()


def _layer(state: StateDict, prefix: str, d_model: int, width: int, d_qk: int) -> dict[str, Tensor]:
    """The weights of one layer under our names, with biases of 0 if it has none; gate, values and base are in our order."""
    order = interleaved_order(d_qk, d_qk)
    rows = [*range(2 * width), *(2 * width + place for place in order)]
    weight = state.take(f"{prefix}i_dense.weight", 2 * width + d_qk, d_model)[rows]
    output = state.take(f"{prefix}o_dense.weight", d_model, width)
    maps = ("q_scaleoffset", "k_scaleoffset")
    gamma = torch.stack([state.take(f"{prefix}{name}.weight", d_qk)[order] for name in maps])

    def vector(name: str, size: int) -> Tensor:
        bias = f"{prefix}{name}.bias"
        return state.take(bias, size) if bias in state else weight.new_zeros(size)

    return {
        "to_gate_value_base.weight": weight,
        "to_gate_value_base.bias": vector("i_dense", len(rows))[rows],
        "to_output.weight": output,
        "to_output.bias": vector("o_dense", d_model),
        "gamma": gamma,
        "beta": torch.stack([vector(name, d_qk)[order] for name in maps]),
    }


def read_vocabulary(file: Path, lowercase: bool = True) -> JsonTokenizer:
    """BERT's WordPiece tokenizer with the vocabulary in a file, one piece per line."""
    try:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError:
        raise missing_extra("tokenizers", "tokenizers", f"The vocabulary {file}") from None
    with reporting_file_errors("read", file):
        try:
            pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # a piece may be U+2028
        except UnicodeDecodeError:
            raise LineartimeError(f"{file} is not UTF-8 text, one piece of a word in each line.") from None
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces) or "[UNK]" not in vocabulary:
        raise LineartimeError(f"{file} is no vocabulary of BERT: its lines must differ, and [UNK] must be one of them.")
    backend: Any = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocabulary])
    return JsonTokenizer(backend.to_str(), str(file))
