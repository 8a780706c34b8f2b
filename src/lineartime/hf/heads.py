"""The models with a head: causal and masked language models, and those for fine-tuning, with a small head.

The heads of transformers' own `modeling_layers` read the last token, and take the mean of each batch as the loss: these do not.

Shapes: B batch, T tokens, V vocabulary, K labels, d model width.
"""

from collections.abc import MutableMapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from lineartime.checkpoint import all_finite
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.hf.cache import CACHE, LineartimeCache
from lineartime.hf.model import (
    LineartimeConfig,
    LineartimeModel,
    LineartimePreTrainedModel,
    check_labels,
    checked_mask,
    packed_boundaries,
    real_tokens,
)
from lineartime.ops.checks import require
from lineartime.ops.cross_entropy import IGNORED


class LanguageHead(LineartimePreTrainedModel):
    """A base model with an output layer, which shares the token embedding unless the configuration unties them."""

    masked = False
    """Whether the model is a masked one."""
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.backbone.embedding.weight"}

    def __init__(self, config: LineartimeConfig) -> None:
        if (config.task == "mlm") != self.masked:
            allowed, kind = ("'mlm'", "masked") if self.masked else ("'clm' or 'prefix-lm'", "causal")
            raise ArgumentError("task", f"is {config.task!r}, but must be {allowed} for a {kind} language model.")
        super().__init__(config)
        self.model = LineartimeModel(config)
        self.lm_head: nn.Module = nn.Linear(config.d_model, config.vocab_size, bias=not config.tie_word_embeddings)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LineartimeCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: LineartimeCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MaskedLMOutput:
        """Compute logits, and the loss if labels are given.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cache, kwargs: as for the base
                model.
            labels: [B, T], the tokens themselves; -100 is ignored. Of a causal model, each is predicted from the tokens before
                it, and those after padding and those of a prefix, which have been read already, are ignored.
            logits_to_keep: how many of the last tokens, or which places, to compute logits for; 0 for all.
        """
        cache = past_key_values if cache is None else cache
        outputs: BaseModelOutputWithPast = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, return_dict=True, **kwargs
        )
        places = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden = outputs.last_hidden_state
        logits = self.lm_head(hidden if isinstance(places, int) else hidden[:, places])
        loss = None
        if labels is not None:
            if logits.shape[1] != hidden.shape[1]:
                raise ArgumentError("logits_to_keep", "leaves out tokens, but labels need the logits of all: leave it out.")
            check_labels(labels, logits)
            if not self.masked:
                labels = _predicted(labels, attention_mask, position_ids=position_ids, **kwargs)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        found: dict[str, Any] = {"loss": loss, "logits": logits, "hidden_states": outputs.hidden_states}
        return MaskedLMOutput(**found) if self.masked else CausalLMOutputWithPast(**found, **{CACHE: outputs.get(CACHE)})


