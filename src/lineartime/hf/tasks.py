"""Models for fine-tuning: a base model with a small head.

Shapes: B batch, T tokens, C choices, K labels, d model width.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from lineartime.errors import ArgumentError
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.inputs import check_labels, checked_mask, packed_boundaries
from lineartime.hf.model import LineartimeModel, LineartimePreTrainedModel
from lineartime.ops.checks import require


class TaskModel(LineartimePreTrainedModel):
    """A base model, dropout, and a linear layer."""

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

    def run_backbone(self, input_ids: Tensor | None, attention_mask: Tensor | None, **kwargs: Any) -> BaseModelOutputWithPast:
        """The outputs of the base model."""
        kwargs.pop("use_cache", None)
        outputs: BaseModelOutputWithPast = self.model(input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)
        return outputs

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """One vector per sequence, [B, T, d] -> [B, d]: the mean over its real tokens, or, in a causal model, the last one.

        Raises:
            ArgumentError: for rows without tokens, or a row that the other arguments divide into several documents.
        """
        if hidden.shape[1] == 0:
            raise ArgumentError(
                "input_ids", f"has shape {list(hidden.shape[:2])}, but a label needs at least one token to read."
            )
        mask = checked_mask(attention_mask, hidden)
        boundaries = packed_boundaries(
            kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), kwargs.get("seq_idx"), mask, hidden
        )
        if boundaries is not None and len(boundaries) > 2:
            raise ArgumentError(
                "input_ids",
                f"is a row of {len(boundaries) - 1} documents, but a row has one label: give each a row of its own.",
            )
        real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device) if mask is None else mask
        require(real.any(1), "attention_mask", "has a row without tokens, but a label needs at least one token to read.")
        if self.config.task == "mlm":
            return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        last = torch.where(real, torch.arange(hidden.shape[1], device=hidden.device), 0).amax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]


class LineartimeForSequenceClassification(TaskModel):
    """Predicts a label or a number for each sequence: from the mean of its tokens, or, in a causal model, from the last."""

    accepts_loss_kwargs = False  # the losses of numbers and of several labels are means, as in multiple choice

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits [B, K], and the loss if labels are given; other arguments as for the base model."""
        outputs = self.run_backbone(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.score(self.dropout(self.pooled(outputs.last_hidden_state, attention_mask, **kwargs)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class LineartimeForTokenClassification(TaskModel):
    """Predicts a label for each token."""

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits [B, T, K], and the loss if labels [B, T] are given (-100 is ignored); others as for the base model."""
        outputs = self.run_backbone(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_labels(labels, logits)
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class LineartimeForQuestionAnswering(TaskModel):
    """Predicts where the answer to a question begins and ends in a text."""

    head = "qa_outputs"
    outputs = 2

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path | None, *arguments: Any, **options: Any) -> Any:
        """As for all models; the layer `score` of folders of earlier versions becomes `qa_outputs`."""
        options.setdefault("key_mapping", {r"^score\.": "qa_outputs."})
        return super().from_pretrained(pretrained_model_name_or_path, *arguments, **options)

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Logits [B, T] of beginning and end, and the loss if both positions [B] are given; others as for the base model."""
        outputs = self.run_backbone(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        start, end = self.qa_outputs(self.dropout(outputs.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end, hidden_states=outputs.hidden_states)


class LineartimeForMultipleChoice(TaskModel):
    """Scores several texts, one of which is the right choice."""

    accepts_loss_kwargs = False  # the loss is a mean, so `Trainer` has to divide it by its accumulated steps
    outputs = 1

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Logits [B, C] for ids and mask [B, C, T], and the loss if labels [B] are given; others as for the base model."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if not isinstance(given, Tensor) or given.dim() < 3:
            raise ArgumentError("input_ids", "must be [B, C, T]: for each example, the tokens of each choice.")
        choices = given.shape[1]
        ids, mask, embedded = (None if x is None else x.flatten(0, 1) for x in (input_ids, attention_mask, inputs_embeds))
        for name in ("token_type_ids", "position_ids", "seq_idx"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].flatten(0, 1)
        outputs = self.run_backbone(ids, mask, inputs_embeds=embedded, **kwargs)
        pooled = self.pooled(outputs.last_hidden_state, mask, **kwargs)
        logits = self.score(self.dropout(pooled)).view(-1, choices)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
