"""Several processes on one machine, over gloo: whatever they share, the run is that of one process."""

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.checkpoint import last_checkpoint, list_checkpoints, read_validation_loss
from lineartime.errors import LineartimeError
from lineartime.runs.record import last_error, read_record
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.training.parallel import Environment, read_environment

MakeConfig = Callable[..., TrainConfig]
Launch = Callable[..., Any]


def trained(config: TrainConfig) -> Path:
    """Train, and return the run's folder."""
    return train(config).run


pytestmark = pytest.mark.slow


def metrics(run: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def assert_same_run(run: Path, expected: Path) -> None:
    for name in ("loss", "gradient_norm", "validation_loss"):
        found, wanted = metrics(run, name), metrics(expected, name)
        if name == "validation_loss":  # a run is also evaluated where it is interrupted
            found = {step: loss for step, loss in found.items() if step in wanted}
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5), name
    weights = lineartime.load(last_checkpoint(run)).state_dict()
    for name, weight in lineartime.load(last_checkpoint(expected)).state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"packed": True, "optimizer": "muon"}),
        (3, {"optimizer": "muon", "parallel": "fsdp", "tokens_per_batch": 12 * 32, "recompute": True}),
        (4, {"context_parallel": 2, "task": "mlm", "batch_size": 2}),
        pytest.param(4, {"context_parallel": 4, "parallel": "fsdp"}, marks=pytest.mark.nightly),
    ],
    ids=["ddp", "fsdp", "context", "context-fsdp"],
)
def test_any_number_of_processes_gives_the_run_of_one(
    config: MakeConfig, launch: Launch, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    common = {"context_length": 32, "tokens_per_batch": 8 * 32, "batch_size": 4, "steps": 3, "eval_every": 3}
    alone = {key: value for key, value in options.items() if key in ("task", "packed", "optimizer", "tokens_per_batch")}
    for name, changed, count in (("one", alone, 1), ("run", options, size)):
        processes = launch(config(**{**common, **changed}, out=tmp_path / name), count, before=KEEP_GRADIENTS)
        assert processes.wait() == [0] * count, processes.errors()
    assert_same_run(tmp_path / "run", tmp_path / "one")
    one, several = (torch.load(tmp_path / f"{name}-gradients.pt") for name in ("one", "run"))
    for a, b in zip(several, one, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# The gradients of the first step, whole, from the main process.
KEEP_GRADIENTS = """
import lineartime.training.loop as loop
build = loop.build_optimizer
def watched(model, config):
    optimizer = build(model, config)
    step = optimizer.step
    def keep_and_step():
        gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        file = config.out.with_name(config.out.name + "-gradients.pt")
        if os.environ["RANK"] == "0" and not file.exists():
            torch.save(gradients, file)
        step()
    optimizer.step = keep_and_step
    return optimizer
loop.build_optimizer = watched
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (({"clip_tokens": 4 * 32}, 1), ({"clip": "local"}, 2)),
        pytest.param(
            ({"clip_tokens": 4 * 32, "batch_size": 1}, 1),
            ({"clip_tokens": 4 * 32, "context_parallel": 2}, 2),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["local", "context"],
)
def test_gradients_of_so_many_tokens_are_clipped_alike_by_any_number_of_processes(
    config: MakeConfig, launch: Launch, tmp_path: Path, first: tuple[Any, int], second: tuple[Any, int]
) -> None:
    common = {"context_length": 32, "tokens_per_batch": 8 * 32, "batch_size": 4, "steps": 3, "eval_every": 3, "clip_norm": 0.01}
    for name, (options, size) in (("one", first), ("run", second)):
        processes = launch(config(**{**common, **options}, out=tmp_path / name), size)
        assert processes.wait() == [0] * size, processes.errors()
    assert_same_run(tmp_path / "run", tmp_path / "one")
    trained(config(**common, out=tmp_path / "global"))
    assert metrics(tmp_path / "global", "loss") != pytest.approx(metrics(tmp_path / "one", "loss"), rel=1e-6)


def test_run_saved_by_four_processes_goes_on_with_two_and_with_one(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    common = {
        "optimizer": "muon",
        "tokens_per_batch": 4 * 24,
        "batch_size": 4,
        "override": (*config().override, "dropout=0.0"),
    }
    expected = trained(config(**common, out=tmp_path / "one"))
    for size, last in ((4, 2), (2, 4)):
        resume = config(**common, parallel="fsdp", resume=size != 4)
        assert launch(resume, size, before=stop_after(last)).wait() == [0] * size
        assert last_checkpoint(tmp_path / "run").name == f"step-0000000{last}"
        assert read_validation_loss(last_checkpoint(tmp_path / "run")) is not None  # all processes evaluated it together
    trained(config(**common, resume=True))
    assert_same_run(tmp_path / "run", expected)


def stop_after(step: int) -> str:
    """What makes the last process alone receive a signal in that step: all have to agree."""
    return f"""
import signal
import lineartime.training.loop as loop
take = loop.Trainer.take_step
def take_and_stop(self, report, stop):
    if self.step + 1 == {step} and self.world.rank == self.world.size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return take(self, report, stop)
loop.Trainer.take_step = take_and_stop
"""


def test_two_processes_with_muon_resume_to_the_bit(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    options = {"optimizer": "muon", "parallel": "ddp", "tokens_per_batch": 4 * 24}
    assert launch(config(**options, out=tmp_path / "one"), 2).wait() == [0, 0]
    assert launch(config(**options), 2, before=stop_after(2)).wait() == [0, 0]
    assert launch(config(**options, resume=True), 2).wait() == [0, 0]
    weights, wanted = (lineartime.load(last_checkpoint(tmp_path / name)).state_dict() for name in ("run", "one"))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert metrics(tmp_path / "run", "loss") == metrics(tmp_path / "one", "loss")


@pytest.mark.nightly
def test_context_longer_than_the_held_out_text_is_measured_in_shorter_windows(
    config: MakeConfig, launch: Launch, tmp_path: Path
) -> None:
    long = config(context_length=1024, context_parallel=2, batch_size=1, steps=1)  # 5% of the text are 690 tokens
    processes = launch(long, 2)
    assert processes.wait() == [0, 0], processes.errors()
    assert metrics(tmp_path / "run", "validation_loss")[1] > 0


def test_streamed_run_of_two_processes_resumes_to_the_bit(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i} times {i} is {i * i}. " * (1 + i % 3)}) + "\n" for i in range(600)))
    common = {"data": str(file), "streaming": True, "tokens_per_batch": 4 * 24}
    assert launch(config(**common, out=tmp_path / "one"), 2).wait() == [0, 0]
    assert launch(config(**common), 2, before=stop_after(3)).wait() == [0, 0]
    assert launch(config(**common, resume=True), 2).wait() == [0, 0]
    assert_same_run(tmp_path / "run", tmp_path / "one")


@pytest.mark.nightly
def test_in_bf16_fsdp_trains_as_ddp_does(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    for name in ("ddp", "fsdp"):
        processes = launch(config(parallel=name, precision="bf16", steps=4, out=tmp_path / name), 2)
        assert processes.wait() == [0, 0], processes.errors()
    found, wanted = (metrics(tmp_path / name, "loss") for name in ("fsdp", "ddp"))
    assert found == pytest.approx(wanted, rel=1e-5), "the residual stream must stay in float32"


EVERY_SYSTEM = """
import torch
import torch.distributed as dist
import lineartime
from lineartime.machine import autocast
from lineartime.models import presets
from lineartime.training.parallel import World
from lineartime.training.parallel import Objective, Sharded

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name in [name for name in presets("mlm") if name.endswith("-tiny")]:
    model = lineartime.build(name, task="clm" if name in presets("clm") else "mlm", n_blocks=1, vocab_size=64)
    ids = torch.randint(0, 64, (2, 128))
    with autocast(torch.device("cpu"), True):
        expected = Objective(model)(ids, ids)
        loss = Sharded(Objective(model), World(), bf16=True).objective(ids, ids)
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 5e-4, name
"""


@pytest.mark.nightly
def test_every_system_has_the_same_loss_under_fsdp_in_bf16(fork: Callable[[str], Any]) -> None:
    """Blocks have parameters in bf16 there, and a residual stream in float32."""
    process = fork(EVERY_SYSTEM)
    assert process.wait() == 0, process.output


def test_two_processes_train_one_run_after_another(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    first = 'import dataclasses\ntrain(dataclasses.replace(config, out=Path(str(config.out) + "-first")))'
    processes = launch(config(steps=2), 2, before=first)
    assert processes.wait() == [0, 0], processes.errors()
    assert_same_run(tmp_path / "run", tmp_path / "run-first")


def test_process_that_never_starts_ends_the_others_in_time(config: MakeConfig, launch: Launch) -> None:
    for only, size in (((0, 2), 3), ((1,), 2)):  # with the process that serves the store, and without it
        processes = launch(config(timeout=2.0), size, only=only)
        assert processes.wait(30) == [1] * len(only)
        said = [file.read_text() for file in processes.folder.iterdir()]
        assert any(f"Process {only[0]} of {size} did not find the others within 2 s (timeout; " in each for each in said)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_process_that_is_lost_while_training_ends_the_others_in_time(
    config: MakeConfig, launch: Launch, tmp_path: Path, how: signal.Signals
) -> None:
    processes = launch(config(steps=100_000, eval_every=50_000, timeout=3.0), 2)
    wait_for_step(tmp_path / "run", 3)
    processes.processes[1].send(how)
    assert processes.processes[0].wait(60) == 1
    said = "A process of the run was lost, or exchanged nothing for 3 s (timeout)"
    assert said in processes.errors()[0]
    assert said in (last_error(read_record(tmp_path / "run")) or "")
    assert "resume the run from its last checkpoint" in processes.errors()[0]


def test_error_of_one_process_is_said_once(config: MakeConfig, launch: Launch) -> None:
    processes = launch(config(data="/does/not/exist"), 2)
    assert processes.wait(60) == [1, 1]
    first, second = processes.errors()
    assert first.startswith("ArgumentError: data is /does/not/exist, which is neither a file or folder")
    assert second.startswith("ReportedError")  # which the command line does not show


@pytest.mark.parametrize(
    ("changed", "speaker", "message"),
    [
        ("out=Path('elsewhere')", 0, "is not the same folder for 1 of the 3 processes"),
        ("learning_rate=0.03", 0, "Process 2 was started for another run than process 0: learning_rate is 0.03 there"),
        ("decay_steps=5", 2, "decay_steps is 5, but linear schedules have no decay: use `schedule='wsd'`, or leave it out."),
    ],
    ids=["folder", "options", "value"],
)
def test_process_that_differs_ends_all_at_once_and_one_says_why(
    config: MakeConfig, launch: Launch, changed: str, speaker: int, message: str
) -> None:
    other = f"""
import dataclasses
if os.environ["RANK"] == "2":
    config = dataclasses.replace(config, {changed})
"""
    processes = launch(config(), 3, before=other)
    assert processes.wait(60) == [1, 1, 1]  # long before the timeout
    said = processes.errors()
    assert message in said[speaker]
    assert [rank for rank in range(3) if not said[rank].startswith("ReportedError")] == [speaker]


def test_text_that_one_process_cannot_read_ends_all_and_is_on_record(
    config: MakeConfig, launch: Launch, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"{i} times {i} is {i * i}. "}) for i in range(600)]
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.jsonl").write_text("\n".join(lines))
    (tmp_path / "text" / "train.jsonl").write_text("\n".join([*lines[:301], '{"text": 5}', *lines[302:]]))
    options = {"data": str(tmp_path / "text"), "streaming": True, "tokens_per_batch": 4 * 24}
    processes = launch(config(**options, steps=100, eval_every=100), 2)
    assert processes.wait(120) == [1, 1]
    said = sorted(processes.errors())
    assert [each.partition(":")[0] for each in said] == ["LineartimeError", "ReportedError"]
    error = last_error(read_record(tmp_path / "run"))
    assert error is not None
    assert "line 302" in error


def test_tokenizer_that_the_main_process_trained_is_that_of_all(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    # As if a machine of its own had trained another tokenizer: unigram tokenizers differ from one training to the next.
    other = f"""
if os.environ["RANK"] == "1":
    import dataclasses
    import lineartime.training.setup as setup
    own = setup.tokenizer_for
    def with_another_one(choice, corpus, cache):
        return own("bpe-300", corpus, Path({str(tmp_path / "cache-1")!r}))
    setup.tokenizer_for = with_another_one
"""
    processes = launch(config(tokenizer="bpe-400"), 2, before=other)
    assert processes.wait(120) == [0, 0], processes.errors()


@pytest.mark.nightly
def test_killed_at_any_moment_six_times_a_run_loses_nothing(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 70, "eval_every": 3, "eval_windows": 1, "timeout": 10.0, "tokens_per_batch": 4 * 24}
    expected = trained(config(**options, out=tmp_path / "one"))
    run, chance, kills = tmp_path / "run", random.Random(5), 0
    while kills < 6:
        processes = launch(config(**options, resume=bool(list_checkpoints(run))), 2)
        # From before the first step to some way on: every moment can be hit, and there is progress on the whole.
        wait_for_step(run, 0 if not list_checkpoints(run) else int(last_checkpoint(run).name[5:]))
        time.sleep(chance.random() * 0.4)
        victim = processes.processes[chance.randrange(2)]
        if not victim.is_running:
            break
        victim.send(signal.SIGKILL)
        kills += 1
        codes = processes.wait(60)
        assert None not in codes, "one that was not killed did not end"
        assert -signal.SIGKILL in codes
    assert kills == 6
    processes = launch(config(**options, resume=True), 2)
    assert processes.wait() == [0, 0], processes.errors()
    assert_same_run(run, expected)


def wait_for_step(run: Path, step: int) -> None:
    """Wait until that step, or the first checkpoint, is on record."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        file = run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
        if max(steps, default=0) >= step and list_checkpoints(run):
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} did not come to step {step}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "flash-quad-tiny", "override": ("d_model=16",)}, "context_parallel needs a model of FLASH, but GAU reads"),
        ({}, "context_length is 24, but must be a multiple of 16: 2 processes"),
    ],
)
def test_options_that_do_not_fit_the_processes_are_named(
    config: MakeConfig, launch: Launch, options: dict[str, Any], message: str
) -> None:
    processes = launch(config(context_parallel=2, **options), 2)
    assert processes.wait(30) == [1, 1]
    first, second = processes.errors()
    assert message in first
    assert second.startswith("ReportedError")  # it is said once


