"""The experiments, their scales and the optimisers: add an entry to add one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lineartime.choices import BYTE_VOCABULARY, MemoryTask, ScaleName, Task, TextName
from lineartime.models.systems import SIZES, Size
from lineartime.training.config import RecipeName

MIN_TRIAL_STEPS = 60
"""The fewest steps after which trials rank learning rates as longer runs do: see docs/experiments.md."""
MAX_TRIAL_RATIO = 4
"""The maximum duration of a trial that needs more time for these steps, as a multiple of its planned seconds."""


@dataclass(frozen=True)
class Arm:
    """One of the models that an experiment compares."""

    name: str  # in tables; unique in its experiment
    system: str  # the name of its row in the table of systems
    override: Mapping[str, Any] = field(default_factory=dict)  # other values for options of the model
    seeds: int = 1  # how many are trained; at the scale `paper`, one
    scales: tuple[ScaleName, ...] = ("trial", "cpu", "gpu", "paper")  # where it takes part
    paper_row: str = ""  # its name in the paper's tables; empty if it has none
    paper_preset: str = "{system}-base"  # at the scale `paper`; the size of the setting can be filled in, too


@dataclass(frozen=True)
class Setting:
    """The text and the context, in tokens, in which all arms are compared, and the name of the size of their models.

    The size is one of the scale's, or at the scale `paper` that of a preset. A task for a memory, of which most read no text,
    may have a number of tokens to remember, its pairs.
    """

    text: TextName
    context: int
    size: str = "main"
    task: MemoryTask | None = None
    pairs: int = 0

    @property
    def reads_text(self) -> bool:
        """Whether its texts are not all generated."""
        return self.task in (None, "needle")

    @property
    def label(self) -> str:
        """Its name, also that of its folder."""
        last = str(self.pairs or "") if self.task else "" if self.size == "main" else self.size
        return "-".join(filter(None, (self.task or self.text, str(self.context), last)))

    def __str__(self) -> str:
        remembered = f", {self.pairs:,} to remember" if self.pairs else ""
        size = "" if self.task or self.size == "main" else f", size {self.size}"
        return f"{self.task or self.text}, {self.context:,} tokens{remembered}{size}"


@dataclass(frozen=True)
class Scale:
    """How large the runs are. All durations are seconds of training, without evaluations and compilation."""

    description: str
    sizes: Mapping[str, Size]  # of the models, by name
    tokens_per_batch: int  # in an optimiser step
    tokens_at_once: int = 0  # a step of more accumulates gradients; 0 if the recipe tells it
    budget: float | None = None  # seconds of a run; None if the recipe fixes the steps
    tuning: float | None = None  # seconds of a run that tries a learning rate; None if no rate is tried
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # those tried, by optimiser
    steps: int | None = None  # of a run of memory, which has no budget
    tokenizer: str = "bytes"  # its name, as for training
    speed_steps: int = 8  # of a run that measures how fast a model trains, before any is tuned
    speed_rounds: int = 3  # how often all models are measured, in turn
    evaluations: int = 12  # of a run on held-out text
    validation_tokens: int = 32_768  # of each of these evaluations
    test_tokens: int = 262_144  # of the test at the end, from the beginning of the test split
    compile: Literal["auto", "on", "off"] = "off"  # by torch.compile

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer."""
        return BYTE_VOCABULARY if self.tokenizer == "bytes" else int(self.tokenizer.rpartition("-")[2])