class LineartimeForCausalLM(LanguageHead, GenerationMixin):  # type: ignore[misc]  # transformers has no types here
    """A causal language model: the logits at a token predict the next one."""

    _is_stateful = True  # so that transformers refuses assisted decoding, which takes tokens back

    def targets(self, batch: MutableMapping[str, Any]) -> Tensor | None:
        """The labels of tokens that are predicted, [B, T]. They replace those of the batch, which label smoothing reads."""
        if isinstance(batch.get("labels"), Tensor):
            if isinstance(batch.get("input_ids"), Tensor):
                check_labels(batch["labels"], batch["input_ids"][..., None])
            inputs = {name: batch[name] for name in batch if name not in ("labels", "attention_mask")}
            batch["labels"] = _predicted(batch["labels"], batch.get("attention_mask"), **inputs)
        return super().targets(batch)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """Create a cache, unless one is given or caching is disabled. Raises ArgumentError for what a state cannot do."""
        unfit = {"cache_implementation": generation_config.cache_implementation is not None}
        if self.config.task == "prefix-lm":
            unfit["use_cache"] = not generation_config.use_cache
            unfit["prefill_chunk_size"] = getattr(generation_config, "prefill_chunk_size", None) is not None
            unfit["guidance_scale"] = generation_config.guidance_scale not in (None, 1)  # its prompt would be read causally
        for name in (name for name, given in unfit.items() if given):
            what = "which has a cache of its own, into which a prefix is read at once, in both directions"
            raise ArgumentError(name, f"does not suit a model of task {self.config.task!r}, {what}: leave it out.")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not (mask.shape[1] and bool(mask[:, -1:].all())):
            what = "has padding at the end of a prompt, where it is continued: pad on the left, and begin an empty prompt with"
            raise ArgumentError("attention_mask", f"{what} the end-of-document token, eos_token.")
        given = model_kwargs.pop("cache", None)
        cache = model_kwargs.pop("past_key_values", None) if given is None else given
        if cache is None:
            if generation_config.use_cache:
                model_kwargs[CACHE] = LineartimeCache()
            return
        past = cache.get_seq_length()
        width = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if past and not generation_config.use_cache:
            raise ArgumentError("use_cache", f"is False, but {CACHE} has read {past} tokens: leave out one of the two.")
        if past and width is not None and width <= past:  # of the mask, which always covers the tokens that the cache has read
            what = f"has read {past} tokens, but the prompt or its attention_mask covers only {width}: give all tokens"
            raise ArgumentError(CACHE, f"{what}, or the new ones with a mask of all, at least one more than it has read.")
        cache._is_user_defined = True
        model_kwargs[CACHE] = cache

    def _update_model_kwargs_for_generation(self, outputs: Any, *arguments: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers, after each token. Raises LineartimeError for logits that are not finite: any would be drawn."""
        if not all_finite(outputs.logits[:, -1]):
            raise LineartimeError("The logits are not finite: restore the weights of the model, or train it with a lower rate.")
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, *arguments, **kwargs)
        return updated

    def prepare_inputs_for_generation(  # transformers inspects the names of these arguments
        self, input_ids: Tensor, *arguments: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments of the next call, without positions, which the model computes itself."""
        kwargs.pop("position_ids", None)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, *arguments, inputs_embeds=inputs_embeds, **kwargs
        )
        cache: LineartimeCache | None = inputs.get(CACHE)
        if cache is not None:
            inputs["past_key_values"] = cache  # where PEFT looks whether a learned prompt was read, with every transformers
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        if not tokens.shape[1]:
            raise ArgumentError("input_ids", "has no tokens: begin an empty prompt with the end-of-document token, eos_token.")
        if self.config.task == "prefix-lm" and cache is not None and cache.get_seq_length() == 0:
            inputs["prefix_lengths"] = real_tokens(inputs.get("attention_mask"), tokens).sum(1)
        return inputs


class LineartimeForMaskedLM(LanguageHead):
    """A masked language model: the logits at a masked token predict the token that was masked."""

    masked = True


def _predicted(labels: Tensor, mask: Tensor | None, **inputs: Any) -> Tensor:
    """Labels [B, T] without those of tokens after padding, and of tokens in prefixes; `inputs` as for the model."""
    mask = None if mask is None else checked_mask(mask, labels, mask.shape[-1] - labels.shape[1])
    if mask is not None:
        labels = labels.masked_fill(~F.pad(mask[:, :-1], (1, 0), value=True), IGNORED)
    prefix_lengths = inputs.get("prefix_lengths")
    if prefix_lengths is None:
        return labels
    prefix_lengths = prefix_lengths.to(labels.device)
    boundaries = packed_boundaries(mask, labels, **inputs)
    if boundaries is None:
        return labels.masked_fill(real_tokens(mask, labels).cumsum(1) <= prefix_lengths[:, None], IGNORED)
    length, boundaries = labels.shape[1], boundaries.to(labels.device)
    starts, prefixes = (x.repeat_interleave(boundaries.diff(), output_size=length) for x in (boundaries[:-1], prefix_lengths))
    return labels.masked_fill(torch.arange(length, device=labels.device) - starts < prefixes, IGNORED)


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
    """Predicts a label or a number for each sequence: from the mean of its tokens, or, in a causal model, from the last.

    A configuration with `pooling` "first", "last" or "mean" says otherwise.
    """

    output = SequenceClassifierOutput

    def targets(self, batch: MutableMapping[str, Any]) -> Tensor | None:
        """The labels; among numbers, -100 counts as any other."""
        labels = super().targets(batch)
        return torch.zeros_like(labels) if isinstance(labels, Tensor) and labels.is_floating_point() else labels

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """One vector per sequence, [B, T, d] -> [B, d]: the mean over its real tokens, its last or its first one.

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
        pooling = self.config.pooling or ("mean" if self.config.task == "mlm" else "last")
        if pooling == "mean":
            return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = torch.where(real, places, 0).amax(1)
        place = last if pooling == "last" else torch.where(real, places, last[:, None]).amin(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), place]

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
