"""Models that can be built by name: a system at a size, named SYSTEM-SIZE."""

from dataclasses import replace
from typing import Any, Literal, overload

from lineartime.choices import BYTE_VOCABULARY, Task
from lineartime.errors import ArgumentError, did_you_mean
from lineartime.models.config import LayerConfig, ModelConfig, read_pattern, why_not_learned
from lineartime.models.encoder_decoder import EncoderDecoderConfig
from lineartime.models.language_model import CausalLM, MaskedLM, build_model
from lineartime.models.systems import SYSTEMS, Size, System

# Our own size, for laptops. GAU starts with large scores: with the published initialisation, attention would take longer to
# become useful than such runs last.
TINY = Size(
    d_model=256,
    gated_blocks=8,
    attention_blocks=4,
    n_heads=4,
    d_qk=64,
    chunk_size=128,
    vocab_size=BYTE_VOCABULARY,
    initial_scores="unit",
)
# The sizes of arXiv 2202.10447.
BASE = Size(d_model=768, gated_blocks=24, attention_blocks=12, n_heads=12)
SIZES: dict[str, Size] = {
    "tiny": TINY,
    "base": BASE,
    "large": Size(1024, gated_blocks=72, attention_blocks=36, n_heads=16, chunk_size=512),
    "qa": Size(768, gated_blocks=24, attention_blocks=12, n_heads=12, d_qk=512, chunk_size=128),  # of table 4
    "ablation": Size(768, gated_blocks=22, attention_blocks=12, n_heads=12),
    "scaling-512": Size(512, gated_blocks=15, attention_blocks=8, n_heads=8),
    "scaling-768": Size(768, gated_blocks=22, attention_blocks=12, n_heads=12),
    "scaling-1024": Size(1024, gated_blocks=46, attention_blocks=24, n_heads=16),
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

# The parameter counts that the paper states, in millions.
PAPER_MILLIONS: dict[str, int] = {
    "flash-base": 112,
    "flash-quad-base": 112,
    "transformer-base": 110,
    "transformer+-base": 110,
    "transformer++-base": 110,
    "performer-base": 110,
    "combiner-base": 124,
    "flash-large": 496,
    "flash-quad-large": 496,
    "transformer+-large": 486,
    "transformer++-large": 486,
    "combiner-large": 562,
    "gau-ablation": 105,
    "gau-softmax-ablation": 105,
    "gau-multi-head-ablation": 105,
    "gau-ungated-ablation": 131,
    "mhsa-relu2-base": 110,
    "mhsa-single-head-base": 110,
}


def _names() -> dict[str, tuple[str, Size]]:
    """The system and the size of every preset, by its name."""
    names = {f"{system}-{size}": (system, SIZES[size]) for size in ("tiny", "base") for system in SYSTEMS}
    for size, systems in MORE_SIZES.items():
        for system in systems:
            # In the paper's ablations and scaling figure, GAU means a model of GAUs, which is FLASH-Quad.
            names[f"{system}-{size}"] = ("flash-quad" if system == "gau" else system, SIZES[size])
    return names


PRESETS: dict[str, tuple[str, Size]] = _names()


def model_of(system: System, size: Size, task: Task, **overrides: Any) -> ModelConfig:
    """The config of a system's model at a size, with other values for some fields and options.

    A name in `mixer` or `pattern` stands for the system's own mixer or, of another kind, for that of the system that sets the
    fewest options of it, at this size.
    """
    mixer = LayerConfig(system.mixer.name, **system.mixer_options(size))
    usual: dict[str, Any] = {
        "task": task,
        "vocab_size": size.vocab_size,
        "d_model": size.d_model,
        "n_blocks": size.gated_blocks,
        "mixer": mixer,
        "norm": "scalenorm" if task == "mlm" else "layernorm",
    }
    if system.feed_forward is not None:
        usual |= {"n_blocks": size.attention_blocks, "feed_forward": LayerConfig(system.feed_forward.name)}
    # Set before the others, because other mixers may learn what the system's cannot.
    given: dict[str, Any] = {name: overrides.pop(name) for name in ("mixer", "pattern") if name in overrides}
    values: dict[str, Any] = {"pattern": (), **usual, **system.fields, **given}
    if given or values["pattern"]:
        rows = sorted(SYSTEMS.values(), key=lambda row: len(row.options))
        known = [mixer, *(LayerConfig(row.mixer.name, **row.mixer_options(size)) for row in rows)]
        values["pattern"] = pattern = read_pattern(values["pattern"], known)
        if pattern and "mixer" not in given:
            values["mixer"] = pattern[0]
        values["mixer"] = next((each for each in known if each.kind == values["mixer"]), values["mixer"])
    return ModelConfig(**values).override(**({} if given else system.places)).override(**overrides)


def system_of(preset: str) -> System:
    """The system of a preset, a row of the table of systems. Raises ArgumentError for an unknown preset."""
    if preset not in PRESETS:
        like = did_you_mean(preset, PRESETS)
        raise ArgumentError("preset", f"is {preset!r}, which is not a preset{like}: use a name listed by `presets()`.")
    return SYSTEMS[PRESETS[preset][0]]


def presets(task: Task = "clm") -> dict[str, ModelConfig]:
    """The configurations that `build` knows by name, except those of systems that cannot learn the task."""
    systems = {name: (SYSTEMS[system], size) for name, (system, size) in PRESETS.items()}
    return {
        name: model_of(system, size, task)
        for name, (system, size) in systems.items()
        if all(why_not_learned(mixer, task) is None for mixer in system.mixers)
    }


def resolve(preset_or_config: str | ModelConfig, task: Task | None = None, **overrides: Any) -> ModelConfig:
    """The configuration that `build` builds from the same arguments."""
    if isinstance(preset_or_config, ModelConfig):
        return preset_or_config.override(**({} if task is None else {"task": task}), **overrides)
    if not isinstance(preset_or_config, str):
        raise ArgumentError("preset_or_config", f"is {preset_or_config!r}, but must be the name of a preset or a ModelConfig.")
    system, size = system_of(preset_or_config), PRESETS[preset_or_config][1]
    return model_of(system, size, task or "clm", **overrides)


def encoder_decoder_config(preset: str, **overrides: Any) -> EncoderDecoderConfig:
    """The config of an encoder-decoder with the layers and the size of a preset, half of whose blocks are on each side.

    Gated units read the source with one gated head. Transformers read it with as many heads as they have, softmax, and no gate.

    Args:
        preset: the name of a preset, such as "flash-tiny".
        **overrides: other values for fields, or for options of layers, as `EncoderDecoderConfig.override` takes them.

    Raises:
        ArgumentError: for an unknown preset, or one that makes no encoder-decoder; or as `override`.
    """
    # With scores that start near 1, small models learn to reverse strings or to map two words only much later, if at all.
    system, size = system_of(preset), replace(PRESETS[preset][1], initial_scores="small")
    if system.fields:
        fields = ", ".join(system.fields)
        raise ArgumentError("preset", f"is {preset!r}, which sets {fields}, but encoder-decoders do not: use another preset.")
    mixer, cross = LayerConfig(system.mixer.name, **system.mixer_options(size)), LayerConfig("cross-gau", d_qk=size.d_qk)
    feed_forward, blocks = None, size.gated_blocks
    if system.feed_forward is not None:
        feed_forward, blocks = LayerConfig(system.feed_forward.name), size.attention_blocks
        heads = mixer.options.get("n_heads", size.n_heads)
        cross = cross.override(n_heads=heads, d_qk=size.d_model, expansion=1, activation="softmax", gated=False)
    config = EncoderDecoderConfig(size.vocab_size, size.d_model, blocks // 2, blocks // 2, mixer, cross, feed_forward)
    return config.override(**overrides)


def values_of(config: ModelConfig | EncoderDecoderConfig) -> dict[str, Any]:
    """All values of a config by their names in `ModelConfig.override`, except the task and the layers themselves."""
    values = {name: value for name, value in vars(config).items() if name not in ("task", "mixer", "feed_forward")}
    pattern: tuple[LayerConfig, ...] = values.get("pattern", ())
    for part, layer in config.layers.items():
        values |= {f"{part}.{option}" if pattern else option: value for option, value in layer.options.items()}
    return values | ({"pattern": tuple(layer.kind for layer in pattern)} if pattern else {})


def nearest_preset(config: ModelConfig) -> str:
    """The preset with the same layers that needs the fewest overrides to equal this config.

    `resolve(nearest_preset(config), config.task, **values_of(config))` equals the config.

    Raises:
        ArgumentError: if no preset has these layers.
    """

    def kinds(other: ModelConfig) -> tuple[str, str | None]:
        mixer = "" if config.pattern else other.mixer.kind  # a pattern can be overridden in any preset
        return mixer, None if other.feed_forward is None else other.feed_forward.kind

    def differences(name: str) -> int:
        values = values_of(alike[name])
        return sum(values.get(field) != value for field, value in values_of(config).items())

    alike = {name: other for name, other in presets(config.task).items() if kinds(other) == kinds(config)}
    if not alike:
        mixer, feed_forward = kinds(config)
        raise ArgumentError(
            "preset",
            f"is a ModelConfig with the mixer {mixer!r} and the feed-forward layer {feed_forward!r}, which no preset has "
            "together: add a row to the table of systems (docs/systems.md), or train the model in a loop of your own.",
        )
    return min(alike, key=differences)


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
