"""The configuration and the base model: embedding, blocks and norm of lineartime, with the interface of transformers.

Shapes: B batch, T tokens, P tokens read before, D documents, d model width.
"""

import dataclasses
import sys
from collections.abc import MutableMapping
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from lineartime.checkpoint import all_finite
from lineartime.choices import VOCAB_SIZE, Task
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.hf.cache import CACHE, LineartimeCache
from lineartime.layers.residual import ResidualLayer, check_tokens
from lineartime.models.backbone import Backbone
from lineartime.models.config import ModelConfig
from lineartime.models.systems import resolve
from lineartime.ops.checks import as_mask, require

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
"""The fields of a `ModelConfig`. This configuration has them under the same names, with layers as plain dictionaries."""
_DEFAULT: dict[str, Any] = {"task": "clm", "vocab_size": VOCAB_SIZE, "d_model": 768, "n_blocks": 12, "mixer": {"kind": "flash"}}


class LineartimeConfig(PreTrainedConfig):  # type: ignore[misc] # transformers makes it a dataclass
    """Describes the same models as a `ModelConfig`: every system of lineartime, at any size.

    The default is FLASH with 12 blocks of width 768. `from_preset` and `from_model_config` create others.

    Raises:
        ArgumentError: for fields that do not describe a model, and for an option of a layer outside `mixer` and `feed_forward`.
    """

    model_type: ClassVar[str] = "lineartime"
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "d_model", "num_hidden_layers": "n_blocks"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    auto_map: ClassVar[dict[str, str]] = {}  # where TRL looks up the Auto class of a model that transformers itself has not

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pooling: str | None = None
    """What a label of a sequence is predicted from: "first", "last" or "mean" of its tokens; None for the default."""

    def __post_init__(self, **others: Any) -> None:
        given = {self.attribute_map.get(name, name): value for name, value in others.items()}
        config = ModelConfig.from_dict({**_DEFAULT, **{name: given.pop(name) for name in FIELDS if name in given}})
        # Store all options of the layers, so that a later version with other defaults builds the same model.
        for name, value in {"pattern": [], **config.to_dict()}.items():
            setattr(self, name, value)
        if self.pooling not in (None, "first", "last", "mean"):
            raise ArgumentError("pooling", f"is {self.pooling!r}, but must be 'first', 'last', 'mean' or None.")
        super().__post_init__(**given)
        # Transformers keeps unknown arguments as attributes, and files of earlier versions may hold some.
        known = (PreTrainedConfig, GenerationConfig())
        for name in given if "model_type" not in given else ():
            if not any(hasattr(each, name) for each in known):
                what = f"is {given[name]!r}, but no field of this model has that name: its fields are {', '.join(FIELDS)}"
                raise ArgumentError(name, f"{what}; options of layers stand in mixer and feed_forward.")

    def to_model_config(self) -> ModelConfig:
        """The configuration that `lineartime.build` takes."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @classmethod
    def from_model_config(cls, config: ModelConfig, **others: Any) -> "LineartimeConfig":
        """The same model as a configuration of transformers; `others` are fields of transformers, such as eos_token_id."""
        return cls(**config.to_dict(), **others)

    @classmethod
    def from_preset(cls, preset: str, task: Task = "clm", **overrides: Any) -> "LineartimeConfig":
        """The configuration of a preset, with the arguments of `lineartime.build`."""
        return cls.from_model_config(resolve(preset, task, **overrides))


class LineartimePreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # transformers has no types here
    """The base class of all lineartime models in transformers."""

    config: LineartimeConfig
    config_class = LineartimeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Backbone"]  # streaming bypasses the hooks of accelerate in its blocks
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache"]

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """As in transformers.

        Raises ArgumentError if device_map splits the model or leaves it on disk, and LineartimeError for weights not finite.
        """
        _check_places(options.get("device_map"))  # before transformers fails on parts that stay on disk
        loaded = super().from_pretrained(*arguments, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _check_places(getattr(model, "hf_device_map", None))
        for name, weight in model.state_dict().items():  # not in forward, which a graph or shards may hold
            if weight.is_floating_point() and not weight.is_meta and not all_finite(weight):
                what = f"{model.name_or_path} holds numbers that are not finite in {name}"
                raise LineartimeError(f"{what}: restore it from a copy.")
        return loaded

    @property
    def accepts_loss_kwargs(self) -> bool:
        """True: losses are sums, divided by `num_items_in_batch`. `Trainer` asks for this, and then counts `targets`."""
        _let_trainer_count_targets()
        return True

    def targets(self, batch: MutableMapping[str, Any]) -> Tensor | None:
        """The labels by whose number the loss of a batch is divided, but for those that are -100; None if there are none."""
        return batch.get("labels")

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        # PEFT 0.21 merges an adapter of tied layers into both of them; it warns of those layers that it knows by name.
        peft = sys.modules.get("peft.utils.constants")
        if peft is not None and "embedding" not in peft.EMBEDDING_LAYER_NAMES:
            peft.EMBEDDING_LAYER_NAMES.append("embedding")
        embedding: nn.Module = self.base_model.backbone.embedding
        return embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.base_model.backbone.embedding = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's own parameters as lineartime does, except those that were loaded."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        loaded = [(tensor, tensor.clone()) for tensor in own if getattr(tensor, "_is_hf_initialized", False)]
        if isinstance(module, ResidualLayer):
            module.init_own()  # submodules are visited separately
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif type(module) is nn.Linear:  # the layer of a head
            super()._init_weights(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        for tensor, value in loaded:
            tensor.copy_(value)


def _let_trainer_count_targets() -> None:
    """Let `Trainer` count the targets of a step, by which losses of accumulated batches are divided, by the method `targets`.

    By itself it counts labels, also of tokens that no token predicts, because padding or a prefix is before them, and none of
    a model for questions. Only `Trainer` knows all batches of a step, so a model cannot correct its count.
    """
    from transformers import Trainer  # which takes a second to import, and is imported already if it asks for this

    count = getattr(Trainer, "_get_num_items_in_batch", None)  # private, so that a later version may count elsewhere
    if count is None or hasattr(count, "of_lineartime"):
        return

    @wraps(count)
    def count_own(trainer: Any, batches: list[Any], device: Any) -> Any:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        if isinstance(model, LineartimePreTrainedModel) and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
            batches = [
                {"labels": model.targets(batch)} if isinstance(batch, MutableMapping) and "shift_labels" not in batch else batch
                for batch in batches
            ]
        return count(trainer, batches, device)

    count_own.of_lineartime = True  # type: ignore[attr-defined]
    Trainer._get_num_items_in_batch = count_own


class LineartimeModel(LineartimePreTrainedModel):
    """Computes the hidden vectors of tokens, for any task and system; see `forward`."""

    def __init__(self, config: LineartimeConfig) -> None:
        super().__init__(config)
        self.backbone = Backbone(config.to_model_config())
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the backward pass recomputes each block, as transformers asks for activation checkpointing."""
        return self.backbone.recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.backbone.recompute = enable

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers has no types here
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LineartimeCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: LineartimeCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read whole sequences, or continue the streams of a cache.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for real tokens; padding may be anywhere. With a cache, also [B, past + T].
            position_ids: [1, T], which start at 0 in each document of a packed row. Otherwise, they are not needed. They are
                ignored with a cache that has read tokens.
            past_key_values: the earlier name of `cache` in transformers.
            inputs_embeds: [B, T, d], to be used instead of the ids.
            use_cache: whether to create a cache if none is given; by default, none is created.
            output_hidden_states: whether to return the input of each block, followed by last_hidden_state.
            cu_seq_lens_q: int [D + 1], the boundaries of D documents packed into a single row.
            prefix_lengths: int [B], for a model of task "prefix-lm": how many first tokens are read bidirectionally.
            token_type_ids: int [B, T], for a model with token types; ignored by other models. With a cache, they must be 0.
            seq_idx: int [1, T], the number of the document that each token of a packed row belongs to.
            cache: the cache whose streams to continue; it is updated unless use_cache is False.
            **kwargs: ignored, except output_attentions, which must not be True, nor be set in the configuration.

        Raises:
            ArgumentError: for arguments that do not fit each other or the model.
        """
        asked = kwargs.get("output_attentions")
        if self.config.output_attentions if asked is None else asked:
            what = "is True, but these models do not compute attention matrices that could be returned."
            raise ArgumentError("output_attentions", what)
        backbone = self.backbone
        if input_ids is not None and inputs_embeds is None:
            backbone.check_ids(input_ids, "input_ids")
            embedded: Tensor = backbone.embedding(input_ids)
        elif input_ids is None and inputs_embeds is not None:
            check_tokens("inputs_embeds", inputs_embeds, "[B, T, d_model]", self.config.d_model, backbone.embedding, backbone)
            embedded = inputs_embeds
        else:
            raise ArgumentError("input_ids", "and inputs_embeds are both given or both missing, but one of them is needed.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        every: list[Tensor] | None = [] if output_hidden_states else None
        types = token_type_ids if self.config.token_types else None
        cache = past_key_values if cache is None else cache
        if self.config.task == "mlm" and (cache is not None or use_cache):
            name = "use_cache" if cache is None else CACHE
            raise ArgumentError(name, "is given, but a masked language model is bidirectional and cannot continue a text.")
        if cache is not None and not isinstance(cache, LineartimeCache):
            raise ArgumentError(CACHE, f"is a {type(cache).__name__}, but must be a LineartimeCache, as a model returns it.")
        if cache is not None and use_cache is False:
            cache = cache.copy()
        elif cache is None and use_cache:
            cache = LineartimeCache()
        past = 0 if cache is None else cache.get_seq_length()
        mask = checked_mask(attention_mask, embedded, past)
        cu_seq_lens_q = packed_boundaries(mask, embedded, cu_seq_lens_q, None if past else position_ids, seq_idx)
        if cache is None:
            hidden = backbone.read(embedded, mask, cu_seq_lens_q, prefix_lengths, inputs=every, token_types=types)
        else:
            if cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
                raise ArgumentError("use_cache", "is True, but the row holds several documents: give each a row of its own.")
            if types is not None and bool(types.any()):
                what = "has types other than 0, but with a cache all tokens are of type 0: leave out the cache."
                raise ArgumentError("token_type_ids", what)
            if prefix_lengths is not None:
                tokens = real_tokens(mask, embedded).sum(1)
                if past or not torch.equal(prefix_lengths.to(tokens), tokens):
                    what = f"is {prefix_lengths.tolist()}, but a cache that has read {past} tokens"
                    wanted = f"takes a prefix first and whole: read {tokens.tolist()} of the rows, then the rest."
                    raise ArgumentError("prefix_lengths", f"{what} {wanted}")
            hidden = cache.extend(backbone, embedded, mask, prefix=prefix_lengths is not None, inputs=every)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=None if every is None else (*every, hidden),
            **{CACHE: cache if use_cache is not False else None},
        )


def _check_places(device_map: Any) -> None:
    places = sorted({str(place) for place in device_map.values()}) if isinstance(device_map, dict) else []
    if len(places) > 1 or "disk" in places:
        where = " and ".join(places)
        raise ArgumentError("device_map", f"puts parts of the model on {where}, but it must be on one device: name one.")


# The arguments of transformers that describe a batch ---------------------------------------------------------------------


def checked_mask(attention_mask: Tensor | None, embedded: Tensor, past: int = 0) -> Tensor | None:
    """The mask of the new tokens, bool [B, T]; None if all tokens of `embedded` [B, T, d] are real.

    The given mask may also cover the `past` tokens of a cache, [B, P + T].
    """
    if attention_mask is None:
        return None
    batch, length = embedded.shape[:2]
    if past and attention_mask.shape[1:] == (past + length,):
        attention_mask = attention_mask[:, past:]
    if attention_mask.is_floating_point():  # some collators make float masks
        binary = (attention_mask == 0) | (attention_mask == 1)
        require(binary, "attention_mask", "has values other than 0 and 1, but must be 1 for real tokens and 0 for padding.")
        attention_mask = attention_mask != 0
    mask = as_mask("attention_mask", attention_mask, batch, length, embedded.device)
    if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
        return None  # rows without padding are read faster
    return mask


def real_tokens(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Which tokens [B, T, ...] are real, bool [B, T]; without a mask, all are."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise ArgumentError unless there is a label for each of the logits [B, T, V].

    Losses flatten both, so that labels [T, B] would be compared with the logits of other tokens.
    """
    if labels.shape != logits.shape[:-1]:
        shape, wanted = list(labels.shape), list(logits.shape[:-1])
        raise ArgumentError("labels", f"has shape {shape}, but must be [B, T] = {wanted}, one for each token.")


