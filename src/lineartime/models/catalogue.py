"""The table of systems for the documentation."""

from lineartime.markdown import markdown_table
from lineartime.models.config import ModelConfig
from lineartime.models.cost import stream_bytes
from lineartime.models.presets import SIZES, model_of
from lineartime.models.systems import SYSTEMS


def systems_table() -> str:
    """All systems as a Markdown table: description, source file, feed-forward layer, and how a stream's memory grows."""
    header = ["system", "what it is", "code", "feed-forward", "memory of a stream"]
    rows = []
    for name, system in SYSTEMS.items():
        code = "/".join(system.mixer.__module__.split(".")[1:]) + ".py"
        feed_forward = "none" if system.feed_forward is None else {"mlp": "MLP", "glu": "GEGLU"}[system.feed_forward.name]
        memory = _memory(model_of(system, SIZES["tiny"], "clm"))
        rows.append([f"`{name}`", system.describe(), f"`{code}`", feed_forward, memory])
    return markdown_table(header, rows, left=len(header))


def _memory(config: ModelConfig) -> str:
    """How the state of a stream grows with the number of tokens read."""
    if config.mixer.layer.why_not_causal is not None:
        return "bidirectional only"
    short, longer, long = (stream_bytes(config, length) for length in (256, 257, 512))
    if short == long:
        return "constant"
    return "grows with chunks" if short == longer else "grows with tokens"
