"""Conversion of tokenizers from lineartime to transformers and back."""

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lineartime.data.tokenizers import BYTE_LEVEL, END_TEXT, FRAME, MASK_TEXT, ByteTokenizer, JsonTokenizer, Tokenizer
from lineartime.errors import LineartimeError

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if content is not string -%}
{%- set content = content | map(attribute='text') | join -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
assistant:{% generation %} {{ content | trim }}{{ eos_token }}{% endgeneration %}
{%- else -%}
{{ message['role'] }}: {{ content | trim }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
assistant:
{%- endif -%}
"""
"""Plain turns, one per line: `user: ...`, and `assistant: ...` with an end-of-document token, at which generation stops."""


def fast_tokenizer(tokenizer: Tokenizer, longest: int | None = None, *, framed: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers that gives the same ids.

    Its special tokens are parsed in texts, as usual in transformers: "[MASK]" in a text is the mask. The end-of-document
    token also serves as the beginning-of-text, end-of-text and padding token. `longest` is the maximum length of a text. If
    `framed`, as for a masked language model, each text gets [CLS] and [SEP] around it if the tokenizer has them.

    Raises:
        LineartimeError: if the ids of a trained tokenizer have gaps, so that special tokens cannot be added.
    """
    backend = _byte_backend() if isinstance(tokenizer, ByteTokenizer) else _json_backend(tokenizer)
    end, mask = (backend.id_to_token(token) for token in (tokenizer.end_of_document, tokenizer.mask))
    if end is None or mask is None:
        raise LineartimeError("The tokenizer has gaps in its ids, so that no special tokens can be added: train another one.")
    frame: dict[str, str] = {}
    if framed and tokenizer.frame is not None:
        frame = dict(zip(("cls_token", "sep_token"), FRAME, strict=True))
        backend.post_processor = framing(backend, *FRAME)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **frame,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        mask_token=mask,
        padding_side="left",  # prompts are continued on the right
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
    )


def framing(backend: Any, cls: str, sep: str) -> TemplateProcessing:
    """What puts `cls` before a text and `sep` after it, and after the second of a pair, whose tokens have type 1."""
    tokens = [(name, backend.token_to_id(name)) for name in dict.fromkeys((cls, sep))]
    pair = [cls, "$A", sep, "$B:1", f"{sep}:1"]
    return TemplateProcessing(single=pair[:3], pair=pair, special_tokens=tokens)


def plain_tokenizer(definition: str, source: str) -> Tokenizer:
    """The tokenizer in a tokenizer.json, recognising the byte tokenizer; raises LineartimeError for invalid files."""
    found = JsonTokenizer(definition, source)
    given, own = (_spelling(text) for text in (definition, _byte_backend().to_str()))
    return ByteTokenizer() if given == own else found


def _spelling(definition: str) -> list[Any]:
    """What determines the ids of a text: pieces, merges, normalisation, splitting, and the ids of added tokens."""
    data: dict[str, Any] = json.loads(definition)
    added = {token["content"]: token["id"] for token in data.get("added_tokens") or ()}
    model = {name: data["model"].get(name) for name in ("type", "vocab", "merges")}
    return [model, data.get("normalizer"), data.get("pre_tokenizer"), added]


def _byte_backend() -> Any:
    """The byte tokenizer as byte-level BPE without merges."""
    backend: Any = tokenizers.Tokenizer(models.BPE(vocab=BYTE_LEVEL, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_TEXT, MASK_TEXT])
    return backend


def _json_backend(tokenizer: Tokenizer) -> Any:
    """The definition of a trained tokenizer, plus the special tokens that lineartime adds if it has none."""
    backend: Any = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # models are trained without the special tokens that it adds
    for token, name in sorted({tokenizer.end_of_document: "<end_of_document>", tokenizer.mask: MASK_TEXT}.items()):
        backend.add_special_tokens([backend.id_to_token(token) or name])
    return backend
