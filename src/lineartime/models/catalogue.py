"""The table of systems for the documentation."""

import torch

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
    """How the state of a stream grows with the number of tokens read.

    One that grows as fast as a cache of keys and values grows with tokens, even if it does so a chunk at a time, as Combiner's.
    """
    if config.mixer.layer.why_not_causal is not None:
        return "bidirectional only"
    short, longer, long = (stream_bytes(config, length) or 0 for length in (256, 257, 512))
    if short == long:
        return "constant"
    of_keys_and_values = (512 - 256) * config.n_blocks * 2 * config.d_model * torch.float32.itemsize
    return "grows with chunks" if short == longer and long - short < of_keys_and_values else "grows with tokens"