def packed_boundaries(
    mask: Tensor | None,
    embedded: Tensor,
    /,  # `_` may hold arguments of these names
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The boundaries, int64 [D + 1], of documents packed into one row, from whichever argument gives them; None if none does.

    A document begins where its position is 0, or where the index of the sequence changes.

    Raises:
        ArgumentError: for positions that differ from those that the model computes itself, or documents that are not alone in
            a single row without padding.
    """
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q
    batch, length = embedded.shape[:2]
    for name, given in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if given is None:
            continue
        if given.dim() != 2 or given.shape[1] != length or given.shape[0] not in (1, batch):
            raise ArgumentError(name, f"has shape {list(given.shape)}, but must be [B, T] = [{batch}, {length}].")
        if name == "position_ids":
            place = torch.arange(length, device=given.device)
            begins, counted = given[0] == 0, place if mask is None else (mask.cumsum(1) - 1) * mask
            is_document = bool(((given if mask is None else given * mask) == counted).all())
            fits = bool((given[0] == place - torch.where(begins, place, 0).cummax(0).values).all())
        else:
            changes, fits = given.diff(dim=1) != 0, True
            begins, is_document = F.pad(changes[0], (1, 0), value=True), not bool(changes.any())
        if is_document:
            continue
        if batch > 1 or mask is not None or not fits:
            what = "is not that of one document in each row, or of several packed into a single unpadded row"
            raise ArgumentError(name, f"{what}: leave it out, or pack one row.")
        return F.pad(begins.nonzero()[:, 0], (0, 1), value=length)
    return None