@dataclass(frozen=True)
class Experiment:
    """A question, the models that are compared to answer it, and the settings."""

    question: str
    arms: tuple[Arm, ...]  # parameters are matched to the first
    settings: Mapping[ScaleName, tuple[Setting, ...]]  # `trial` takes the first one of `cpu`, with a short context
    baseline: str  # the arm whose final quality the others have to reach, and that losses and times are relative to
    task: Task = "clm"
    recipe: RecipeName = "lm-wiki40b"  # the paper's, for the scale `paper`
    paper_tables: tuple[str, ...] = ()  # those that have rows of the arms
    tested_at: tuple[int, ...] = (1,)  # the contexts of the tests at the end, as multiples of that of training
    kind: Literal["quality", "latency", "memory"] = "quality"  # latency trains nothing, and memory on tasks
    override: Mapping[str, Any] = field(default_factory=dict)  # options of all arms whose system does not set them
    scaled: Mapping[ScaleName, Mapping[str, Any]] = field(default_factory=dict)  # other values for fields of the scale


_GPU = Size(512, gated_blocks=24, attention_blocks=12, n_heads=8, initial_scores=SIZES["tiny"].initial_scores)
"""GAU starts as in `tiny`, because runs are short here, too."""

_TOY = Size(32, gated_blocks=2, attention_blocks=1, n_heads=2, d_qk=16, chunk_size=16)
_MEMORY = Size(64, gated_blocks=2, attention_blocks=2, n_heads=1, d_qk=64, chunk_size=32, initial_scores="unit")
"""Two layers that move information, as few as recall takes: one tells each value its key, the other looks the key up."""

SCALES: dict[ScaleName, Scale] = {
    "trial": Scale(
        "toy models for seconds, to see that everything works here; its numbers mean nothing",
        {"main": _TOY, "memory": replace(_TOY, attention_blocks=2)},
        tokens_per_batch=256,
        tokens_at_once=256,
        budget=2.0,
        tuning=0.5,
        rates={"adamw": (3e-3, 3e-2), "muon": (3e-3, 3e-2)},  # two, to save time
        evaluations=5,
        validation_tokens=1024,
        test_tokens=2048,
    ),
    "cpu": Scale(
        "4 million parameters, hours on 2 cores",
        {
            "main": SIZES["tiny"],
            "128": replace(SIZES["tiny"], d_model=128, n_heads=2),
            "192": replace(SIZES["tiny"], d_model=192, n_heads=3),
            "256": SIZES["tiny"],
            "memory": _MEMORY,
        },
        tokens_per_batch=4096,
        tokens_at_once=4096,
        budget=600.0,
        tuning=60.0,
        rates={"adamw": (7e-4, 1.5e-3, 3e-3, 6e-3), "muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2)},
        tokenizer="bpe-4096",
    ),
    "gpu": Scale(
        "40 million parameters, at most 8 minutes a run on one H200-class GPU",
        {
            "main": _GPU,
            "256": replace(_GPU, d_model=256, n_heads=4),
            "384": replace(_GPU, d_model=384, n_heads=6),
            "512": _GPU,
            "memory": replace(_MEMORY, d_model=128),
        },
        tokens_per_batch=65_536,
        tokens_at_once=32_768,
        budget=300.0,
        tuning=40.0,
        rates={"adamw": (3e-4, 7e-4, 1.5e-3, 3e-3), "muon": (1e-3, 2e-3, 4e-3, 8e-3)},
        speed_steps=30,
        validation_tokens=262_144,
        test_tokens=2_097_152,
        compile="on",
    ),
    "paper": Scale(
        "the paper's configuration: its presets, texts, steps and rate, in one process",
        {},
        tokens_per_batch=2**18,
        compile="auto",
    ),
}

OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "muon": {"optimizer": "muon", "adamw_ratio": 2.0}}
"""The options of training that choose each optimiser."""
_NOT_PAPER: tuple[ScaleName, ...] = ("trial", "cpu", "gpu")
_ONLY_PAPER: tuple[ScaleName, ...] = ("paper",)
_NOT_GPU: tuple[ScaleName, ...] = ("trial", "cpu", "paper")
"""Of the vanilla Transformer: learned positions for 65,536 tokens would be most of a model of the scale `gpu`."""

