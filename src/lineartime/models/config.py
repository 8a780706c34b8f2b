"""The configuration of a model as plain data: its parts and their sizes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lineartime.choices import Task
from lineartime.errors import ArgumentError
from lineartime.fields import Between
from lineartime.foreign.mixers import NormPosition
from lineartime.layers.mixer import READ_PREFIX, Mixer
from lineartime.layers.residual import Norm
from lineartime.models.layer_config import LayerConfig, PartsConfig
from lineartime.shapes import shapes_only


def why_not_learned(mixer: type[Mixer], task: Task) -> str | None:
    """Why a model of a mixer cannot learn a task, as the end of a sentence; None if it can."""
    if task != "mlm" and mixer.why_not_causal is not None:
        return f"cannot be causal: {mixer.why_not_causal}; use `task='mlm'`."
    if task == "mlm" and mixer.why_only_causal is not None:
        return f"must be causal: {mixer.why_only_causal}; use `task='clm'`."
    if task == "prefix-lm" and not mixer.reads_prefix:
        return f"cannot read a prefix in both directions: only {READ_PREFIX} do."
    return None


@dataclass(frozen=True)
class ModelConfig(PartsConfig):
    """A language model: embedding, N identical blocks of a mixer and an optional feed-forward layer, norm, logits.

    Attributes:
        task: "clm", a causal language model; "mlm", a masked (bidirectional) one; or "prefix-lm", a causal one that reads a
            prefix bidirectionally.
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        n_blocks: number of blocks.
        mixer: the layer that moves information between tokens.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if (why := why_not_learned(self.mixer.layer, self.task)) is not None:
            raise ArgumentError("task", f"is {self.task!r}, but a model of {self.mixer.kind} ", why)
        if (self.max_positions is not None) != (self.absolute_position == "learned"):
            raise ArgumentError(
                "max_positions",
                f"is {self.max_positions} with absolute_position = {self.absolute_position!r}, but learned positions need a "
                "number of them, and no others have one.",
            )

    @property
    def longest_sequence(self) -> int | None:
        """The maximum number of tokens that the model can read, or None if there is no limit."""
        with shapes_only():
            mixer = self.mixer.build(self.d_model)
        limits = [limit for limit in (self.max_positions, mixer.longest_sequence) if limit is not None]
        return min(limits, default=None)
