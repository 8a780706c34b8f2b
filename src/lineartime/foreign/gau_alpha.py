"""Import GAU-alpha, the public Chinese masked language model of GAUs, in the layout of the package gau_alpha 0.0.3.

Its norms have no parameters and follow the residuals and the embeddings; here they are ScaleNorms with a scalar of 1. By
default, it has no biases; here they are 0. Its rotary positions rotate neighbouring features, which are reordered.

Shapes: d model width, e value width, s query/key width, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.data.tokenizers import JsonTokenizer
from lineartime.errors import LineartimeError, missing_extra, reporting_file_errors
from lineartime.fields import shown
from lineartime.foreign.mixers import ForeignActivation, ForeignGAU
from lineartime.foreign.weights import StateDict, interleaved_order
from lineartime.models.config import ModelConfig
from lineartime.models.language_model import CausalLM, MaskedLM, build_model
from lineartime.models.layer_config import LayerConfig

PACKAGE = "GAU-alpha"
MODEL_TYPE = "gau_alpha"
VOCABULARY = "vocab.txt"
_ACTIVATIONS: dict[str, ForeignActivation] = {"softmax_plus": "softmax_plus", "softmax": "softmax", "squared_relu": "relu2"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 12000,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "type_vocab_size": 2,
    "attention_key_size": 128,
    "layer_norm_eps": 1e-12,
    "hidden_act": "swish",
    "use_bias": False,
    "normalization": "softmax_plus",
    "attention_scale": True,
    "embedding_size": None,
}


def from_gau_alpha(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> CausalLM | MaskedLM:
    """Build the masked language model that a state dict and a config.json of GAU-alpha describe, in evaluation mode.

    Args:
        weights: of a GAUAlphaForMaskedLM, or of a GAUAlphaModel, whose token embedding then also serves as the output layer.
        config: its configuration; missing values take the defaults of gau_alpha.

    Raises:
        LineartimeError: for a configuration or weights that do not fit.
    """
    values = {name: config.get(name, default) for name, default in _DEFAULTS.items()}
    _check(values)
    d_model, width, d_qk = values["hidden_size"], values["intermediate_size"], values["attention_key_size"]
    state = StateDict(weights, PACKAGE)
    prefix = "gau_alpha." if any(name.startswith("gau_alpha.") for name in weights) else ""
    n_blocks = state.count(rf"{prefix}encoder\.layer\.(\d+)\.")
    if n_blocks != values["num_hidden_layers"]:
        raise LineartimeError(
            f"The weights of {PACKAGE} have {n_blocks} layers, but num_hidden_layers is {values['num_hidden_layers']}."
        )
    embedding = state.take(f"{prefix}embeddings.word_embeddings.weight", values["vocab_size"], d_model)
    types = f"{prefix}embeddings.token_type_embeddings.weight"
    one = embedding.new_ones(1)
    own = {
        "backbone.embedding.weight": embedding,
        "backbone.token_types.weight": state.take(types, values["type_vocab_size"], d_model),
        "backbone.embedding_norm.g": one,
    }
    logits = "cls.predictions.decoder.weight"
    head = state.take(logits, *embedding.shape) if logits in state else embedding
    tied = torch.equal(head, embedding)
    if not tied:
        own |= {"lm_head.weight": head, "lm_head.bias": embedding.new_zeros(len(embedding))}
    for block in range(n_blocks):
        layer = _layer(state, f"{prefix}encoder.layer.{block}.gau.", d_model, width, d_qk, values["use_bias"])
        if not values["attention_scale"]:  # our GAU always divides scores by sqrt(s)
            layer["gamma"][0] *= d_qk**0.5
            layer["beta"][0] *= d_qk**0.5
        own |= {f"backbone.blocks.{block}.mixer.{name}": tensor for name, tensor in {**layer, "norm.g": one}.items()}
    state.finish()
    model = build_model(
        ModelConfig(
            task="mlm",
            vocab_size=len(embedding),
            d_model=d_model,
            n_blocks=n_blocks,
            norm="scalenorm",
            norm_eps=float(values["layer_norm_eps"]),
            norm_position="post",
            final_norm="none",
            embedding_norm=True,
            absolute_position="none",
            token_types=values["type_vocab_size"],
            tie_word_embeddings=tied,
            mixer=LayerConfig(
                ForeignGAU.name,
                d_qk=d_qk,
                expansion=width // d_model,
                activation=_ACTIVATIONS[values["normalization"]],
                relative_bias=False,
            ),
        )
    ).to(embedding.dtype)
    model.load_state_dict(own)
    return model.eval()


def _layer(state: StateDict, prefix: str, d_model: int, width: int, d_qk: int, biases: bool) -> dict[str, Tensor]:
    """The weights of one layer under our names; its gate, values and base are already in our order."""
    order = interleaved_order(d_qk, d_qk)
    rows = [*range(2 * width), *(2 * width + place for place in order)]
    weight = state.take(f"{prefix}i_dense.weight", 2 * width + d_qk, d_model)[rows]
    output = state.take(f"{prefix}o_dense.weight", d_model, width)
    maps = ("q_scaleoffset", "k_scaleoffset")
    gamma = torch.stack([state.take(f"{prefix}{name}.weight", d_qk)[order] for name in maps])

    def vector(name: str, size: int) -> Tensor:
        return state.take(f"{prefix}{name}.bias", size) if biases else weight.new_zeros(size)

    return {
        "to_gate_value_base.weight": weight,
        "to_gate_value_base.bias": vector("i_dense", len(rows))[rows],
        "to_output.weight": output,
        "to_output.bias": vector("o_dense", d_model),
        "gamma": gamma,
        "beta": torch.stack([vector(name, d_qk)[order] for name in maps]),
    }


def _check(values: Mapping[str, Any]) -> None:
    """Raise LineartimeError, naming the field, for a configuration that our models cannot have."""
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "type_vocab_size",
        "attention_key_size",
    ):
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise LineartimeError(f"{name} is {value!r} in the configuration of {PACKAGE}, but must be an integer from 1 on.")
    sizes = {
        "hidden_act": values["hidden_act"] in ("swish", "silu"),
        "normalization": values["normalization"] in list(_ACTIVATIONS),  # a list, for unhashable values
        "embedding_size": values["embedding_size"] in (None, values["hidden_size"]),
        "intermediate_size": values["intermediate_size"] % values["hidden_size"] == 0,
        "attention_key_size": values["attention_key_size"] % 2 == 0,
        "layer_norm_eps": isinstance(values["layer_norm_eps"], float) and 0 < values["layer_norm_eps"] < 1,
        "use_bias": isinstance(values["use_bias"], bool),
        "attention_scale": isinstance(values["attention_scale"], bool),
    }
    for name, possible in sizes.items():
        if not possible:
            raise LineartimeError(
                f"{name} is {shown(values[name])} in the configuration of {PACKAGE}, which no model of lineartime can have."
            )


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
