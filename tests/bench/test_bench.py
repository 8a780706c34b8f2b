"""Benchmarks: what takes turns, what is kept after an error, and what is shown."""

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.bench import command
from lineartime.bench.command import Benchmark, Entry, draw_plots, make_benchmark, report, run_benchmark
from lineartime.bench.config import BenchConfig, Measure
from lineartime.bench.measure import (
    Case,
    Ready,
    RewindingStep,
    Subject,
    interleaved,
    median_and_spread,
    prepare,
    repetitions,
    state_after,
    timed,
)
from lineartime.errors import LineartimeError
from lineartime.generation.prompts import prefill_batch
from lineartime.models.cost import cost
from lineartime.models.systems import presets

CPU = torch.device("cpu")
FLASH = "flash-tiny:d_model=16:n_blocks=1:d_qk=8:chunk_size=8"
TRANSFORMER = "transformer++-tiny:d_model=16:n_blocks=1:n_heads=2"


def small(out: Path, **values: Any) -> BenchConfig:
    """Options of a benchmark of a second."""
    defaults: dict[str, Any] = {
        "presets": (FLASH, TRANSFORMER),
        "context_lengths": (8, 16),
        "positions": (8, 20),
        "tokens_per_batch": 32,
        "dtypes": ("fp32",),
        "rounds": 3,
        "min_seconds": 0.0,
        "device": "cpu",
        "out": out,
    }
    return BenchConfig(**{**defaults, **values})


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BenchConfig]:
    """Options of a benchmark of a second, without plots."""
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    return lambda **values: small(tmp_path / "bench", **values)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished benchmark of all measures, with three streams, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("bench"), StringIO()
    measures = ("train", "forward", "prefill", "decode")
    lengths: dict[str, Any] = {"context_lengths": (8, 64), "positions": (20,), "decode_batch": 3}
    with redirect_stdout(printed):
        run_benchmark(small(folder / "bench", measure=measures, **lengths))
    return folder / "bench", printed.getvalue()


def saved(folder: Path | None) -> dict[str, Any]:
    assert folder is not None
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def subject(name: str = "flash-tiny", mode: str = "eager", **values: Any) -> Subject:
    config = presets("clm")[name].override(d_model=16, n_blocks=2, vocab_size=20, **values)
    return Subject(name, mode, config)  # type: ignore[arg-type]


def measured(
    name: str, *seconds: float, measure: Measure = "train", length: int = 8, mode: str = "eager", **values: Any
) -> Entry:
    return Entry(Case(measure, length, "fp32", 4), subject(name, mode), seconds=seconds, **values)


def results_of(folder: Path, *entries: Entry) -> Benchmark:
    """The results of these entries, saved."""
    benchmark = Benchmark(small(folder), CPU, entries)
    benchmark.save(folder)
    return benchmark


def test_lengths_have_equally_many_tokens_and_as_many_streams_as_asked_for(finished: tuple[Path, str]) -> None:
    results = saved(finished[0])
    entries = results["entries"]
    found = {(each["measure"], each["length"]): (each["batch"], each["tokens"]) for each in entries}
    assert found == {
        **{(measure, length): batch for measure in ("train", "forward") for length, batch in ((8, (4, 32)), (64, (1, 64)))},
        **{("prefill", length): (3, 3 * length) for length in (8, 64)},
        ("decode", 20): (3, 3),
    }
    assert len(entries) == 2 * len(found)
    assert all(len(each["seconds"]) == 3 and each["problem"] is None for each in entries)
    assert all(each["ratio_to_first"] == 1.0 for each in entries if each["subject"] == FLASH)