def test_steps_that_cannot_be_divided_are_named(config: MakeConfig) -> None:
    for options, message in (
        ({"tokens_per_batch": 96}, "tokens_per_batch is 96, .* multiple of 72, which is 3 processes x `context_length`"),
        ({"clip_tokens": 36}, "clip_tokens is 36, .* multiple of `context_length=24` that divides the 48 tokens"),
    ):
        with pytest.raises(LineartimeError, match=message):
            replace(config(), **options).rows(0, 3)


def test_error_between_two_exchanges_of_the_set_up_is_told_at_once(config: MakeConfig, launch: Launch) -> None:
    """The other process must neither wait in the store for text that nobody prepares, nor hide the error by a time-out."""
    before = """
import os
import lineartime.training.setup as setup
def fail(config):
    raise LineartimeError("the first process has no memory left")
if os.environ["RANK"] == "0":
    setup.build_model = fail
"""
    start = time.monotonic()
    processes = launch(config(timeout=60.0), 2, before=before)
    assert processes.wait() == [1, 1]
    assert time.monotonic() - start < 40
    assert any("the first process has no memory left" in error for error in processes.errors())


def test_environment_of_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # of another program: one process alone is the first
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert read_environment() == Environment()
    values = {"WORLD_SIZE": 4, "RANK": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert read_environment() == Environment(4, 3, 1, 2, 1, 2, 0)
    for name, value, message in (
        ("LOCAL_RANK", "one", "is 'one', but must be a whole number below 4: start the"),
        ("RANK", "4", "is '4', but must be a whole number below 4"),
        ("RANK", "", "is '', but must be a whole number below 4"),  # all processes would be the first, and wait for the others
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(LineartimeError, match=f"^{name} in the environment {message}"):
                read_environment()
