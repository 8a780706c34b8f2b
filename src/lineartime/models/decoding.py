"""Decoding: one more token of each stream at a time, as fast as the machine can.

Shapes: B streams, V vocabulary.
"""

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lineartime.models.decoder import MAX_STREAMS, NativeDecoder, is_modified, native_decoder

if TYPE_CHECKING:
    from lineartime.models.backbone import ModelState
    from lineartime.models.language_model import CausalLM

Step = Callable[["CausalLM", Tensor, "ModelState"], "tuple[Tensor, ModelState]"]
_numbers = count()


class Decoder:
    """A causal language model prepared for decoding; what `CausalLM.compile_for_decoding` returns.

    Attributes:
        model: the model.
        native: its step as one C++ function, made of the weights as they were; None where there is none, or for a model that
            was told to `compile_step`.
    """

    def __init__(self, model: "CausalLM") -> None:
        from lineartime.models.language_model import CausalLM  # which makes decoders

        self.model = model
        self.native: NativeDecoder | None = None
        if type(model) is CausalLM and model.compiled_step is None and not is_modified(model):
            self.native = native_decoder(model.backbone, model.lm_head)

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: "ModelState") -> tuple[Tensor, "ModelState"]:
        """Read one more token of each stream: int64 [B] -> logits [B, V], and the new state; `state` is consumed."""
        if self.native is not None and 0 < len(tokens) <= MAX_STREAMS:
            return self.native.logits(tokens.contiguous(), state), state
        return read_token(self.model, tokens, state)


def read_token(model: "CausalLM", tokens: Tensor, state: "ModelState") -> "tuple[Tensor, ModelState]":
    """Read one more token of each stream by PyTorch, compiled if the model was told so: int64 [B] -> logits [B, V]."""
    ids, step = tokens[:, None], model.compiled_step
    logits, state = model.extend(ids, state) if step is None else step(model, ids, state)
    return logits[:, 0], state


def compiled_step() -> Step:
    """`CausalLM.extend` for one token of each stream, by torch.compile; the first call compiles it."""

    def step(model: "CausalLM", ids: Tensor, state: "ModelState") -> "tuple[Tensor, ModelState]":
        return model.extend(ids, state)

    # PyTorch limits how often a code object is compiled, so each model gets its own. PyTorch also remembers the sizes
    # it has seen by the name of the code: under a shared name, sizes that differ between models would become dynamic.
    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    compiled: Step = torch.compile(step, fullgraph=True)
    return compiled
