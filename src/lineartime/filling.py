"""Masked tokens: what a masked language model predicts in the gaps of a text.

Shapes: T tokens of the text, M masks, V vocabulary, K candidates.
"""

from dataclasses import dataclass

import torch

from lineartime.data.tokenizers import MASK_TEXT, Tokenizer, check_vocabulary, encode_given
from lineartime.errors import ArgumentError
from lineartime.models.language_model import MaskedLM, are_finite, check_finite_logits, check_model
from lineartime.ops.checks import check_positive


@dataclass(frozen=True)
class Candidate:
    r"""A candidate for a masked token.

    Attributes:
        token: the token's id.
        text: the token in readable form; bytes of an incomplete character are written as \xc3.
        probability: the token's probability among all tokens of the vocabulary.
    """

    token: int
    text: str
    probability: float


def fill_mask(model: MaskedLM, tokenizer: Tokenizer, text: str, top: int = 5) -> list[list[Candidate]]:
    """Predict the likeliest tokens at each [MASK] of a text.

    A mask replaces one token; with a byte tokenizer, one byte. The model reads all masks at once, and predicts each without
    knowing the tokens at the others. The parts of the text between masks are encoded separately.

    Args:
        model: a masked language model, in evaluation mode.
        tokenizer: the model's tokenizer.
        text: the text, with at least one "[MASK]".
        top: K, the number of candidates.

    Returns:
        For each of the M masks in order, K candidates, the likeliest first.

    Raises:
        ArgumentError: for a text without a mask or longer than the model can read, a causal model, or a tokenizer that does
            not fit the model.
        LineartimeError: if the logits are not finite.
    """
    known = check_model(model, MaskedLM, "fill masks").config
    check_vocabulary(tokenizer, known.vocab_size)
    check_positive(top=top)
    ids = _masked_ids(tokenizer, text)
    longest = known.longest_sequence
    if longest is not None and len(ids) > longest:
        raise ArgumentError("text", f"has {len(ids):,} tokens, but this model reads at most {longest:,}: shorten it.")
    places = [place for place, token in enumerate(ids) if token == tokenizer.mask]
    device = next(model.parameters()).device
    torch.clear_autocast_cache()  # an autocast of the caller keeps copies of weights that training has changed since
    with torch.no_grad():
        hidden = model.backbone(torch.tensor([ids], device=device))[0, places]
        logits = model.logits(hidden).float()  # [M, V]
    check_finite_logits(bool(are_finite(logits).all()))
    values, tokens = logits.softmax(-1).topk(min(top, known.vocab_size), dim=-1)
    return [
        [Candidate(token, tokenizer.show(token), value) for token, value in zip(ids, chances, strict=True)]
        for ids, chances in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


def _masked_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text as in training, with each [MASK] as the mask token. Raises ArgumentError if it has none."""
    if not isinstance(text, str):
        raise ArgumentError("text", f"is of type {type(text).__name__}, but must be a text.")
    if MASK_TEXT not in text:
        beginning = text if len(text) <= 40 else f"{text[:37]}..."
        raise ArgumentError("text", f"is {beginning!r}, which holds no {MASK_TEXT}: write {MASK_TEXT} at each gap.")
    first, *rest = (encode_given(tokenizer, "text", part, place > 0) for place, part in enumerate(text.split(MASK_TEXT)))
    ids = [*first, *(token for part in rest for token in (tokenizer.mask, *part))]
    return ids if tokenizer.frame is None else [tokenizer.frame[0], *ids, tokenizer.frame[1]]
