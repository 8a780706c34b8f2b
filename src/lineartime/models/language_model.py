"""Language models: a backbone with an output layer, causal or masked.

Shapes: B batch, T tokens, N new tokens of a stream, V vocabulary, d model width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import count
from typing import Any, Literal, TypedDict, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, LineartimeError, check_choice
from lineartime.host import use_large_pages
from lineartime.layers.dense import Dense, dense, is_untouched, quantized
from lineartime.models.backbone import Backbone, ModelState
from lineartime.models.config import ModelConfig
from lineartime.models.decoder import MAX_STREAMS, NativeDecoder, is_modified, native_decoder
from lineartime.native import why_not_native
from lineartime.ops.checks import check_whole
from lineartime.ops.context import ContextGroup
from lineartime.ops.cross_entropy import IGNORED, linear_cross_entropy
from lineartime.ops.modes import has_plain_memory

Weights = Literal["own", "int8"]
MAX_STRUCTURES = 32
"""The structures of packs that a compiled block may be compiled for; 150 random packs had 14."""
_numbers = count()


class BatchOptions(TypedDict, total=False):
    """What describes the sequences of a batch: see `LanguageModel.forward`."""

    mask: Tensor | None
    cu_seqlens: Tensor | None
    prefix_lengths: Tensor | None
    context: ContextGroup | None
    token_types: Tensor | None


class LanguageModel(nn.Module):
    """A backbone and an output layer, tied to the token embedding or separate: ids [B, T] -> logits [B, T, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Dense(config.d_model, config.vocab_size)

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
        """Compute the logits of every token.

        Args:
            ids: [B, T] token ids.
            mask: [B, T], bool or integers 0 and 1, True for real tokens. Padding may be anywhere.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.
            prefix_lengths: int [B], or [D] with `cu_seqlens`, for a causal model: the number of first real tokens of each row,
                or document, that attend to each other bidirectionally. Later tokens attend causally.
            context: the processes that share every sequence (`context_group`). Each passes its own slice, in the order of
                ranks. Slices have equal lengths and consist of whole chunks, without masks, packed documents or prefixes.
                Each process gets its share of the parameters' gradients: summed over the processes, they are the gradient of
                the sum of the losses.
            token_types: int [B, T], for a model with token types; the default is 0 for all tokens.

        Returns:
            Logits [B, T, V].

        Raises:
            ArgumentError: if shapes do not match, or the mixer cannot split sequences over processes.
            LineartimeError: if there are prefixes and the mixer cannot read any.
        """
        check_whole("ids", ids)  # a backbone takes embedded tokens, too
        return self.logits(self.backbone(ids, mask, cu_seqlens, prefix_lengths, context=context, token_types=token_types))

    def loss(self, ids: Tensor, targets: Tensor, **batch: Unpack[BatchOptions]) -> Tensor:
        """Compute the mean cross-entropy over all targets, without holding the logits of all tokens in memory at once.

        An `lm_head` with an adapter or a hook is called, and then the logits are held.

        Args:
            ids: [B, T] token ids.
            targets: int [B, T], the tokens to predict; -100 where there is none.
            **batch: other arguments of the logits, by name.

        Returns:
            A scalar, in nats; zero if there are no targets.
        """
        return self.total_loss(ids, targets, **batch) / (targets != IGNORED).sum().clamp(min=1)

    def total_loss(self, ids: Tensor, targets: Tensor, **batch: Unpack[BatchOptions]) -> Tensor:
        """Compute the sum of the losses that `loss` averages, for callers that average over several batches."""
        check_whole("ids", ids)
        hidden = self.backbone(ids, **batch)
        check_whole("targets", targets)
        if targets.shape != ids.shape:
            raise ArgumentError("targets", f"has shape {list(targets.shape)}, but must have that of ids, {list(ids.shape)}.")
        if self.lm_head is None:
            return linear_cross_entropy(hidden, self.backbone.output_weight(hidden), targets)
        if not is_untouched(self.lm_head):  # with an adapter or a hook, for instance: the weights alone are not the map
            logits = self.lm_head(hidden).float().flatten(0, -2)
            return F.cross_entropy(logits, targets.flatten().long(), reduction="sum", ignore_index=IGNORED)
        # The bias becomes the weight of an additional feature that is always 1. Zeros align the rows for GPUs.
        zeros = (0, -(hidden.shape[-1] + 1) % 8)
        weight = F.pad(torch.cat([self.lm_head.weight, self.lm_head.bias[:, None]], 1), zeros)
        return linear_cross_entropy(F.pad(F.pad(hidden, (0, 1), value=1.0), zeros), weight, targets)

    @property
    def n_parameters(self) -> int:
        """The number of parameters; one that two parts share counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def splits_context(self) -> bool:
        """Whether several processes can share each sequence."""
        return all(block.mixer.splits_context for block in self.backbone.blocks)

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile, in place; parameters keep their names.

        Blocks with equal mixers share their code, so only the first is compiled. This happens at the first call,
        and again for packs of another structure, which only mixers without chunks have.
        """
        # By default, packs of a ninth structure would be read without the compiler. Older versions of PyTorch lack the option.
        allowed = "recompile_limit" in signature(torch.compile).parameters
        for block in self.backbone.blocks:
            block.compile(**({"recompile_limit": MAX_STRUCTURES} if allowed else {}))

    def recompute_blocks(self) -> None:
        """Recompute each block in the backward pass from its input, the only tensor that is kept (activation checkpointing).

        This takes about a third more time, and memory for the activations of one block instead of all blocks. Gradients stay
        the same, including dropout, and parameters keep their names.
        """
        self.backbone.recompute = True

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden vectors [..., d] to logits [..., V]."""
        if self.lm_head is None:
            return dense(hidden, self.backbone.output_weight(hidden))
        logits: Tensor = self.lm_head(hidden)
        return logits


class CausalLM(LanguageModel):
    """A causal language model: the logits at a token predict the next one. With task "prefix-lm", it also reads prefixes."""

    compiled_step: Callable[..., tuple[Tensor, ModelState]] | None = None
    """What decoding calls in place of `extend`: see `compile_step`."""
    decoded_weights: Weights = "own"
    """The matrices from which tokens are decoded: see `quantize`."""

    def init_state(self, batch_size: int) -> ModelState:
        """The state before the first token of `batch_size` streams."""
        return self.backbone.init_state(batch_size)

    def extend(self, ids: Tensor, state: ModelState | None = None, mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Continue streams, at any positions, by N tokens, or begin them without a state.

        Args:
            ids: [B, N] token ids.
            state: what `extend` returned. It is consumed: clone it before, to continue the same streams in another way, too.
            mask: [B, N], bool or integers 0 and 1, True for real tokens, as in prompts that are padded on the left.

        Returns:
            Logits [B, N, V], and the new state.

        Raises:
            ArgumentError: if shapes do not match, or the state is of another model.
        """
        check_whole("ids", ids)
        hidden, state = self.backbone.extend(ids, state, mask)
        return self.logits(hidden), state

    def read_prefix(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Start streams with a prefix whose tokens attend to each other bidirectionally; `extend` continues causally.

        Takes and returns what `extend` does without a state. Logits are those of `forward` with prefix lengths of N.

        Raises:
            LineartimeError: if the mixer cannot read prefixes.
        """
        check_whole("ids", ids)
        hidden, state = self.backbone.read_prefix(ids, mask)
        return self.logits(hidden), state

    def compile_for_decoding(self, weights: Weights | None = None) -> "Decoder":
        """Prepare to read streams token by token: `decoder.extend(tokens, state)`.

        On a CPU, a model of FLASH layers alone becomes one C++ function a token. It takes the weights, hooks and modules as
        they are now: after they change, call this again. `generate` does so by itself.

        Args:
            weights: "own", or "int8" for copies of the matrices in int8 with a factor for each row, of which a token reads a
                byte a weight. The model keeps its own, which read prompts: `quantize` rounds both. By default, what it did,
                and without C++ the model's own.

        Raises:
            ArgumentError: for "int8" where C++ does not decode this model.
        """
        chosen = self.decoded_weights if weights is None else weights
        check_choice("weights", chosen, get_args(Weights))
        is_plain = type(self) is CausalLM and self.compiled_step is None and not is_modified(self)
        native = native_decoder(self.backbone, self.lm_head, chosen == "int8") if is_plain else None
        if weights == "int8" and native is None:
            why = why_not_native() or "it decodes unmodified FLASH layers with the activation relu2 on a CPU"
            raise ArgumentError("weights", f"is int8, which only the decoder in C++ reads, but {why}: use 'own'.")
        if native is None:  # which has large pages
            use_large_pages((x.data_ptr(), x.nbytes) for x in self.parameters() if has_plain_memory(x))
        return Decoder(self, native)

    def quantize(self) -> None:
        """Round all matrices that a token reads to int8 with a factor for each row, in place, and decode from int8.

        Prompts, losses and what is saved have the rounded weights in the dtype of the model. Raises as `compile_for_decoding`.
        """
        self.compile_for_decoding("int8")
        for layer in decoded_layers(self):
            rounded, scale = quantized(layer.weight)
            layer.weight.data.copy_(rounded * scale[:, None])
        self.decoded_weights = "int8"

    def compile_step(self) -> None:
        """Let torch.compile compile decoding, in place, for models with a `constant_state`. The first token compiles it.

        Compilation takes as long as thousands of tokens, or less if PyTorch finds the code in its cache on disk. A different
        number of streams is compiled anew. A copy of the model is not compiled.
        """
        if not self.constant_state:
            return

        def step(model: CausalLM, ids: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
            return model.extend(ids, state)

        # PyTorch limits how often a code object is compiled, so each model gets its own. PyTorch also remembers the sizes
        # it has seen by the name of the code: under a shared name, sizes that differ between models would become dynamic.
        step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
        self.compiled_step = torch.compile(step, fullgraph=True)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: everything but compiled code, as for every module."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "compiled_step"}

    @property
    def constant_state(self) -> bool:
        """Whether a stream needs constant memory, and one token updates it in place, as in FLASH and linear attention."""
        return all(block.mixer.constant_state for block in self.backbone.blocks)


def decoded_layers(model: CausalLM) -> list[Any]:
    """The layers of a model of FLASH whose matrices a token reads."""
    layers = [getattr(block.mixer, name) for block in model.backbone.blocks for name in ("to_gate_value_base", "to_output")]
    return [model.backbone.embedding, *layers, *([] if model.lm_head is None else [model.lm_head])]


def read_token(model: CausalLM, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    """Read one more token of each stream by PyTorch, compiled if the model was told so: int64 [B] -> logits [B, V]."""
    ids, step = tokens[:, None], model.compiled_step
    logits, state = model.extend(ids, state) if step is None else step(model, ids, state)
    return logits[:, 0], state


@dataclass(frozen=True)
class Decoder:
    """A causal language model prepared for decoding; what `CausalLM.compile_for_decoding` returns."""

    model: CausalLM
    native: NativeDecoder | None  # its step as one C++ function, of the weights as they were; None where there is none

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Read one token of each stream, without a state its first: int64 [B] -> logits [B, V]; `state` is consumed."""
        state = self.model.init_state(len(tokens)) if state is None else state
        if self.native is not None and (0 < len(tokens) <= MAX_STREAMS or (self.native.int8 and len(tokens))):
            return self.native.logits(tokens.contiguous(), state), state
        return read_token(self.model, tokens, state)


class MaskedLM(LanguageModel):
    """A masked language model: the logits at a masked token predict the token that was masked."""


def build_model(config: ModelConfig) -> CausalLM | MaskedLM:
    """Build the model that a config describes, freshly initialised."""
    return MaskedLM(config) if config.task == "mlm" else CausalLM(config)


def are_finite(logits: Tensor) -> Tensor:
    """Whether the likeliest of the logits are finite, [..., V] -> bool [...]. Others may be -inf."""
    return logits.amax(-1).isfinite()  # the maximum of numbers with a NaN is NaN


def check_finite_logits(finite: bool) -> None:
    """Raise LineartimeError unless the logits of a model are finite."""
    if not finite:
        raise LineartimeError(
            "The logits of the model are not finite: its weights are damaged, or too large for its precision."
        )


Kind = TypeVar("Kind", bound=LanguageModel)


def check_model(model: object, kind: type[Kind], action: str, computes: bool = True) -> Kind:
    """Return the model without a wrapper of torch.compile.

    Raises:
        ArgumentError: unless it is of the required kind and, if it `computes` logits, does so deterministically. `action`
            follows "cannot" in the message.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, LanguageModel):
        raise ArgumentError(
            "model", f"is of type {type(model).__name__}, but must be a language model, as lineartime.load returns it."
        )
    if not isinstance(inner, kind):
        found, task = ("masked", "clm") if isinstance(inner, MaskedLM) else ("causal", "mlm")
        raise ArgumentError("model", f"is a {found} language model, which cannot {action}: train one with `task={task!r}`.")
    if computes:
        check_evaluates(inner, inner.config.dropout)
    return inner


def check_evaluates(model: nn.Module, dropout: float) -> None:
    """Raise ArgumentError for a model with dropout in training mode."""
    if model.training and dropout > 0:
        raise ArgumentError("model", "is in training mode, in which dropout changes its logits: call model.eval() first.")
