"""Models for fine-tuning: a base model with a small head.

Those of transformers' own `modeling_layers` do not fit: they read the last token, and take the mean of each batch as the loss.

Shapes: B batch, T tokens, K labels, d model width.
"""

from collections.abc import MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from lineartime.errors import ArgumentError
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.model import (
    LineartimeModel,
    LineartimePreTrainedModel,
    check_labels,
    checked_mask,
    packed_boundaries,
    real_tokens,
)
from lineartime.ops.checks import require
from lineartime.ops.cross_entropy import IGNORED


class TaskModel(LineartimePreTrainedModel):
    """A base model, dropout, and a linear layer, which predicts a label for each token."""

    output: ClassVar[type[Any]] = TokenClassifierOutput

    head = "score"
    """The name of the linear layer, which PEFT looks up by task to train and save it."""
    outputs: ClassVar[int | None] = None
    """The features of the linear layer; None for one for each label."""

    def __init__(self, config: LineartimeConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LineartimeModel(config)
        self.dropout = nn.Dropout(config.dropout)
        setattr(self, self.head, nn.Linear(config.d_model, self.outputs or config.num_labels))
        self.post_init()

    def logits(self, vectors: Tensor) -> Tensor:
        """The linear layer of vectors [..., d], in the precision of its weights also under autocast.

        A layer that predicts numbers adds their mean, whose last digits bf16 would round away.
        """
        layer = getattr(self, self.head)
        dtype = next(layer.parameters()).dtype
        vectors = self.dropout(vectors)
        with torch.autocast(vectors.device.type, enabled=False):
            logits: Tensor = layer(vectors.to(dtype) if dtype.is_floating_point else vectors)
        return logits

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput | SequenceClassifierOutput:
        """Logits [B, T, K] or, pooled, [B, K], and the loss if labels are given; other arguments as for the base model.

        Of tokens, labels [B, T] of -100 are ignored.
        """
        read: BaseModelOutputWithPast = self.model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.logits(self.pooled(read.last_hidden_state, attention_mask, **kwargs))
        loss = None if labels is None else self.loss(logits, labels, **kwargs)
        return self.output(loss=loss, logits=logits, hidden_states=read.hidden_states)

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """The vectors that have a label: [B, T, d], those of all tokens."""
        return hidden

    def loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The loss of labels for all of the logits."""
        check_labels(labels, logits)
        loss: Tensor = self.loss_function(logits, labels, self.config, **kwargs)
        return loss


class LineartimeForTokenClassification(TaskModel):
    """Predicts a label for each token."""


class LineartimeForSequenceClassification(TaskModel):
    """Predicts a label or a number for each sequence: from the mean of its tokens, or, in a causal model, from the last."""

    output = SequenceClassifierOutput

    def targets(self, batch: MutableMapping[str, Any]) -> Tensor | None:
        """The labels; among numbers, -100 counts as any other."""
        labels = super().targets(batch)
        return torch.zeros_like(labels) if isinstance(labels, Tensor) and labels.is_floating_point() else labels

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """One vector per sequence, [B, T, d] -> [B, d]: the mean over its real tokens, or, in a causal model, the last one.

        Raises:
            ArgumentError: for rows without tokens, or a row that the other arguments divide into several documents.
        """
        mask = checked_mask(attention_mask, hidden)
        boundaries = packed_boundaries(mask, hidden, **kwargs)
        if boundaries is not None and len(boundaries) > 2:
            what = f"is a row of {len(boundaries) - 1} documents, but a row has one label: give each a row of its own."
            raise ArgumentError("input_ids", what)
        real = real_tokens(mask, hidden)
        argument = "input_ids" if attention_mask is None else "attention_mask"
        require(real.any(1), argument, "has a row without tokens, but a label needs at least one token to read.")
        if self.config.task == "mlm":
            return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        last = torch.where(real, torch.arange(hidden.shape[1], device=hidden.device), 0).amax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]

    def loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The loss of the labels, by the `problem_type` of the configuration."""
        loss: Tensor = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        count = kwargs.get("num_items_in_batch")
        if count is not None and self.config.problem_type != "single_label_classification":
            loss = loss * labels.numel() / count  # of these labels, transformers always takes the mean
        return loss


class LineartimeForQuestionAnswering(TaskModel):
    """Predicts where the answer to a question begins and ends in a text."""

    head = "qa_outputs"
    outputs = 2

    def targets(self, batch: MutableMapping[str, Any]) -> Tensor | None:
        """The positions of beginnings and ends in one, [2 B]."""
        start, end, tokens = batch.get("start_positions"), batch.get("end_positions"), batch.get("input_ids")
        tokens = batch.get("inputs_embeds") if tokens is None else tokens
        if start is None or end is None or tokens is None:
            return None
        return _answers(start, end, real_tokens(checked_mask(batch.get("attention_mask"), tokens), tokens))

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Logits [B, T] of beginning and end, and the loss if both positions [B] are given; others as for the base model.

        The loss is the mean over all positions; those outside of the real tokens are ignored. Padding does not change it.
        """
        read: BaseModelOutputWithPast = self.model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        start, end = self.logits(read.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            real = real_tokens(checked_mask(attention_mask, start), start)
            places = _answers(start_positions.to(real.device), end_positions.to(real.device), real)
            scores = torch.cat([start, end]).masked_fill(~real.repeat(2, 1), torch.finfo(start.dtype).min)
            loss = fixed_cross_entropy(scores, places, kwargs.get("num_items_in_batch"))
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end, hidden_states=read.hidden_states)


def _answers(start: Tensor, end: Tensor, real: Tensor) -> Tensor:
    """Positions of beginnings [B] and ends [B] in one, [2 B], with -100 for those that are not of real tokens [B, T]."""
    places = torch.cat([start.flatten(), end.flatten()])
    inside = real.repeat(2, 1).gather(1, places.clamp(0, real.shape[1] - 1)[:, None])[:, 0]
    return places.masked_fill(~inside | (places < 0) | (places >= real.shape[1]), IGNORED)
