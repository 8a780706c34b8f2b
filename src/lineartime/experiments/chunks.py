"""Another chunk size after training."""

import torch

from lineartime.models.language_model import LanguageModel, build_model


def with_chunk_size(model: LanguageModel, chunk_size: int) -> LanguageModel | None:
    """A copy of a trained model of FLASH that reads chunks of another size; None if its relative bias does not allow it.

    A table of biases keeps those of the distances that both sizes have; distances that training did not see get zero. Beyond
    512 tokens the bias is of another form, which cannot be made from a table.
    """
    config = model.config.override(chunk_size=chunk_size)
    other = build_model(config).to(next(model.parameters()).device)
    weights, wanted = model.state_dict(), other.state_dict()
    if weights.keys() != wanted.keys():
        return None
    for name, weight in weights.items():
        if weight.shape != wanted[name].shape:
            kept, table = min(len(weight), len(wanted[name])), torch.zeros_like(wanted[name])
            old, new = ((len(each) - kept) // 2 for each in (weight, table))
            table[new : new + kept] = weight[old : old + kept]
            weights[name] = table
    other.load_state_dict(weights)
    return other.eval()