_FLASH = Arm("flash", "flash", paper_row="FLASH")
_FLASH_NEXT = Arm("flash-next", "flash-next", scales=_NOT_PAPER)
_FLASH_MEMORY = Arm("flash-memory", "flash-next", {"memory": "mesa"})  # in all of its two units, which have no fourth
_FLASH_QUAD = Arm("flash-quad", "flash-quad", paper_row="FLASH-Quad")
_TRANSFORMER = Arm("transformer", "transformer", paper_row="Transformer")
_TRANSFORMER_1 = Arm("transformer+", "transformer+", paper_row="Transformer+")
_TRANSFORMER_2 = Arm("transformer++", "transformer++", paper_row="Transformer++")
_QK_NORM = Arm("transformer++ qk norm", "transformer++", {"qk_norm": True}, scales=_NOT_PAPER)
_PERFORMER = Arm("performer", "performer", paper_row="Performer")
_PERFORMER_CHUNKED = Arm("performer-chunked", "performer-chunked", scales=_NOT_PAPER)
_COMBINER = Arm("combiner", "combiner", paper_row="Combiner")
_MC_TFM = Arm("mc-tfm++", "mc-tfm++")


def _each(*arms: Arm, **values: Any) -> tuple[Arm, ...]:
    """Arms that share values."""
    return tuple(replace(arm, **values) for arm in arms)


def _settings(*scales: tuple[Setting, ...]) -> dict[ScaleName, tuple[Setting, ...]]:
    """The settings of the scales cpu, gpu and paper."""
    return dict(zip(("cpu", "gpu", "paper"), scales, strict=True))


def _in(text: TextName, *contexts: int) -> tuple[Setting, ...]:
    return tuple(Setting(text, context) for context in contexts)


def _remembering(tasks: tuple[MemoryTask, ...], pairs: int, *lengths: int) -> tuple[Setting, ...]:
    """The settings of tasks at lengths."""
    return tuple(Setting("books", length, "memory", task, pairs) for task in tasks for length in lengths)


def _one_grid(*rates: float) -> dict[str, tuple[float, ...]]:
    return dict.fromkeys(OPTIMIZERS, rates)


_GENERATED: tuple[MemoryTask, ...] = ("recall", "copying", "induction", "selective-copying")
_LENGTHS = (512, 1024, 2048, 4096, 8192)
_WIKIPEDIA = _in("wikipedia", *_LENGTHS)
_ONE = _settings(_in("wikipedia", 1024), _in("wikipedia", 1024), _in("wikipedia", 1024))
_FIVE_MINUTES: dict[ScaleName, dict[str, Any]] = {"cpu": {"budget": 300.0}, "gpu": {"budget": 240.0}}
_SMALL, _UNIT = {"initial_scores": "small"}, {"initial_scores": "unit"}

