"""The configuration of a model as plain data: its parts and their sizes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from typing_extensions import Self

from lineartime.choices import Task
from lineartime.errors import ArgumentError
from lineartime.fields import Between, shown
from lineartime.foreign.mixers import NormPosition
from lineartime.layers.mixer import READ_PREFIX, Mixer
from lineartime.layers.residual import Norm
from lineartime.machine import shapes_only
from lineartime.models.layer_config import KINDS, LayerConfig, PartsConfig, as_layer

LAYERS = ("mixer", "feed_forward", "pattern")
"""The fields of a model that hold its layers."""


def why_not_learned(mixer: type[Mixer], task: Task) -> str | None:
    """Why a model of a mixer cannot learn a task, as the end of a sentence; None if it can."""
    if task != "mlm" and mixer.why_not_causal is not None:
        return f"cannot be causal: {mixer.why_not_causal}; use `task='mlm'`."
    if task == "mlm" and mixer.why_only_causal is not None:
        return f"must be causal: {mixer.why_only_causal}; use `task='clm'`."
    if task == "prefix-lm" and not mixer.reads_prefix:
        return f"cannot read a prefix in both directions: only {READ_PREFIX} do."
    return None


def read_pattern(pattern: object, known: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The mixers of a pattern, a tuple or a text with commas; a name stands for the first `known` mixer of this kind."""
    if isinstance(pattern, str):
        names = pattern.strip().removesuffix(",")  # as a tuple may be written
        pattern = [name.strip() for name in names.split(",")] if names else []
    if not isinstance(pattern, (list, tuple)):
        found = f"is {shown(pattern)}, but must be a tuple of mixers, or their names, as in flash,flash,gau."
        raise ArgumentError("pattern", found)
    by_name = {mixer.kind: mixer for mixer in reversed(list(known))}
    mixers = [by_name.get(each, each) if isinstance(each, str) else each for each in pattern]
    return tuple(as_layer(f"pattern[{place}]", mixer, KINDS["mixer"]) for place, mixer in enumerate(mixers))


