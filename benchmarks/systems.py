"""Write the table of systems into docs/systems.md, from the registry: `make tables`."""

import re
from pathlib import Path

import torch

from lineartime.markdown import markdown_table
from lineartime.models.cost import stream_bytes
from lineartime.models.presets import SIZES, model_of
from lineartime.models.systems import SYSTEMS, System

PAGE = Path(__file__).parents[1] / "docs" / "systems.md"


def systems_table() -> str:
    """All systems as a Markdown table: description, source file, feed-forward layer, and how a stream's memory grows."""
    header = ["system", "what it is", "code", "feed-forward", "memory of a stream"]
    rows = []
    for name, system in SYSTEMS.items():
        code = ", ".join(f"`{'/'.join(mixer.__module__.split('.')[1:])}.py`" for mixer in system.mixers)
        feed_forward = "none" if system.feed_forward is None else {"mlp": "MLP", "glu": "GEGLU"}[system.feed_forward.name]
        rows.append([f"`{name}`", system.describe(), code, feed_forward, memory(system)])
    return markdown_table(header, rows, left=len(header))


def memory(system: System) -> str:
    """How the state of a stream grows with the number of tokens read.

    One that grows as fast as a cache of keys and values grows with tokens, even if it does so a chunk at a time, as Combiner's.
    """
    if any(mixer.why_not_causal for mixer in system.mixers):
        return "bidirectional only"
    config = model_of(system, SIZES["tiny"], "clm")
    short, longer, long = (stream_bytes(config, length) or 0 for length in (256, 257, 512))
    if short == long:
        return "constant"
    of_keys_and_values = (512 - 256) * config.n_blocks * 2 * config.d_model * torch.float32.itemsize
    return "grows with chunks" if short == longer and long - short < of_keys_and_values else "grows with tokens"


def main() -> None:
    table = f"\\1\n\n{systems_table()}\n<!-- end -->"
    text, found = re.subn(r"(<!-- systems: .*? -->).*?<!-- end -->", table, PAGE.read_text(), count=1, flags=re.DOTALL)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table of systems.")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
