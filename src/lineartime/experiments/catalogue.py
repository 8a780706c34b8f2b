"""The experiments, their scales and the optimisers: add an entry to add one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lineartime.choices import BYTE_VOCABULARY, MemoryTask, ScaleName, Task, TextName
from lineartime.models.systems import SIZES, Size

MIN_TRIAL_STEPS = 60
"""The fewest steps after which trials rank learning rates as longer runs do: see docs/experiments.md."""
MAX_TRIAL_RATIO = 4
"""The maximum duration of a trial that needs more time for these steps, as a multiple of its planned seconds."""


@dataclass(frozen=True)
class Arm:
    """One of the models that an experiment compares."""

    name: str  # in tables, also of the paper; unique in its experiment
    system: str  # the name of its row in the table of systems
    override: Mapping[str, Any] = field(default_factory=dict)  # other values for options of the model
    seeds: int = 1  # how many are trained


@dataclass(frozen=True)
class Setting:
    """The text, or the task for a memory, and the context, in tokens, in which all arms are compared."""

    text: TextName | MemoryTask
    context: int
    width: int = 0  # of the models, in place of the scale's
    pairs: int = 0  # to remember in a task

    @property
    def task(self) -> MemoryTask | None:
        """Its task, if it has no text."""
        return next((task for task in get_args(MemoryTask) if task == self.text), None)

    @property
    def label(self) -> str:
        """Its name, also that of its folder."""
        return "-".join(map(str, filter(None, (self.text, self.context, self.width, self.pairs))))

    def __str__(self) -> str:
        more = f", {self.pairs:,} to remember" if self.pairs else f", size {self.width}" if self.width else ""
        return f"{self.text}, {self.context:,} tokens{more}"


@dataclass(frozen=True)
class Scale:
    """How large the runs are. All durations are seconds of training, without evaluations and compilation."""

    description: str
    size: Size  # of the models
    memory: Size  # of models that remember
    tokens_per_batch: int  # in an optimiser step
    tokens_at_once: int  # a step of more accumulates gradients
    budget: float | None  # seconds of a run
    tuning: float | None  # seconds of a run that tries a learning rate
    rates: Mapping[str, tuple[float, ...]]  # those tried, by optimiser
    steps: int | None = None  # of a run of memory, which has no budget
    tokenizer: str = "bytes"  # its name, as for training
    speed_steps: int = 8  # of a run that measures how fast a model trains, before any is tuned
    speed_rounds: int = 3  # how often all models are measured, in turn
    evaluations: int = 12  # of a run on held-out text
    validation_tokens: int = 32_768  # of each of these evaluations
    test_tokens: int = 262_144  # of the test at the end, from the beginning of the test split
    compile: Literal["on", "off"] = "off"  # by torch.compile

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer."""
        return BYTE_VOCABULARY if self.tokenizer == "bytes" else int(self.tokenizer.rpartition("-")[2])


@dataclass(frozen=True)
class Experiment:
    """A question, the models that are compared to answer it, and the settings."""

    question: str
    arms: tuple[Arm, ...]  # parameters are matched to the first
    settings: Mapping[str, tuple[Setting, ...]]  # by scale; `trial` takes the first one of `cpu`, with a short context
    baseline: str  # the arm whose final quality the others have to reach, and that losses and times are relative to
    task: Task = "clm"
    paper_tables: tuple[str, ...] = ()  # those that have rows of arms
    tested_at: tuple[int, ...] = (1,)  # the contexts of the tests at the end, as multiples of that of training
    remembers: bool = False  # whether it trains on tasks for a memory, for so many steps
    override: Mapping[str, Any] = field(default_factory=dict)  # options of all arms whose system does not set them
    scaled: Mapping[ScaleName, Mapping[str, Any]] = field(default_factory=dict)  # other values for fields of the scale


_TOY = Size(32, gated_blocks=2, attention_blocks=1, n_heads=2, d_qk=16, chunk_size=16)
_MEMORY = Size(64, gated_blocks=2, attention_blocks=2, n_heads=1, d_qk=64, chunk_size=32, initial_scores="unit")
"""Two layers that move information, as few as recall takes: one tells each value its key, the other looks the key up."""

