"""The options of training on pairs of texts; their docstrings are the help of the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineartime.choices import Device, Precision
from lineartime.errors import ArgumentError
from lineartime.fields import Between, Positive, check_fields
from lineartime.finetuning.config import NotNegative, Share, Size
from lineartime.training.config import errors_in_override, read_override

if TYPE_CHECKING:  # it needs PyTorch, without which the command line shows its help
    from lineartime.models.encoder_decoder import EncoderDecoderConfig


@dataclass(frozen=True)
class PairsConfig:
    """Train an encoder-decoder on pairs of texts. The folder `out` gets the best model, its predictions and its metrics."""

    data: Path
    """JSON lines with source and target, of which every fifth is held out; or a folder with files for train and dev."""
    out: Path
    """New folder for the model."""
    preset: str = "flash-quad-tiny"
    """The layers and the size of both sides: a name that `lineartime presets` lists."""
    override: tuple[str, ...] = ()
    """Other values for the model, such as n_decoder_blocks=6 or cross.n_heads=4."""
    tokenizer: str = "bytes"
    """bytes; bpe-4000 or unigram-4000 to train one of that size on the pairs; hub:NAME; or the path of a tokenizer.json."""
    epochs: Positive = 10.0
    """Times that the training pairs are read."""
    batch_size: Size = 32
    """Pairs in each step."""
    learning_rate: Annotated[float, Between(above=0, most=1e5)] = 1e-3
    """Peak learning rate."""
    warmup: Share = 0.1
    """Share of the steps over which the learning rate rises from zero; then it falls to zero."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices."""
    dropout: Annotated[float, Between(0, below=1)] = 0.1
    """Dropout of every layer's output."""
    beams: Size = 1
    """Beams of the targets that are written to evaluate; 1 is the fastest."""
    max_target_tokens: Size | None = None
    """Maximum number of tokens in a target that is written; the default is the longest one of the data."""
    patience: Size | None = None
    """Stop after this many evaluations without a better model."""
    resume: bool = False
    """Go on where a training into this folder was stopped."""
    seed: Annotated[int, Between(0, below=2**32)] = 0
    """Seed of the initial weights, the order and the dropout."""
    precision: Precision = "auto"
    """Precision of matrix products: fp32 or bf16; auto takes the faster one."""
    device: Device = "auto"
    """Device to compute on; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value of the wrong type or out of range."""
        check_fields(self)

    def model(self, vocab_size: int) -> "EncoderDecoderConfig":
        """The model for a vocabulary. Raises ArgumentError for an unknown preset, or an override that does not fit it."""
        from lineartime.models.presets import encoder_decoder_config

        values = dict(map(read_override, self.override))
        for name, source in (("vocab_size", "tokenizer"), ("dropout", "dropout")):
            if name in values:
                raise ArgumentError("override", f"cannot set {name}: use `{source}`.")
        encoder_decoder_config(self.preset)  # its errors are not those of the override
        with errors_in_override():
            return encoder_decoder_config(self.preset, **values, vocab_size=vocab_size, dropout=self.dropout)
