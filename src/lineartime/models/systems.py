"""All systems of the paper and of its related work, and the sizes of their models: one row each.

A row states what the class of its mixer does not: the rest of the block, and the options that differ from the class's
defaults. To add a system, add a row to `SYSTEMS`. Systems of a user are registered, in modules that other processes import.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, overload

import lineartime.baselines as baselines
from lineartime.choices import BYTE_VOCABULARY, VOCAB_SIZE, Task
from lineartime.errors import ArgumentError, LineartimeError, check_choice, did_you_mean, first_line, typed_first_line
from lineartime.fields import check_names
from lineartime.layers.attention import Attention
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.flash import FLASH, GAU, InitialScores
from lineartime.layers.mixer import Mixer
from lineartime.layers.residual import ResidualLayer
from lineartime.machine import shapes_only
from lineartime.models.config import (
    KINDS,
    LayerConfig,
    ModelConfig,
    known_layers,
    own_options,
    read_pattern,
    why_not_learned,
)
from lineartime.models.language_model import CausalLM, MaskedLM, build_model


@dataclass(frozen=True)
class Size:
    """The size of a model, for both families: gated units and Transformers."""

    d_model: int  # the width of the residual stream
    gated_blocks: int  # blocks in a model of gated units; each block is one layer
    attention_blocks: int  # blocks in a Transformer; each block is attention and a feed-forward layer
    n_heads: int  # heads in a Transformer
    d_qk: int = 128  # the query/key width of a gated unit
    chunk_size: int = 256  # tokens in a chunk
    vocab_size: int = VOCAB_SIZE
    initial_scores: InitialScores = "small"  # the magnitude of a GAU's attention scores at initialisation


SIZES: dict[str, Size] = {
    # Our own, for laptops. GAU starts with large scores: as published, attention would take longer than such runs to be useful.
    "tiny": Size(256, 8, 4, n_heads=4, d_qk=64, chunk_size=128, vocab_size=BYTE_VOCABULARY, initial_scores="unit"),
    # Those of arXiv 2202.10447.
    "base": Size(768, gated_blocks=24, attention_blocks=12, n_heads=12),
    "large": Size(1024, gated_blocks=72, attention_blocks=36, n_heads=16, chunk_size=512),
    "qa": Size(768, gated_blocks=24, attention_blocks=12, n_heads=12, d_qk=512, chunk_size=128),  # of table 4
    "ablation": Size(768, gated_blocks=22, attention_blocks=12, n_heads=12),
    "scaling-512": Size(512, gated_blocks=15, attention_blocks=8, n_heads=8),
    "scaling-768": Size(768, gated_blocks=22, attention_blocks=12, n_heads=12),
    "scaling-1024": Size(1024, gated_blocks=46, attention_blocks=24, n_heads=16),
}

SIZED = ("d_qk", "n_heads", "chunk_size")
"""The options of mixers that are taken from the size, unless a row sets them."""


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        mixer: the class of the layer that moves information between tokens.
        feed_forward: the class of the layer after the mixer in a Transformer block; None for gated units, which need none and
            have twice as many blocks instead.
        options: options of the mixer that differ from its class's defaults and from the size; a function computes one from it.
        fields: fields of the model that differ from the usual ones, such as the `pattern` of a hybrid: a tuple of its mixers.
            Each is a name, as in `model`, a LayerConfig, or a dictionary of options in which it differs from `mixer`.
        clips_gradient: whether the paper's recipes clip its gradient.
        description: a one-line description; the default is the first line of the mixer's docstring.
    """

    mixer: type[Mixer]
    feed_forward: type[ResidualLayer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    clips_gradient: bool = True
    description: str = ""

    @property
    def mixers(self) -> list[type[Mixer]]:
        """The classes of all its mixers: those in the pattern among its fields, too."""
        kinds = [getattr(each, "kind", each) for each in self.fields.get("pattern", ())]
        return list(dict.fromkeys([self.mixer, *(mixer for kind, mixer in KINDS["mixer"].items() if kind in kinds)]))

    @property
    def sized_options(self) -> list[str]:
        """The options of the mixer that the row leaves to the size."""
        return [name for name in SIZED if name in own_options(self.mixer) and name not in self.options]

    def why_not_learned(self, task: Task) -> str | None:
        """Why its models cannot learn a task, as the end of a sentence; None if they can."""
        return next(filter(None, (why_not_learned(mixer, task) for mixer in self.mixers)), None)

    def layer(self, size: Size) -> LayerConfig:
        """Its mixer at a size."""
        options = {name: value(size) if callable(value) else value for name, value in self.options.items()}
        return LayerConfig(self.mixer.name, **{name: getattr(size, name) for name in self.sized_options}, **options)

    def model(self, size: Size, task: Task, **overrides: Any) -> ModelConfig:
        """The config of its model at a size, with other values for some fields and options.

        A name in `mixer` or `pattern` stands for the system's own mixer or, of another kind, for that of the system that sets
        the fewest options of it, at this size.
        """
        own, blocks, feed_forward = self.layer(size), size.gated_blocks, None
        if self.feed_forward is not None:
            blocks, feed_forward = size.attention_blocks, LayerConfig(self.feed_forward.name)
        usual = {"n_blocks": blocks, "feed_forward": feed_forward, "norm": "scalenorm" if task == "mlm" else "layernorm"}
        # Set before the others, because other mixers may learn what the system's cannot.
        layers: dict[str, Any] = {name: overrides.pop(name) for name in ("mixer", "pattern") if name in overrides}
        pattern = self.fields.get("pattern", ())
        layers.setdefault("pattern", tuple(own.override(**each) if isinstance(each, dict) else each for each in pattern))
        if layers != {"pattern": ()}:
            rows = [self, *sorted(SYSTEMS.values(), key=lambda row: len(row.options))]
            known = {row.mixer.name: row.layer(size) for row in reversed(rows)}  # the first of each kind
            layers["pattern"] = pattern = read_pattern(layers["pattern"], known)
            mixer = layers.get("mixer", pattern[0] if pattern else own)
            layers["mixer"] = known.get(mixer, mixer) if isinstance(mixer, str) else mixer
        values: dict[str, Any] = {"mixer": own, **usual, **self.fields, **layers}
        return ModelConfig(task, size.vocab_size, size.d_model, **values).override(**overrides)

    def describe(self) -> str:
        """A one-line description of the system."""
        return self.description or (self.mixer.__doc__ or "").partition("\n")[0].rstrip(".")


# The paper's sizes for fine-tuning (arXiv 2202.10447, section 4.3): s = 512 and chunks of 128 at the base size.
FINE_TUNING: dict[str, Any] = {
    "d_qk": lambda size: 4 * size.d_qk,
    "chunk_size": lambda size: size.chunk_size // 2,
}

# GAU and its ablations share their initialisation.
GAU_START: dict[str, Any] = {"initial_scores": lambda size: size.initial_scores}


def heads_of(width: int) -> Callable[[Size], int]:
    """As many heads as divide the model into even parts at least so wide; one for a narrower model."""

    def count(size: Size) -> int:
        d, most = size.d_model, max(1, size.d_model // width)
        return max((heads for heads in range(1, most + 1) if d % heads == 0 and d // heads % 2 == 0), default=1)

    return count


FLASH_NEXT = {"normalization": "paper", "initial_scores": "unit"}

SYSTEMS: dict[str, System] = {
    "flash": System(FLASH, description="FLASH: gated units with mixed chunk attention"),
    "flash-quad": System(GAU, options=GAU_START, description="FLASH-Quad: gated units with quadratic attention (GAU)"),
    "flash-next": System(
        FLASH, options=FLASH_NEXT, description="flash-next: FLASH with the published divisor, and scores that start near 1"
    ),
    "flash-memory": System(
        FLASH,
        options=FLASH_NEXT,
        fields={"pattern": ("flash", "flash", {"memory": "mesa"}, "flash")},
        description="flash-memory: flash-next with a memory that recalls, in every fourth unit",
    ),
    "hybrid-gau": System(
        FLASH,
        options=FLASH_NEXT,
        fields={"pattern": ("flash", "flash", "flash", "gau")},
        description="A hybrid: three units of flash-next, then a GAU",
    ),
    "hybrid-attention": System(
        FLASH,
        options=FLASH_NEXT,
        fields={"pattern": ("flash", "flash", "flash", "attention")},
        description="A hybrid: three units of flash-next, then softmax attention",
    ),
    "transformer": System(
        Attention,
        MLP,
        options={"rope": False},
        fields={"norm": "layernorm", "absolute_position": "learned", "max_positions": 1024},
        clips_gradient=False,
        description="The vanilla Transformer, with 1,024 learned positions",
    ),
    "transformer+": System(Attention, MLP, description="Transformer+: rotary positions, MLP"),
    "transformer++": System(Attention, GLU, description="Transformer++: rotary positions and GEGLU"),
    "performer": System(baselines.Performer, MLP),
    "performer-matmul": System(
        baselines.Performer, MLP, options={"causal_sums": "matmul"}, description="Performer, causal by all T x T products"
    ),
    "performer-chunked": System(
        baselines.Performer, MLP, options={"causal_sums": "chunked"}, description="Performer, causal by sums over chunks"
    ),
    "combiner": System(baselines.Combiner, MLP),
    "combiner-fixed": System(baselines.CombinerFixed, MLP),
    "mc-tfm++": System(baselines.MCTFM, GLU, description="MC-TFM++: Transformer++ with mixed chunk attention"),
    "mixed-chunk": System(baselines.MixedChunk, GLU),
    "flash-local": System(baselines.FLASHLocal),
    "flash-global": System(baselines.FLASHGlobal, options={"chunk_size": 64}),
    "flash-overlapping": System(baselines.FLASHOverlapping),
    "flash-weighted": System(baselines.FLASHWeighted),
    "flash-first-to-all": System(baselines.FLASHFirstToAll, options=FINE_TUNING),
    "flash-cls": System(baselines.FLASHCLS, options=FINE_TUNING),
    "gau-softmax": System(
        GAU, options={"activation": "softmax", **GAU_START}, description="GAU with softmax instead of relu^2"
    ),
    "gau-multi-head": System(baselines.GAUMultiHead, options={"n_heads": 4, **GAU_START}),
    "gau-ungated": System(baselines.GAUUngated, options=GAU_START),
    "mhsa-relu2": System(baselines.MHSARelu2, GLU, description="Transformer++ with relu^2 instead of softmax"),
    "mhsa-single-head": System(Attention, GLU, options={"n_heads": 1}, description="Transformer++ with a single head"),
    "mhsa-gated": System(baselines.MHSAGated, GLU, description="Transformer++ with a gate on attention"),
    "linear-elu": System(baselines.LinearELU, MLP),
    "efficient": System(baselines.Efficient, MLP),
    "linear-taylor": System(baselines.LinearTaylor, MLP),
    "cosformer": System(baselines.CosFormer, MLP, options={"rope": False}),
    "flowformer": System(baselines.Flowformer, MLP, options={"rope": False}),
    "linformer": System(baselines.Linformer, MLP),
    "nystromformer": System(baselines.Nystromformer, MLP),
    "sparse": System(baselines.Sparse, MLP, options={"stride": lambda size: size.chunk_size // 2}),
    "longformer": System(baselines.Longformer, MLP, options={"window": lambda size: size.chunk_size}),
    "bigbird": System(baselines.BigBird, MLP, options={"block_size": lambda size: size.chunk_size // 4}),
    "explicit-topk": System(baselines.ExplicitTopK, MLP),
    "reformer": System(baselines.Reformer, MLP, options={"chunk_size": 64}),
    "retnet": System(baselines.RetNet, GLU, options={"n_heads": heads_of(128)}),
    "gla": System(baselines.GLA, GLU, options={"n_heads": 4}),
    "mamba2": System(baselines.Mamba2, options={"n_heads": heads_of(32)}),
    "deltanet": System(baselines.DeltaNet, GLU, options={"n_heads": heads_of(128)}),
    "gated-deltanet": System(baselines.GatedDeltaNet, GLU, options={"n_heads": heads_of(128)}),
    "rwkv7": System(baselines.RWKV7, MLP, options={"n_heads": heads_of(64)}),
    "lact": System(baselines.LaCT, GLU),
}

# The systems that the paper reports at sizes other than tiny and base.
MORE_SIZES: dict[str, tuple[str, ...]] = {
    "large": ("flash", "flash-quad", "transformer+", "transformer++", "combiner"),
    "qa": ("flash", "flash-quad"),
    "ablation": ("gau", "gau-softmax", "gau-multi-head", "gau-ungated"),
    "scaling-512": ("gau", "transformer+", "transformer++"),
    "scaling-768": ("gau", "transformer+", "transformer++"),
    "scaling-1024": ("gau", "transformer+", "transformer++"),
}

OF_EVERY_SYSTEM = ("tiny", "base")

PRESETS: dict[str, tuple[str, Size]] = {f"{name}-{size}": (name, SIZES[size]) for size in OF_EVERY_SYSTEM for name in SYSTEMS}
"""The system and the size of every preset, by its name."""

for _size, _names in MORE_SIZES.items():
    # In the paper's ablations and scaling figure, GAU means a model of GAUs, which is FLASH-Quad.
    PRESETS |= {f"{name}-{_size}": ("flash-quad" if name == "gau" else name, SIZES[_size]) for name in _names}
KINDS["mixer"] = {system.mixer.name: system.mixer for system in SYSTEMS.values()} | KINDS["mixer"]


def system_of(preset: str) -> System:
    """The system of a preset, a row of the table of systems. Raises ArgumentError for an unknown preset."""
    if preset not in PRESETS:
        like = did_you_mean(preset, PRESETS)
        raise ArgumentError(
            "preset", f"is {preset!r}, which is not a preset{like}: use a name that `lineartime presets` lists."
        )
    return SYSTEMS[PRESETS[preset][0]]


def presets(task: Task = "clm") -> dict[str, ModelConfig]:
    """The configurations that `build` knows by name, except those of systems that cannot learn the task."""
    rows = {name: (SYSTEMS[system], size) for name, (system, size) in PRESETS.items()}
    return {name: row.model(size, task) for name, (row, size) in rows.items() if row.why_not_learned(task) is None}


def resolve(preset_or_config: str | ModelConfig, task: Task | None = None, **overrides: Any) -> ModelConfig:
    """The configuration that `build` builds from the same arguments."""
    if isinstance(preset_or_config, ModelConfig):
        return preset_or_config.override(**({} if task is None else {"task": task}), **overrides)
    if not isinstance(preset_or_config, str):
        raise ArgumentError("preset_or_config", f"is {preset_or_config!r}, but must be the name of a preset or a ModelConfig.")
    return system_of(preset_or_config).model(PRESETS[preset_or_config][1], task or "clm", **overrides)


def nearest_preset(config: ModelConfig) -> str:
    """The preset with the same layers that needs the fewest overrides to equal this config.

    `resolve(nearest_preset(config), config.task, **config.values)` equals the config.

    Raises:
        ArgumentError: if no preset has these layers.
    """
    wanted, alike = config.values, dict[str, int]()
    feed_forward = getattr(config.feed_forward, "kind", None)
    for name, other in presets(config.task).items():
        same_mixer = config.pattern or other.mixer.kind == config.mixer.kind  # a pattern can be overridden in any preset
        if same_mixer and getattr(other.feed_forward, "kind", None) == feed_forward:
            values = other.values
            alike[name] = sum(values.get(field) != value for field, value in wanted.items())
    if not alike:
        raise ArgumentError(
            "preset",
            f"is a ModelConfig with the mixer {config.mixer.kind!r} and the feed-forward layer {feed_forward!r}, which no "
            "preset has together: add a row to the table of systems (docs/systems.md), or train the model in your own loop.",
        )
    return min(alike, key=alike.__getitem__)


@overload
def build(preset_or_config: str, task: Literal["clm", "prefix-lm"] = "clm", **overrides: Any) -> CausalLM: ...
@overload
def build(preset_or_config: str, task: Literal["mlm"], **overrides: Any) -> MaskedLM: ...
@overload
def build(preset_or_config: ModelConfig, task: Task | None = None, **overrides: Any) -> CausalLM | MaskedLM: ...
def build(preset_or_config: str | ModelConfig, task: Task | None = None, **overrides: Any) -> CausalLM | MaskedLM:
    """Build a freshly initialised model: ids [B, T] -> logits [B, T, V].

    Args:
        preset_or_config: a name from `presets()`, or a `ModelConfig`.
        task: "clm", a causal language model; "mlm", a masked one; or "prefix-lm", a causal one that reads a prefix
            bidirectionally. The default is "clm" for a preset, and the config's own task for a config.
        **overrides: other values for fields of the model, or for options of its mixer or feed-forward layer, as in
            `build("flash-base", vocab_size=50257, chunk_size=512)`.

    Raises:
        ArgumentError: for an unknown preset, field or value, or a system that cannot learn the task.
    """
    return build_model(resolve(preset_or_config, task, **overrides))


VARIABLE = "LINEARTIME_IMPORT"
"""The environment variable that names modules to import with the models, so that all processes know the same systems."""

FeedForward = Literal["mlp", "glu"]
_OF_THE_LIBRARY = frozenset(SYSTEMS)


def register_system(
    name: str,
    mixer: type[Mixer],
    feed_forward: FeedForward | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    scaled: Mapping[str, Callable[[Size], int | str]] | None = None,
    fields: Mapping[str, Any] | None = None,
    description: str = "",
) -> None:
    """Add a system of your own, with the presets NAME-tiny and NAME-base, as if it were a row of the table of systems.

    Registering the same name again replaces the system, as when a cell of a notebook is run again.

    Args:
        name: of lower-case letters, digits, + and -, beginning with a letter; not that of a system of the library.
        mixer: the class of the layer that moves information between tokens. Its attribute `name`, which model.json records,
            must be its own.
        feed_forward: the layer after the mixer in a Transformer block, "mlp" or "glu"; None for a gated unit, which needs none.
        options: options of the mixer that differ from its class's defaults and from the size.
        scaled: options of the mixer that are computed from the `Size` of the model; `d_qk`, `n_heads` and `chunk_size` are.
        fields: fields of `ModelConfig` that differ from the usual ones.
        description: in a line; the default is the first line of the mixer's docstring.

    Raises:
        ArgumentError: for a name that is taken or not a name, and a class that is not a complete mixer or lacks an option.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9+-]*", name):
        raise ArgumentError("name", f"is {name!r}, but must begin with a-z, and consist of a-z, 0-9, + and -.")
    if name in _OF_THE_LIBRARY:
        raise ArgumentError("name", f"is {name!r}, which is a system of the library: choose another one.")
    if feed_forward is not None:
        check_choice("feed_forward", feed_forward, get_args(FeedForward))
    layer = None if feed_forward is None else KINDS["feed_forward"][feed_forward]
    _check_mixer(mixer, layer)
    fixed = ("task", "vocab_size", "d_model", "n_blocks", "mixer", "feed_forward")  # by the size and the arguments
    check_names(fields or {}, [field for field in ModelConfig.__dataclass_fields__ if field not in fixed], "fields")
    system = System(mixer, layer, {**(options or {}), **(scaled or {})}, fields or {}, description=description)
    before = dict(KINDS["mixer"])
    KINDS["mixer"][mixer.name] = mixer  # a class that is defined again replaces the one before
    try:
        for size in OF_EVERY_SYSTEM:
            _check_builds(system, SIZES[size])
    except BaseException:
        KINDS["mixer"].clear()
        KINDS["mixer"].update(before)
        raise
    SYSTEMS[name] = system
    PRESETS.update({f"{name}-{size}": (name, SIZES[size]) for size in OF_EVERY_SYSTEM})


def _check_mixer(mixer: object, feed_forward: type[Any] | None) -> None:
    """Raise ArgumentError unless `mixer` is the class of a mixer whose name, and the names of whose options, are its own."""
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise ArgumentError("mixer", f"is {mixer!r}, but must be a class derived from lineartime.layers.Mixer.")
    if not isinstance(getattr(mixer, "name", None), str):
        raise ArgumentError("mixer", f"is {mixer.__name__}, which has no name: give the class an attribute `name`.")
    other = known_layers().get(mixer.name, mixer)  # it may be an earlier definition of the class, as in a notebook
    if other is not mixer and (other.__module__.startswith("lineartime.") or other.__qualname__ != mixer.__qualname__):
        found = f"is {mixer.__name__}, whose name, {mixer.name!r}, is that of {other.__name__}"
        raise ArgumentError("mixer", f"{found}: give the class an attribute `name` of its own.")
    others = {} if feed_forward is None else own_options(feed_forward)
    for option in own_options(mixer):  # `ModelConfig.override` names no layer
        if option in {"kind", *others, *ModelConfig.__dataclass_fields__}:
            found = f"is {mixer.__name__}, whose option {option} has the name of one of"
            raise ArgumentError("mixer", f"{found} {'the feed-forward layer' if option in others else 'the model'}: rename it.")


def _check_builds(system: System, size: Size) -> None:
    """Raise ArgumentError unless a model of the system can be built, and restored from what model.json records."""
    name = system.mixer.__name__
    config = system.model(size, "clm" if system.why_not_learned("clm") is None else "mlm").first_round
    try:
        with shapes_only():
            ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))).build()
    except (TypeError, ArgumentError) as error:  # of an abstract class, or of an option that JSON cannot hold
        types = "the types bool, int, float, str, Literal, None or tuple[..., ...] of these"
        found = f"is {name}, of which no model can be built from model.json ({first_line(error).rstrip('.')})"
        raise ArgumentError("mixer", f"{found}: complete the class, and give its options {types}.") from None


def import_modules(names: Sequence[str]) -> None:
    """Import modules, or the files ending in .py, that register systems, here and in all processes that this one starts.

    Each is imported once. A file can import what is beside it.

    Raises:
        LineartimeError: naming the first one that cannot be imported, and the line of the error.
    """
    if names:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*imported_names(), *names]))
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                importlib.import_module(name)
        except Exception as error:  # whatever the module does
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f", line {frame.lineno} of {frame.filename}" if frame.filename.endswith(".py") else ""
            is_file = getattr(error, "name", None) == name and Path(f"{name}.py").exists()
            beside = f": write {name}.py for the file" if is_file else ""
            raise LineartimeError(f"Cannot import {name} ({typed_first_line(error).rstrip('.')}{where}){beside}.") from error


def _import_file(file: Path) -> None:
    """Import a file, unless it has been imported by this or another name."""
    if any(getattr(module, "__file__", None) == str(file) for module in list(sys.modules.values())):
        return
    name = f"lineartime_imported_{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # the suffix is .py
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))


def imported_names() -> list[str]:
    """The modules and files that the environment variable names, separated as in PATH."""
    return list(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
