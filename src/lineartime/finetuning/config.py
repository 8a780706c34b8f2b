"""The options of fine-tuning; their docstrings are the help of the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lineartime.choices import Device, Domain, Precision
from lineartime.errors import ArgumentError
from lineartime.fields import Between, Positive, check_fields

Size = Annotated[int, Between(1, 2**30)]
NotNegative = Annotated[float, Between(0)]
Share = Annotated[float, Between(0, 1)]
OfFLASH = Literal["flash", "flash-cls", "flash-first-to-all"]
"""The mixers that have the weights of FLASH, and its chunks."""
LabelKind = Literal["single", "multiple", "numbers"]
"""One label for each text, several, or a number."""


@dataclass(frozen=True)
class Advanced:
    """More options."""

    mixer: OfFLASH | None = None
    """Of flash: flash-cls, the default, [CLS] attends with softmax; flash-first-to-all, also the first token of each chunk."""
    chunk_size: Size | None = None
    """Tokens in a chunk, at most as many as in training; the default for a model of flash is 128 or that of training."""
    stride: Annotated[int, Between(0, 2**30)] = 128
    """Tokens that the windows of a long text have in common."""
    domain: Domain = "wikipedia"
    """TriviaQA: the documents to read."""
    null_threshold: float | None = None
    """SQuAD 2.0: an answer whose logits exceed those of [CLS] by less than this is left out; by default the best."""
    max_answer_tokens: Size | None = None
    """Maximum number of tokens in an answer; the default is the length that 99 of 100 training windows have at most."""
    labels: LabelKind | None = None
    """classify: single, multiple (in CSV with commas between) or numbers; by default, lists are multiple, fractions numbers."""
    text_column: str = "text"
    """classify: the column of the text."""
    pair_column: str | None = None
    """classify: the column of the second text of pairs."""
    label_column: str = "label"
    """classify: the column of the label."""
    warmup: Share = 0.1
    """Share of the steps over which the learning rate rises from zero; then it falls to zero."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices."""
    clip_norm: NotNegative = 0.0
    """Maximum norm of the gradient; 0, as in the paper, turns clipping off."""
    dropout: Annotated[float, Between(0, below=1)] = 0.1
    """Dropout of every layer's output and before the head."""
    lora_rank: Annotated[int, Between(0, 2**20)] = 0
    """Train adapters of this rank (LoRA, with PEFT) beside the linear maps, and the head; 0 trains everything."""
    patience: Size | None = None
    """Stop after this many evaluations without a better metric."""
    precision: Precision = "auto"
    """Precision of matrix products: fp32 or bf16; auto takes the faster one."""
    device: Device = "auto"
    """Device to compute on; auto takes a GPU if there is one."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tune a masked language model. The folder `out` gets the best model, its predictions and the metrics of all rates."""

    run: Path
    """Folder of a run, or of one checkpoint."""
    data: Path
    """qa: JSON in the layout of SQuAD, or the folder of TriviaQA; classify: .jsonl, .csv or .parquet; or a folder of two."""
    out: Path
    """New folder for the result."""
    task: Literal["qa", "classify"] = "qa"
    """qa: answer questions by a span of a text; classify: label texts, or pairs of texts, or give them a number."""
    context_length: Size = 1024
    """Tokens that are read at once, of a question with its text; a longer text is read in several windows."""
    learning_rates: tuple[Annotated[float, Between(above=0, most=1e5)], ...] = (1e-4, 3e-4, 1e-3)
    """Peak learning rates to try; the best by the metric is kept."""
    epochs: Positive = 2.0
    """Times that the training data is read."""
    batch_size: Size = 16
    """Windows in each step."""
    resume: bool = False
    """Go on where a fine-tuning into this folder was stopped."""
    seed: Annotated[int, Between(0, below=2**32)] = 0
    """Seed of the head, the order and the dropout."""
    advanced: Advanced = field(default_factory=Advanced)

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value of the wrong type or out of range."""
        check_fields(self)
        check_fields(self.advanced)
        if not self.learning_rates:
            raise ArgumentError("learning_rates", "is empty: give at least one.")