SCALES: dict[ScaleName, Scale] = {
    "trial": Scale(
        "toy models for seconds, to see that everything works here; its numbers mean nothing",
        _TOY,
        replace(_TOY, attention_blocks=2),
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
        SIZES["tiny"],
        _MEMORY,
        tokens_per_batch=4096,
        tokens_at_once=4096,
        budget=600.0,
        tuning=60.0,
        rates={"adamw": (7e-4, 1.5e-3, 3e-3, 6e-3), "muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2)},
        tokenizer="bpe-4096",
    ),
    "gpu": Scale(
        "40 million parameters, at most 8 minutes a run on one H200-class GPU",
        Size(512, gated_blocks=24, attention_blocks=12, n_heads=8, initial_scores=SIZES["tiny"].initial_scores),
        replace(_MEMORY, d_model=128),
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
}

OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "muon": {"optimizer": "muon", "adamw_ratio": 2.0}}
"""The options of training that choose each optimiser."""


def _systems(*names: str, seeds: int = 1) -> tuple[Arm, ...]:
    """Arms that are systems as they are."""
    return tuple(Arm(name, name, seeds=seeds) for name in names)


def _settings(cpu: tuple[Setting, ...], gpu: tuple[Setting, ...]) -> dict[str, tuple[Setting, ...]]:
    return {"cpu": cpu, "gpu": gpu}


def _in(text: TextName, *contexts: int) -> tuple[Setting, ...]:
    return tuple(Setting(text, context) for context in contexts)


def _wide(context: int, *widths: int) -> tuple[Setting, ...]:
    return tuple(Setting("wikipedia", context, width) for width in widths)


def _remembering(pairs: int, *lengths: int) -> tuple[Setting, ...]:
    """The settings of all tasks at lengths."""
    return tuple(Setting(task, length, pairs=pairs) for task in get_args(MemoryTask) for length in lengths)


_ONE = _settings(_in("wikipedia", 1024), _in("wikipedia", 1024))
_FIVE_MINUTES: dict[ScaleName, dict[str, Any]] = {"cpu": {"budget": 300.0}, "gpu": {"budget": 240.0}}
_SMALL, _UNIT = {"initial_scores": "small"}, {"initial_scores": "unit"}
_ONE_RATE = dict.fromkeys(OPTIMIZERS, (0.003,))

EXPERIMENTS: dict[str, Experiment] = {
    "lm": Experiment(
        "How well does each system predict the next token after the same time of training?",
        (
            *_systems("flash", "flash-next", "flash-quad", "transformer++", seeds=2),
            Arm("transformer++ qk norm", "transformer++", {"qk_norm": True}),
            *_systems("performer", "performer-chunked", "combiner", "mc-tfm++"),
        ),
        _settings(
            (*_in("wikipedia", 512, 2048), *_in("books", 4096)), (*_in("books", 8192, 1024), *_in("wikipedia", 8192, 1024))
        ),
        baseline="transformer++",
        paper_tables=("lm_wiki40b",),
    ),
    "next-ablation": Experiment(
        "Is flash-next better than FLASH after the same time of training, and what does each of its parts add?",
        (
            *_systems("flash"),
            Arm("flash, published divisor", "flash", {"normalization": "paper"}),
            Arm("flash, unit scores", "flash", {"initial_scores": "unit"}),
            Arm("flash, token shift", "flash", {"token_shift": True}),
            *_systems("flash-next"),
            Arm("flash-next, token shift", "flash-next", {"token_shift": True}),
        ),
        _settings((*_in("code", 1024, 4096), *_in("books", 1024, 4096)), (*_in("code", 1024), *_in("books", 8192))),
        baseline="flash",
    ),
    "mlm": Experiment(
        "How well does each system predict masked tokens after the same time of training?",
        (*_systems("flash", "flash-quad", "transformer++", seeds=2), *_systems("performer", "combiner", "mc-tfm++")),
        _settings(_in("wikipedia", 512, 2048), _in("wikipedia", 1024, 8192)),
        baseline="transformer++",
        task="mlm",
        paper_tables=("mlm_c4",),
        # Of larger tokens, models learn little more than the frequencies in ten minutes, and of bytes in one.
        scaled={"cpu": {"tokenizer": "bytes", "tuning": 240.0}},
    ),
    "pg19": Experiment(
        "Which system is the best on long books, and how fast does it reach the final quality of Transformer+?",
        (*_systems("flash", "flash-quad", "transformer++", "transformer+", seeds=2), *_systems("combiner", "flash-next")),
        _settings(_in("books", 1024, 4096), _in("books", 1024, 8192)),
        baseline="transformer+",
        paper_tables=("lm_pg19",),
    ),
    "gau-vs-mhsa": Experiment(
        "Is a model of gated attention units better than a Transformer of as many parameters?",
        _systems("flash-quad", "transformer+", "transformer++"),
        _settings(_wide(512, 128, 192, 256), _wide(1024, 256, 384, 512)),
        baseline="transformer++",
        scaled=_FIVE_MINUTES,
    ),
    "layer-ablation": Experiment(
        "What do relu^2, a single head and the gate do in a gated attention unit, and what would they do in a Transformer?",
        (
            Arm("gau", "flash-quad"),
            *_systems("gau-softmax", "gau-multi-head", "gau-ungated"),
            *_systems("transformer++", "mhsa-relu2", "mhsa-single-head", "mhsa-gated"),
        ),
        _settings(_in("wikipedia", 512), _in("wikipedia", 1024)),
        baseline="gau",
        paper_tables=("ablation_gau", "ablation_mhsa"),
        scaled=_FIVE_MINUTES,
    ),
    "chunk-size": Experiment(
        "How large must the chunks of FLASH be?",
        tuple(Arm(f"chunks of {size}", "flash", {"chunk_size": size}) for size in (64, 128, 256, 512, 1024)),
        _settings(_in("books", 1024, 4096), _in("books", 1024, 8192)),
        baseline="chunks of 256",
        scaled=_FIVE_MINUTES,
    ),
    "local-global": Experiment(
        "Does FLASH need both the quadratic part inside chunks and the linear part across them?",
        (
            *_systems("flash"),
            Arm("local alone", "flash-local"),
            Arm("global alone", "flash-global"),
            *_systems("flash-quad"),
        ),
        _settings(_in("books", 2048), _in("books", 8192)),
        baseline="flash",
        scaled=_FIVE_MINUTES,
    ),
    "memory": Experiment(
        "Which systems find again what stood far back in a text, and how much state do they need for it?",
        (
            *_systems("flash", "flash-next"),
            Arm("flash-memory", "flash-next", {"memory": "mesa"}),  # in all of its two units, which have no fourth
            Arm("gau", "flash-quad"),
            *_systems("transformer++"),
        ),
        _settings(_remembering(16, 128, 256), _remembering(64, 256, 1024, 4096)),
        baseline="transformer++",
        remembers=True,
        override={"absolute_position": "none"},  # a sinusoid would drown embeddings of a small width
        scaled={
            "trial": {"steps": 20, "rates": _ONE_RATE},
            "cpu": {"steps": 2000, "rates": _ONE_RATE, "tokenizer": "bytes"},
            "gpu": {"steps": 5000, "rates": _ONE_RATE},
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
