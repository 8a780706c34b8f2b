"""How the time per token grows with the length of the context: `python benchmarks/length.py` (about 10 minutes on 2 cores).

Training: one step (forward, backward) over 8,192 tokens, cut into sequences of the given length.
Generation: one token after so many others; the states of quadratic models are filled with zeros, which cost as much as text.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import interleaved, markdown, save

import lineartime
from lineartime.machine import choose_precision
from lineartime.models import CausalLM
from lineartime.models.backbone import BackboneState
from lineartime.ops import KVCache, MixedChunkState

PRESETS = ["flash-tiny", "flash-quad-tiny", "transformer++-tiny"]
LENGTHS = [512, 1024, 2048, 4096, 8192]
POSITIONS = [1024, 8192, 65536]
TOKENS = 8192


def training_step(model: CausalLM, length: int, bf16: bool) -> Callable[[], None]:
    ids = torch.randint(0, 256, (TOKENS // length, length + 1))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()

    return step


def state_after(model: CausalLM, tokens: int) -> BackboneState:
    """The state after so many tokens, as large as the real one."""
    states: list[object] = []
    for state in model.init_state(1):
        if isinstance(state, MixedChunkState):
            states.append(state._replace(position=tokens))
        else:
            assert isinstance(state, KVCache)
            states.append(KVCache(*(x.new_zeros(*x.shape[:-2], tokens, x.shape[-1]) for x in state)))
    return tuple(states)


def generation_step(model: CausalLM, position: int) -> Callable[[], None]:
    state, token = state_after(model, position), torch.zeros(1, 1, dtype=torch.long)

    def step() -> None:
        with torch.no_grad():
            model.extend(token, state)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case, of which the median is taken")
    rounds = parser.parse_args().rounds
    bf16 = choose_precision("auto", torch.device("cpu")) == "bf16"
    models = {name: lineartime.build(name) for name in PRESETS}
    rows = []
    for length in LENGTHS:
        seconds = interleaved({name: training_step(model, length, bf16) for name, model in models.items()}, rounds)
        rows += [
            {"what": "training", "preset": n, "length": length, "us_per_token": 1e6 * s / TOKENS} for n, s in seconds.items()
        ]
        print(rows[-3:], flush=True)
    for position in POSITIONS:
        seconds = interleaved({name: generation_step(model, position) for name, model in models.items()}, 4 * rounds)
        rows += [{"what": "generation", "preset": n, "length": position, "us_per_token": 1e6 * s} for n, s in seconds.items()]
        print(rows[-3:], flush=True)
    save("length", rows, table(rows))
    draw(rows)


def table(rows: list[dict[str, object]]) -> str:
    cells = {(row["what"], row["preset"], row["length"]): row["us_per_token"] for row in rows}
    header = ["µs per token", *[f"train {n:,}" for n in LENGTHS], *[f"generate at {n:,}" for n in POSITIONS]]
    columns = [("training", n) for n in LENGTHS] + [("generation", n) for n in POSITIONS]
    return markdown(header, [[f"`{name}`", *[f"{cells[what, name, n]:,.0f}" for what, n in columns]] for name in PRESETS])


def draw(rows: list[dict[str, object]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("training", "generation"), strict=True):
        for name in PRESETS:
            points = [(row["length"], row["us_per_token"]) for row in rows if (row["what"], row["preset"]) == (what, name)]
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        lengths = LENGTHS if what == "training" else POSITIONS
        axes.set(xscale="log", xticks=lengths, xticklabels=[f"{n:,}" for n in lengths], title=what)
        axes.set(yscale="log", ylim=(50, 5000) if what == "training" else (1000, 1_000_000))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.set(xlabel="tokens in a sequence" if what == "training" else "tokens already read", ylabel="µs per token")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(Path(__file__).parents[1] / "docs" / "length.png", dpi=110)


if __name__ == "__main__":
    main()