def test_results_hold_options_machine_and_no_paths(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    results = saved(folder)
    assert results["options"]["rounds"] == 3
    assert datetime.fromisoformat(results["process"]["time"]) <= datetime.now(timezone.utc)
    assert results["process"]["versions"]["torch"] == torch.__version__
    assert str(folder.parent) not in json.dumps(results)
    assert results["subjects"][FLASH]["mixer"]["kind"] == "flash"
    text = (folder / "results.md").read_text()
    assert "## Train: one step, forward and backward, fp32" in text
    assert printed == f"{text}results: {folder}\n"
    pictures = {"latency.png", "decode.png"}
    assert {path.name for path in folder.iterdir()} == {"results.json", "results.md", *pictures}


def test_subjects_take_turns_until_they_fail() -> None:
    ticks = itertools.count()
    order: list[str] = []

    def fail() -> None:
        order.append("c")
        if order.count("c") == 2:
            raise RuntimeError("no")

    steps: dict[str, tuple[Callable[[], object], int]] = {
        "a": (lambda: order.append("a"), 2),
        "b": (lambda: order.append("b"), 1),
        "c": (fail, 1),
    }
    found = list(interleaved(steps, 3, lambda: float(next(ticks))))
    assert "".join(order) == "aaabc" + "cbaaa" + "aaab"  # back and forth; of three calls in a row, the first is not timed
    assert [key for key, _ in found] == list("abccbaab")
    assert [seconds for key, seconds in found if key == "a"] == [0.5, 0.5, 0.5]  # a tick for two calls
    assert isinstance(found[3][1], RuntimeError)


def test_growing_step_is_timed_near_its_beginning_and_going_back_takes_no_time() -> None:
    now, position, positions = 0.0, 50, []

    def step() -> None:
        nonlocal now, position
        positions.append(position)
        position += 1
        now += position / 10

    def rewind() -> None:
        nonlocal now, position
        position = 10
        now += 1000

    assert timed(RewindingStep(step, rewind, burst=3), 7, lambda: now) == pytest.approx((2 * (11 + 12 + 13) + 11) / 10 / 7)
    assert positions == [10, 11, 12, 10, 11, 12, 10]


def test_medians_spreads_and_ratios_of_rounds(tmp_path: Path) -> None:
    assert median_and_spread([4.0, 1.0, 2.0, 3.0, 100.0]) == (3.0, 2.0)
    assert median_and_spread([4.0]) == (4.0, None)
    first, second = measured("flash-tiny", 1.0, 2.0, 4.0), measured("transformer++-tiny", 2.0, 4.0, 4.0)
    other = measured("flash-quad-tiny", 8.0, length=16)
    results_of(tmp_path, first, second, other)
    assert second.ratio_to_first == 2.0  # of the rounds, 2, 2 and 1: noise that meets both alike does not count
    assert second.tokens_per_second == 32 / 4
    assert other.ratio_to_first == 1.0
    compiled = measured("flash-tiny", 2.0, mode="compiled", first_seconds=9.0)
    results_of(tmp_path, compiled)
    assert compiled.compile_seconds == 7.0
    assert repetitions(0.1, 0.25) == 3
    assert repetitions(9.0, 0.25) == 1


def failing(case_of: Callable[[Subject, Case], BaseException | None]) -> Callable[..., Ready]:
    """`prepare`, but steps of some cases end in an error."""

    def make(subject: Subject, case: Case, device: torch.device) -> Ready:
        ready = prepare(subject, case, device)
        error = case_of(subject, case)
        if error is not None:

            def step() -> None:
                raise error

            ready.step = step
        return ready

    return make


def test_failed_subject_has_the_reason_and_the_others_are_measured(
    options: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {8: ValueError("odd\nlong"), 16: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")}
    monkeypatch.setattr(command, "prepare", failing(lambda s, c: errors[c.length] if s.name == FLASH else None))
    config = options(measure=("train",))
    run_benchmark(config)
    entries = saved(config.out)["entries"]
    assert [(each["subject"], each["length"], each["problem"], len(each["seconds"])) for each in entries] == [
        (FLASH, 8, "failed: ValueError: odd", 0),
        (TRANSFORMER, 8, None, 3),
        (FLASH, 16, "out of memory", 0),
        (TRANSFORMER, 16, None, 3),
    ]
    assert "out of memory" in capsys.readouterr().out


def test_interrupt_keeps_what_was_measured(
    options: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "draw_plots", draw_plots)
    monkeypatch.setattr(command, "prepare", failing(lambda _, c: KeyboardInterrupt() if c.length == 16 else None))
    config = options(measure=("train",))
    assert config.out is not None
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(config)
    assert [each["length"] for each in saved(config.out)["entries"]] == [8, 8]
    assert {path.name for path in config.out.iterdir()} == {"results.json", "results.md", "latency.png"}
    assert re.search(r"interrupted: what was measured is in .*results.json", capsys.readouterr().err)


def test_results_are_never_overwritten(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match="holds results, and these are never overwritten: give another folder"):
        run_benchmark(small(finished[0]))
    monkeypatch.chdir(tmp_path)
    assert BenchConfig().folder() == Path("runs/bench")
    Path("runs/bench").mkdir(parents=True)
    assert BenchConfig().folder() == Path("runs/bench-2")


def test_state_of_zeros_is_like_the_real_one() -> None:
    names = ("flash-tiny", "hybrid-attention-tiny", "transformer++-tiny", "performer-tiny", "longformer-tiny", "combiner-tiny")
    ids = torch.randint(0, 200, (2, 260))
    for name, low in [*((name, False) for name in names), *((name, True) for name in names[:4])]:
        model = lineartime.build(name, n_blocks=5 if "hybrid" in name else 2, d_model=64)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            zeros, real = state_after(model, ids), prefill_batch(model, ids)[1]
            for state in (zeros, real):
                assert state.position.tolist() == [260, 260], name
            assert [(x.shape, x.dtype) for x in zeros.tensors()] == [(x.shape, x.dtype) for x in real.tensors()], name
            model.extend(ids[:, :1], zeros)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "mlm"}, "^measure has prefill, which needs `task=clm`: leave it out"),
        (
            {"presets": ("transformer-tiny",), "positions": (1024,)},
            "^presets has transformer-tiny, which reads at most 1,024 tokens, but is asked to read 1,026: .*max_positions=1026",
        ),
        ({"presets": ("flash-tiny:chunk=3",)}, "^presets has 'flash-tiny:chunk=3', but override .*: chunk is not an option"),
        ({"presets": ("flash-tiny:task=mlm",)}, "^presets has 'flash-tiny:task=mlm', but override cannot set task"),
        # What this machine lacks, here of a GPU without bf16, and of a compiler.
        ({"dtypes": ("fp32", "bf16")}, "^dtypes has bf16, which this GPU does not support: leave it out"),
        ({"modes": ("eager", "compiled")}, r"^modes has compiled, but there is no C\+\+ compiler here: install g\+\+, or"),
    ],
)
def test_wrong_options_are_named(
    options: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("lineartime.bench.command.supports_bf16", lambda device: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    config = options(**values)
    with pytest.raises(LineartimeError, match=message):
        run_benchmark(config)
    assert config.out is not None
    assert not config.out.exists()


def test_presets_with_other_options_are_models_of_their_own(options: Callable[..., BenchConfig]) -> None:
    other = "hybrid-gau-tiny:d_qk=8:pattern.3.d_qk=16:pattern.0.d_qk=4"
    entries = make_benchmark(options(presets=(FLASH, f"{FLASH}:n_blocks=3", other), vocab_size=9)).entries
    models = {found.subject.name: found.subject.config for found in entries}
    assert [config.n_blocks for config in models.values()][:2] == [1, 3]
    assert [mixer.options["d_qk"] for mixer in models[other].mixers] == [4, 8, 8, 16]


def test_peer_of_the_scripts_takes_steps_at_the_sizes_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flash_pytorch")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    ours = subject(d_qk=8, chunk_size=8).config
    peer = runpy.run_path(str(SCRIPT.with_name("peer.py")))["Peer"]("flash-pytorch", "eager", ours)
    ready = prepare(peer, Case("train", 16, "fp32", 2), CPU)
    ready.step()
    assert ready.model.model.token_emb.weight.grad.any()
    assert peer.forward_flops(16) == pytest.approx(cost(ours, 16).flops_per_token, rel=0.3)


def test_tables_leave_out_empty_columns(tmp_path: Path) -> None:
    results = results_of(
        tmp_path,
        measured("flash-tiny", 1.0, 2.0, peak_bytes=2_500_000),
        measured("transformer++-tiny", problem="out of memory"),
        measured("flash-tiny", 0.001, measure="decode", state_bytes=400),
        measured("flash-quad-tiny"),  # was not reached
    )
    text = report(results)
    assert "| context | batch | model | ms | spread | tokens/s | x first | peak |\n" in text
    assert "| 8 | 4 | flash-tiny | 1,500 | 500 | 21.3 | 1.00 | 2.5 MB |\n" in text
    assert "| 8 | 4 | transformer++-tiny | out of memory | - | - | - | - |\n" in text
    assert "| position | batch | model | ms | tokens/s | x first | state |\n" in text
    assert "flash-quad-tiny" not in text
    draw_plots(results, tmp_path)
    assert {file.name for file in tmp_path.glob("*.png")} == {"latency.png", "memory.png", "decode.png"}


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = ["smoke", "models", "generation", "kernels", "lengths", "ops", "peers", "exactness"]


@pytest.mark.nightly
def test_parts_run_from_a_bare_clone_and_writes_its_tables(tmp_path: Path) -> None:
    """From another folder, where the package is not installed and what the command line needs is absent.

    Where there is no GPU, kernels run in Triton's interpreter.
    """
    pytest.importorskip("triton")
    script = f"""
import runpy, sys
for name in ("tyro", "rich", "datasets", "tensorboardX", "tokenizers", "matplotlib"):
    sys.modules[name] = None
sys.argv, sys.path[0] = [{str(SCRIPT)!r}, *sys.argv[1:]], {str(SCRIPT.parent)!r}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", script, "--rehearse", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert {row["part"]: row["result"] for row in data["tables"]["parts"]} == dict.fromkeys(PARTS, "done")
    assert {"errors", "train", "profile", "generation", "kernels", "ops"} <= set(data["tables"])
    assert {row["dtype"] for row in data["tables"]["errors"]} == {"bfloat16", "float32", "float16"}
    assert all(row["worst_ratio"] <= 2 and row["same_bits"] for row in data["tables"]["errors"])
    assert all(isinstance(row["ms"], float) or row["ms"].startswith("not measured: ") for row in data["tables"]["train"])
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "- share of calls that give the same bits twice: 1, goal >= 1\n" in text
    assert "- error of the kernels / of PyTorch in the same dtype: " in text
