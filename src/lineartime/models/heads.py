"""Models that answer in logits: the causal and the masked language model.

Shapes: B batch, T tokens, N new tokens of a stream, V vocabulary, d model width.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.errors import Argument, ArgumentError
from lineartime.models.backbone import Backbone, BackboneState, JoinedStates
from lineartime.models.compiled_step import CompiledStep, compiled_step
from lineartime.models.config import ModelConfig
from lineartime.models.grouped import GroupedStreams
from lineartime.ops.context import ContextGroup
from lineartime.ops.cross_entropy import IGNORED, linear_cross_entropy
from lineartime.ops.dense import dense


class LanguageModel(nn.Module):
    """Backbone and logits, by the transposed token embedding or a map of their own: ids [B, T] -> logits [B, T, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size)
            nn.init.normal_(self.lm_head.weight, std=0.02)
            nn.init.zeros_(self.lm_head.bias)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        context: ContextGroup | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Logits of every token.

        Args:
            ids: [B, T] token ids.
            mask: bool or 0 and 1, [B, T], True for real tokens; padding may stand anywhere.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.
            prefix_lengths: int [B], or [D] with `cu_seqlens`, for a causal model: so many of the first real tokens of each row,
                or document, read each other in both directions; later tokens read as ever.
            context: the processes that hold every sequence together (`context_group`). Each passes its own slice, in the order
                of the ranks; slices are equal and whole chunks, without masks, packed documents or prefixes. Each gets its
                share of the parameters' gradients: the sum over the processes is the gradient of the sum of their losses.
            token_types: int [B, T], for a model with types of tokens; all are 0 by default.

        Returns:
            [B, T, V].

        Raises:
            ValueError: if shapes do not fit, or the mixer cannot split sequences over processes.
            LineartimeError: for prefixes, if the mixer can read none.
        """
        return self.logits(self.backbone(ids, mask, cu_seqlens, prefix_lengths, context=context, token_types=token_types))

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        context: ContextGroup | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """The mean cross-entropy over all targets, without the logits of all tokens in memory at once.

        Args:
            ids, mask, cu_seqlens, prefix_lengths, context, token_types: as for the logits.
            targets: int [B, T], the token to predict; -100 for none.

        Returns:
            A scalar, in nats; zero if there is no target at all.

        Raises:
            ValueError: as for the logits.
        """
        total = self.total_loss(ids, targets, mask, cu_seqlens, prefix_lengths, context=context, token_types=token_types)
        return total / (targets != IGNORED).sum().clamp(min=1)

    def total_loss(
        self,
        ids: Tensor,
        targets: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        context: ContextGroup | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """The sum of the losses that `loss` averages, for callers that divide by the targets of several batches."""
        hidden = self.backbone(ids, mask, cu_seqlens, prefix_lengths, context=context, token_types=token_types)
        if self.lm_head is None:
            return linear_cross_entropy(hidden, self.backbone.embedding.weight, targets)
        # The bias as the weights of a feature that is always 1.
        weight = torch.cat([self.lm_head.weight, self.lm_head.bias[:, None]], 1)
        return linear_cross_entropy(F.pad(hidden, (0, 1), value=1.0), weight, targets)

    @property
    def splits_context(self) -> bool:
        """Whether several processes can hold each sequence together."""
        return all(block.mixer.splits_context for block in self.backbone.blocks)

    def compile_blocks(self) -> None:
        """Have torch.compile make each block faster, in place: parameters keep their names.

        All blocks being alike, the first one is compiled and the others share its code. That happens at the first call.
        """
        for block in self.backbone.blocks:
            block.compile()

    def recompute_blocks(self) -> None:
        """Let the backward pass recompute each block from its input, the only tensor that is kept (activation checkpointing).

        It takes about a third more time, and memory for the activations of one block instead of those of all. Gradients stay
        the same, dropout included; parameters keep their names.
        """
        self.backbone.recompute = True

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden vectors [..., d] -> logits [..., V]."""
        if self.lm_head is None:
            return dense(hidden, self.backbone.embedding.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits


class CausalLM(LanguageModel):
    """A causal language model, with task "prefix-lm" one that reads prefixes: the logits at a token predict the next one."""

    _compiled_step: CompiledStep | None = None

    def init_state(self, batch_size: int) -> BackboneState:
        """The state before the first token of `batch_size` streams."""
        return self.backbone.init_state(batch_size)

    def extend(self, ids: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        """Continue streams by N tokens: ids [B, N] -> logits [B, N, V], and the state after them."""
        hidden, state = self.backbone.extend(ids, state)
        return self.logits(hidden), state

    def read_prefix(self, ids: Tensor) -> tuple[Tensor, BackboneState]:
        """Begin streams with a prefix whose tokens read each other in both directions; `extend` and `step` continue causally.

        Args:
            ids: [B, N] token ids.

        Returns:
            Logits [B, N, V], those of `forward` with N as all prefix lengths, and the state after the prefix.

        Raises:
            LineartimeError: if the mixer can read no prefix.
        """
        hidden, state = self.backbone.read_prefix(ids)
        return self.logits(hidden), state

    @property
    def steps_in_place(self) -> bool:
        """Whether `step` computes streams at different positions at once, in memory that stays where it is, as FLASH does.

        Others compute the streams of each position at once, one group after another, and their memory may grow.
        """
        return self.backbone.steps_in_place

    @property
    def steps_in_native(self) -> bool:
        """Whether one function in C++ computes the `step` of few streams, from the first block to the last."""
        return self.backbone.steps_in_native

    def join_streams(self, states: Sequence[BackboneState]) -> JoinedStates:
        """Bring streams that stand at different positions together, to continue them token by token with `step`.

        Args:
            states: as `extend` returns them, of one or more streams each; they stay as they are.

        Raises:
            ArgumentError: for states of another model.
        """
        return self.backbone.join_streams(states)

    def compile_step(self) -> None:
        """Have torch.compile make `step` faster, in place, if this model `steps_in_place`; the first step compiles it.

        That takes as long as some thousand steps, less if PyTorch finds the code on disk. Other numbers of streams are compiled
        anew. Where the model `steps_in_native`, it is slower than it was.
        """
        if self.steps_in_place:
            self._compiled_step = compiled_step()

    def step(self, ids: Tensor, streams: JoinedStates) -> Tensor:
        """Continue joined streams by a token: ids [B, 1] -> logits [B, 1, V]; `streams` is brought up to date in place."""
        if self._compiled_step is None or isinstance(streams, GroupedStreams):
            return self.logits(self.backbone.step(ids, streams))
        self.backbone.check_step(ids, streams)
        return self._compiled_step(self, ids, streams)


class MaskedLM(LanguageModel):
    """A masked language model: the logits at a masked token predict the token that was masked."""


def build_model(config: ModelConfig) -> CausalLM | MaskedLM:
    """The model that a config describes, freshly initialised."""
    return MaskedLM(config) if config.task == "mlm" else CausalLM(config)


Kind = TypeVar("Kind", bound=LanguageModel)


def check_model(model: object, kind: type[Kind], action: str, computes: bool = True) -> Kind:
    """The model, if it is of a kind and, where it computes, has the same logits every time.

    Args:
        model: what a caller gave.
        kind: `LanguageModel`, `CausalLM` or `MaskedLM`.
        action: what it is needed for, after "cannot".
        computes: whether it is needed to compute logits.

    Raises:
        ArgumentError: for anything else, a model of another task, or one in training mode whose dropout would be at work.
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(inner, LanguageModel):
        raise ArgumentError(
            "model", f"is of type {type(model).__name__}, but must be a language model, as lineartime.load returns it."
        )
    if not isinstance(inner, kind):
        found, task = ("masked", "clm") if isinstance(inner, MaskedLM) else ("causal", "mlm")
        raise ArgumentError(
            "model", f"is a {found} language model, which cannot {action}: train one with ", Argument("task", task), "."
        )
    if computes and inner.training and inner.config.dropout > 0:
        raise ArgumentError("model", "is in training mode, in which dropout changes its logits: call model.eval() first.")
    return inner
