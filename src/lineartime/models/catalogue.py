"""The models that can be built by name: what each of them costs, whether it is as large as in the paper, and what it is."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lineartime.models.config import ModelConfig
from lineartime.models.cost import cost, count_parameters, stream_bytes
from lineartime.models.presets import PAPER_MILLIONS, PRESETS, SIZES, model_of, presets
from lineartime.models.systems import SYSTEMS


@dataclass(frozen=True)
class PresetCost:
    """A preset and what it costs.

    Attributes:
        name: the preset.
        config: the model: causal, if the system can be causal.
        context_length: tokens for which the costs hold: fewer than asked for, if the model cannot read so many.
        parameters: number of learned parameters.
        flops_per_token: floating-point operations of the matrix products in a forward pass over the context, per token.
        state_bytes: memory of one stream after the context, in float32; None for a model that only looks both ways.
    """

    name: str
    config: ModelConfig
    context_length: int
    parameters: int
    flops_per_token: float
    state_bytes: int | None


def preset_costs(names: Iterable[str], context_length: int) -> Iterator[PresetCost]:
    """Count the costs of presets, one after another: large models take a moment."""
    causal, bidirectional = presets("clm"), presets("mlm")
    for name in names:
        model = causal.get(name) or bidirectional[name]
        length = min(context_length, model.longest_sequence or context_length)
        yield PresetCost(name, model, length, *cost(model, length))


@dataclass(frozen=True)
class PaperSize:
    """The number of parameters of a preset, and the millions that the paper states for it."""

    name: str
    parameters: int
    millions: int

    @property
    def agrees(self) -> bool:
        """Whether both are the same number of millions."""
        return round(self.parameters / 1e6) == self.millions


def paper_sizes(names: Iterable[str]) -> Iterator[PaperSize]:
    """Compare presets with the paper, one after another; presets whose size the paper does not state are left out."""
    for name in names:
        if name in PAPER_MILLIONS:
            yield PaperSize(name, count_parameters(presets("clm")[name]), PAPER_MILLIONS[name])


def presets_with(parts: Iterable[str]) -> list[str]:
    """The presets whose name contains one of these parts; all of them, if there is none."""
    parts = tuple(parts)
    return [name for name in PRESETS if not parts or any(part in name for part in parts)]


def systems_table() -> str:
    """All systems as a Markdown table, which the documents show: what and where each is, and how its memory grows."""
    lines = ["| system | what it is | code | feed-forward | memory of a stream |", "| --- | --- | --- | --- | --- |"]
    for name, system in SYSTEMS.items():
        code = "/".join(system.mixer.__module__.split(".")[1:]) + ".py"
        feed_forward = "none" if system.feed_forward is None else {"mlp": "MLP", "glu": "GEGLU"}[system.feed_forward.name]
        cells = [f"`{name}`", system.describe(), f"`{code}`", feed_forward, _memory(model_of(system, SIZES["tiny"], "clm"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _memory(config: ModelConfig) -> str:
    """How the state of a stream grows with what it has read."""
    if config.mixer.layer.why_not_causal is not None:
        return "looks both ways only"
    short, longer, long = (stream_bytes(config, length) for length in (256, 257, 512))
    if short == long:
        return "constant"
    return "grows with chunks" if short == longer else "grows with tokens"
