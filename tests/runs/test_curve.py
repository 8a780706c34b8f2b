"""The plots of losses."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lineartime.runs.curve import draw_curve, thinned


@pytest.mark.parametrize("steps", [1, 19, 45])
def test_mean_of_the_last_steps_begins_where_there_are_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    text = "".join(f'{{"step": {step}, "loss": {float(step)}}}\n' for step in range(1, steps + 1))
    (tmp_path / "metrics.jsonl").write_text(text)
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_curve(tmp_path)
    each, *means = figures[0].axes[0].lines
    assert len(each.get_xdata()) == steps
    assert each.get_marker() == ("o" if steps == 1 else "None")  # else a single step cannot be seen
    found = [list(zip(*line.get_data(), strict=True)) for line in means]
    assert found == ([[(step, step - 9.5) for step in range(20, steps + 1)]] if steps >= 20 else [])
    lines = [{"step": step, "loss": float(step)} for step in range(1, steps + 1)]
    averaged = [{"step": step, "loss": step - 9.5} for step in range(20, steps + 1)]
    assert thinned(lines) == (averaged or lines)  # a short run shows each step