@dataclass(frozen=True)
class ModelConfig(PartsConfig):
    """A language model: embedding, N blocks of a mixer and an optional feed-forward layer, norm, logits.

    Attributes:
        task: "clm", a causal language model; "mlm", a masked (bidirectional) one; or "prefix-lm", a causal one that reads a
            prefix bidirectionally.
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        n_blocks: number of blocks.
        mixer: the layer that moves information between tokens; with a pattern, its first one.
        feed_forward: the layer after the mixer in each block; None for models of gated attention units, which need none.
        norm: the norm of every layer and, by default, the final norm.
        norm_eps: the epsilon that `norm` adds to the mean square or variance before dividing by it.
        norm_position: "pre" for a norm before each layer; "post" for a norm after each residual connection, as in GAU-alpha.
        final_norm: the norm before the logits: "same" as `norm`; another one, with an epsilon of 1e-5; or "none".
        embedding_norm: whether the input of the first block is normalised.
        absolute_position: "scaled_sin" adds a scaled sinusoid to the embeddings; "learned" adds one learned vector for each
            position; "none" adds nothing.
        max_positions: the number of learned positions, and so the longest sequence; None for other positions.
        token_types: the number of token types, such as the two texts of a pair. Each has a learned vector that is added to
            the embeddings. 0 for none.
        tie_word_embeddings: whether the logits are computed with the transposed token embedding; otherwise with a separate
            linear layer, which has a bias.
        dropout: the dropout rate of every layer's output.
        pattern: of a hybrid, the mixers of the blocks in turn, which repeat until there are `n_blocks`; empty if every block
            has `mixer`. Any of them may be given as its name, which stands for the mixer of this kind that the model has.

    Raises:
        ArgumentError: for a value of the wrong type or out of range, or a mixer that cannot learn the task.
    """

    task: Task
    vocab_size: Annotated[int, Between(1, 2**31 - 1)]
    d_model: Annotated[int, Between(1, 2**24)]
    n_blocks: Annotated[int, Between(1, 10**6)]
    mixer: LayerConfig
    feed_forward: LayerConfig | None = None
    norm: Norm = "layernorm"
    norm_eps: Annotated[float, Between(above=0, below=1)] = 1e-5
    norm_position: NormPosition = "pre"
    final_norm: Literal["same", "layernorm", "scalenorm", "rmsnorm", "none"] = "same"
    embedding_norm: bool = False
    absolute_position: Literal["scaled_sin", "learned", "none"] = "scaled_sin"
    max_positions: Annotated[int, Between(1, 2**31 - 1)] | None = None
    token_types: Annotated[int, Between(0, 2**31 - 1)] = 0
    tie_word_embeddings: bool = True
    dropout: Annotated[float, Between(0, below=1)] = 0.0
    pattern: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        pattern = read_pattern(self.pattern, [as_layer("mixer", self.mixer, KINDS["mixer"])])
        object.__setattr__(self, "pattern", pattern)
        super().__post_init__()
        if self.pattern and self.pattern[0] != self.mixer:
            wanted = f"but must equal the first one of the pattern, {self.pattern[0].kind}, in all options"
            raise ArgumentError("mixer", f"is {self.mixer.kind}, {wanted}: give another pattern, or an empty one.")
        for mixer in self.mixers:
            if (why := why_not_learned(mixer.layer, self.task)) is not None:
                raise ArgumentError("task", f"is {self.task!r}, but a model of {mixer.kind} ", why)
        if (self.max_positions is not None) != (self.absolute_position == "learned"):
            raise ArgumentError(
                "max_positions",
                f"is {self.max_positions} with absolute_position = {self.absolute_position!r}, but learned positions need a "
                "number of them, and no others have one.",
            )

    @property
    def mixers(self) -> tuple[LayerConfig, ...]:
        """The mixers of the blocks in turn, which repeat: those of the pattern, or `mixer` alone."""
        return self.pattern or (self.mixer,)

    @property
    def blocks_of(self) -> Counter[LayerConfig]:
        """The number of blocks of each mixer."""
        counts: Counter[LayerConfig] = Counter()
        for place, mixer in enumerate(self.mixers[: self.n_blocks]):
            counts[mixer] += len(range(place, self.n_blocks, len(self.mixers)))
        return counts

    @property
    def first_round(self) -> Self:
        """The same model with one block of each mixer in the pattern, which all others repeat."""
        return replace(self, n_blocks=min(self.n_blocks, len(self.mixers)))

    @property
    def layers(self) -> dict[str, LayerConfig]:
        """The layers by their names in `override`: "mixer" or, with a pattern, "pattern.0", "pattern.1" and so on."""
        layers = super().layers
        if self.pattern:
            del layers["mixer"]
        return {f"pattern.{place}": mixer for place, mixer in enumerate(self.pattern)} | layers

    def with_layers(self, layers: Mapping[str, LayerConfig]) -> Self:
        """Return a copy with other layers, named as in `layers`."""
        pattern = tuple(layers.get(f"pattern.{place}", mixer) for place, mixer in enumerate(self.pattern))
        others = {name: layer for name, layer in layers.items() if name in vars(self)}
        mixer = pattern[0] if pattern else self.mixer
        return self.from_dict({**vars(self), "mixer": mixer, **others, "pattern": pattern})

    def override(self, /, **values: Any) -> Self:
        """As for all models. A pattern also sets `mixer`, and an option of a mixer is set in every one that has it.

        To set it in a single one, name its place in the pattern, from 0: `config.override(**{"pattern.3.d_qk": 64})`.
        """
        if "pattern" in values and (pattern := read_pattern(values["pattern"], self.mixers)):
            values = {"mixer": pattern[0], **values, "pattern": pattern}
        places = range(len(values.get("pattern", self.pattern)))
        for name in values:
            part = name.rpartition(".")[0]
            if part.startswith("pattern.") and part not in [f"pattern.{place}" for place in places]:
                there = f"its places are 0 to {places[-1]}" if places else "this model has none"
                raise ArgumentError(name, f"names a place that is not in the pattern: {there}.")
        return super().override(**values)

    @property
    def longest_sequence(self) -> int | None:
        """The maximum number of tokens that the model can read, or None if there is no limit."""
        limits = [self.max_positions, *(layer.longest_sequence for layer in self._layers())]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def constant_state(self) -> bool:
        """Whether one token of each stream updates the state of all blocks in place, in constant memory."""
        return all(layer.constant_state for layer in self._layers())

    def _layers(self) -> list[Mixer]:
        """One of each mixer, as shapes alone."""
        with shapes_only():
            return [mixer.build(self.d_model, causal=self.task != "mlm") for mixer in set(self.mixers)]