EXPERIMENTS: dict[str, Experiment] = {
    "latency": Experiment(
        "Which systems take as long for a token at any length?",
        (
            *(_FLASH, _FLASH_NEXT, _FLASH_QUAD, *_each(_TRANSFORMER, scales=_NOT_GPU), _TRANSFORMER_1, _TRANSFORMER_2),
            *(_PERFORMER, Arm("performer-matmul", "performer-matmul"), Arm("performer-chunked", "performer-chunked")),
            *(_COMBINER, _MC_TFM),
        ),
        _settings(_WIKIPEDIA, _in("wikipedia", *_LENGTHS, 16_384, 65_536), _WIKIPEDIA),
        baseline="transformer++",
        paper_tables=("lm_wiki40b",),
        kind="latency",
    ),
    "lm": Experiment(
        "How well does each system predict the next token after the same time of training?",
        (
            *_each(_FLASH, _FLASH_NEXT, _FLASH_QUAD, _TRANSFORMER_2, seeds=2),
            *_each(_TRANSFORMER, _TRANSFORMER_1, scales=_ONLY_PAPER),
            *(_QK_NORM, _PERFORMER, _PERFORMER_CHUNKED, _COMBINER, _MC_TFM),
        ),
        _settings(
            (*_in("wikipedia", 512, 2048), *_in("books", 4096)),
            (*_in("books", 8192, 1024), *_in("wikipedia", 8192, 1024)),
            _WIKIPEDIA,
        ),
        baseline="transformer++",
        paper_tables=("lm_wiki40b",),
    ),
    "next-ablation": Experiment(
        "Is flash-next better than FLASH after the same time of training, and what does each of its parts add?",
        _each(
            _FLASH,
            Arm("flash, published divisor", "flash", {"normalization": "paper"}),
            Arm("flash, unit scores", "flash", {"initial_scores": "unit"}),
            Arm("flash, token shift", "flash", {"token_shift": True}),
            _FLASH_NEXT,
            Arm("flash-next, token shift", "flash-next", {"token_shift": True}),
            scales=_NOT_PAPER,
        ),
        _settings((*_in("code", 1024, 4096), *_in("books", 1024, 4096)), (*_in("code", 1024), *_in("books", 8192)), ()),
        baseline="flash",
    ),
    "mlm": Experiment(
        "How well does each system predict masked tokens after the same time of training?",
        (
            *_each(_FLASH, _FLASH_QUAD, _TRANSFORMER_2, seeds=2),
            *(*_each(_TRANSFORMER, _TRANSFORMER_1, scales=_ONLY_PAPER), _PERFORMER, _COMBINER, _MC_TFM),
        ),
        _settings(_in("wikipedia", 512, 2048), _in("wikipedia", 1024, 8192), _WIKIPEDIA),
        baseline="transformer++",
        task="mlm",
        recipe="mlm-c4",
        paper_tables=("mlm_c4",),
        # Of larger tokens, models learn little more than the frequencies in ten minutes, and of bytes in one.
        scaled={"cpu": {"tokenizer": "bytes", "tuning": 240.0}},
    ),
    "pg19": Experiment(
        "Which system is the best on long books, and how fast does it reach the final quality of Transformer+?",
        (
            *_each(_FLASH, _FLASH_QUAD, _TRANSFORMER_2, _TRANSFORMER_1, seeds=2, paper_preset="{system}-large"),
            *_each(_COMBINER, paper_preset="{system}-large"),
            _FLASH_NEXT,
        ),
        _settings(_in("books", 1024, 4096), _in("books", 1024, 8192), _in("books", *_LENGTHS[1:])),
        baseline="transformer+",
        recipe="lm-pg19",
        paper_tables=("lm_pg19",),
    ),
    "gau-vs-mhsa": Experiment(
        "Is a model of gated attention units better than a Transformer of as many parameters?",
        (
            *_each(_FLASH_QUAD, paper_preset="gau-{size}"),
            *_each(_TRANSFORMER_1, _TRANSFORMER_2, paper_preset="{system}-{size}"),
        ),
        _settings(
            tuple(Setting("wikipedia", 512, size) for size in ("128", "192", "256")),
            tuple(Setting("wikipedia", 1024, size) for size in ("256", "384", "512")),
            tuple(Setting("wikipedia", 512, size) for size in ("scaling-512", "scaling-768", "scaling-1024")),
        ),
        baseline="transformer++",
        scaled=_FIVE_MINUTES,
    ),
    "layer-ablation": Experiment(
        "What do relu^2, a single head and the gate do in a gated attention unit, and what would they do in a Transformer?",
        (
            Arm("gau", "flash-quad", paper_row="original GAU", paper_preset="gau-ablation"),
            *_each(
                Arm("gau-softmax", "gau-softmax", paper_row="relu2 -> softmax"),
                Arm("gau-multi-head", "gau-multi-head", paper_row="single-head -> multi-head"),
                Arm("gau-ungated", "gau-ungated", paper_row="no gating"),
                paper_preset="{system}-ablation",
            ),
            Arm("transformer++", "transformer++", paper_row="original MHSA"),
            Arm("mhsa-relu2", "mhsa-relu2", paper_row="softmax -> relu2"),
            Arm("mhsa-single-head", "mhsa-single-head", paper_row="multi-head -> single-head"),
            Arm("mhsa-gated", "mhsa-gated", paper_row="add gating"),
        ),
        _settings(_in("wikipedia", 512), _in("wikipedia", 1024), _in("wikipedia", 512)),
        baseline="gau",
        paper_tables=("ablation_gau", "ablation_mhsa"),
        scaled=_FIVE_MINUTES,
    ),
    "chunk-size": Experiment(
        "How large must the chunks of FLASH be?",
        tuple(Arm(f"chunks of {size}", "flash", {"chunk_size": size}) for size in (64, 128, 256, 512, 1024)),
        _settings(_in("books", 1024, 4096), _in("books", 1024, 8192), _in("wikipedia", 1024, 8192)),
        baseline="chunks of 256",
        scaled=_FIVE_MINUTES,
    ),
    "local-global": Experiment(
        "Does FLASH need both the quadratic part inside chunks and the linear part across them?",
        (_FLASH, Arm("local alone", "flash-local"), Arm("global alone", "flash-global"), _FLASH_QUAD),
        _settings(_in("books", 2048), _in("books", 8192), _in("wikipedia", 1024, 8192)),
        baseline="flash",
        scaled=_FIVE_MINUTES,
    ),
    "memory": Experiment(
        "Which systems find again what stood far back in a text, and how much state do they need for it?",
        _each(_FLASH, _FLASH_NEXT, _FLASH_MEMORY, Arm("gau", "flash-quad"), _TRANSFORMER_2, scales=_NOT_PAPER),
        _settings(_remembering(_GENERATED, 16, 128, 256), _remembering((*_GENERATED, "needle"), 64, 256, 1024, 4096), ()),
        baseline="transformer++",
        kind="memory",
        override={"absolute_position": "none"},  # a sinusoid would drown embeddings of a small width
        scaled={
            "trial": {"steps": 20, "rates": _one_grid(3e-3)},
            "cpu": {"steps": 2000, "rates": _one_grid(3e-3), "tokenizer": "bytes"},
            "gpu": {"steps": 5000, "rates": _one_grid(1e-3, 3e-3)},
        },
    ),
    "positions": Experiment(
        "Are rotary positions enough, or are the relative bias and the sinusoid needed too?",
        (
            Arm("all three", "flash"),
            Arm("RoPE alone", "flash", {"rope": True, "relative_bias": False, "absolute_position": "none"}),
            Arm("relative bias alone", "flash", {"rope": False, "relative_bias": True, "absolute_position": "none"}),
            Arm("sinusoid alone", "flash", {"rope": False, "relative_bias": False, "absolute_position": "scaled_sin"}),
        ),
        _ONE,
        baseline="all three",
        tested_at=(1, 4),
        scaled=_FIVE_MINUTES,
    ),
    "normalization": Experiment(
        "How are scores best divided, and does a model still work at four times the length it was trained at?",
        (
            Arm("gau count", "flash-quad", _UNIT | {"normalization": "count"}),
            Arm("gau count, small scores", "flash-quad", _SMALL | {"normalization": "count"}),
            Arm("gau 1/n^2", "flash-quad", _UNIT | {"normalization": "paper", "max_length": 1024}),
            Arm("gau 1/n^2, small scores", "flash-quad", _SMALL | {"normalization": "paper", "max_length": 1024}),
            Arm("flash count", "flash", _SMALL | {"normalization": "count"}),
            Arm("flash count, unit scores", "flash", _UNIT | {"normalization": "count"}),
            Arm("flash 1/n^2", "flash", _SMALL | {"normalization": "paper"}),
            Arm("flash 1/n^2, sums", "flash", _SMALL | {"normalization": "paper_sum"}),
        ),
        _ONE,
        baseline="gau count",
        tested_at=(1, 4),
        scaled=_FIVE_MINUTES,
    ),
}
