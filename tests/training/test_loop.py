"""Runs: what they learn, how they stop and go on, and what they refuse."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lineartime
from lineartime import machine
from lineartime.checkpoint import (
    last_checkpoint,
    list_checkpoints,
    read_training_state,
    read_validation_loss,
)
from lineartime.choices import Task
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM, MaskedLM
from lineartime.runs import metrics as run_metrics
from lineartime.runs.record import read_record
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Stop, Trainer, Validation, interrupts, prepare, train
from lineartime.training.saving import saved_config

MakeConfig = Callable[..., TrainConfig]
InterruptAfter = Callable[[int], AbstractContextManager[None]]


def trained(config: TrainConfig) -> Path:
    """Train, and return the run's folder."""
    return train(config).run


def resumed(run: Path, **options: Any) -> Path:
    """Resume, and return the run's folder."""
    return train(out=run, resume=True, **options).run


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run) if "loss" in line]


def validations(run: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["validation_loss"]) for line in metrics(run) if "validation_loss" in line]


def test_step_without_masked_tokens_has_no_loss(config: MakeConfig) -> None:
    run = trained(
        config(task="mlm", context_length=8, batch_size=1, steps=20, learning_rate=1e-5, override=("d_model=16", "n_blocks=1"))
    )
    known = dict(losses(run))
    assert 0 < len(known) < 20  # 0.85^8 = 27 % of the steps have none
    assert min(known.values()) > 5  # of ln 258 = 5.55, as nothing is learned
    assert {line["step"] for line in metrics(run) if "gradient_norm" in line} == set(range(1, 21))


@pytest.mark.parametrize(("task", "kind"), [("clm", CausalLM), ("mlm", MaskedLM), ("prefix-lm", CausalLM)])
def test_model_of_each_task_learns(
    config: MakeConfig, capsys: pytest.CaptureFixture[str], task: Task, kind: type[CausalLM | MaskedLM]
) -> None:
    override = ("d_model=32", "n_blocks=1", "d_qk=16")
    run = trained(config(task=task, steps=50, batch_size=8, learning_rate=1e-2, eval_every=50, override=override))
    model = lineartime.load(run)
    assert (type(model), model.config.task) == (kind, task)
    assert losses(run)[-1][1] < 4.0
    assert ("validation_bits_per_byte" in metrics(run)[-1]) == (task != "mlm")
    note = "Validation reads the first half of each sequence as its prefix"
    assert (note in capsys.readouterr().err) == (task == "prefix-lm")


def test_interrupted_step_is_saved_before_it_is_evaluated(
    config: MakeConfig,
    interrupt_after: InterruptAfter,
    monkeypatch: pytest.MonkeyPatch,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[str] = []
    measure = Validation.loss

    def interrupted(self: Validation, stop: Stop | None = None) -> float | None:
        if stop is None:  # not the evaluation before the first step
            found.append(last_checkpoint(config().run_directory).name)
            os.kill(os.getpid(), signal.SIGINT)
        return measure(self, stop)

    with interrupt_after(2), monkeypatch.context() as patch:
        patch.setattr(Validation, "loss", interrupted)
        result = train(config())
    assert (result.step, result.finished, found) == (2, False, ["step-00000002"])
    assert "Step 2 is not evaluated." in capsys.readouterr().err
    assert validations(result.run) == []
    resumed(result.run)
    assert losses(result.run) == losses(whole)
    assert validations(result.run) == validations(whole)  # with that of step 2, which was skipped


def test_request_to_stop_ends_an_evaluation_and_saves_its_step_at_once(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = []
    measure, save = Validation.loss, Trainer.save

    def watched(self: Validation, stop: Stop | None = None) -> float | None:
        if list_checkpoints(config().run_directory) and stop is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = measure(self, stop)
        moments.append("stopped" if loss is None else "measured")
        return loss

    def watched_save(self: Trainer) -> None:
        moments.append("saved")
        save(self)
        self.writer.finish()

    monkeypatch.setattr(Validation, "loss", watched)
    monkeypatch.setattr(Trainer, "save", watched_save)
    run = trained(config())
    assert moments == ["measured", "saved", "stopped", "saved", "measured"]
    assert read_validation_loss(last_checkpoint(run)) == validations(run)[-1][1]


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_batch": 96, "task": "mlm", "override": ("pattern=flash,gau",)},
        {"task": "prefix-lm", "packed": True, "optimizer": "muon", "adamw_ratio": 0.5, "schedule": "cosine"},
    ],
    ids=["mlm, hybrid", "prefix-lm"],
)
def test_resumed_run_is_the_uninterrupted_one_to_the_bit(
    config: MakeConfig, tmp_path: Path, options: dict[str, Any], interrupt_after: InterruptAfter
) -> None:
    # With dropout, random numbers count, too.
    options = {**options, "override": (*config().override, "dropout=0.1", *options.get("override", ()))}
    whole = trained(config(out=tmp_path / "whole", **options))
    run = tmp_path / "run"
    for stop in (3, 4):  # between evaluations and at one
        with interrupt_after(stop):
            trained(config(**options, resume=run.exists()))
        assert losses(run)[-1][0] == stop
    trained(config(**options, resume=True))
    assert losses(run) == losses(whole)
    assert [point for point in validations(run) if point in validations(whole)] == validations(whole)
    moments = [load_file(next((last_checkpoint(path) / "optimizer").iterdir())) for path in (whole, run)]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    for name, weight in lineartime.load(last_checkpoint(whole)).state_dict().items():
        assert torch.equal(weight, lineartime.load(last_checkpoint(run)).state_dict()[name])


def test_run_whose_time_is_over_is_saved_and_goes_on_with_other_time(
    config: MakeConfig, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(config(max_time=1e-9))
    assert "Stopped after step 1, which is saved (max_time is over: 1e-09 minutes)." in capsys.readouterr().err
    assert losses(run) == losses(whole)[:1]  # a step at a time, so that each call makes progress
    resumed(run, max_time=5.0)
    assert "Training stops after 5 minutes (max_time)." in capsys.readouterr().err
    assert losses(run) == losses(whole)


def test_finished_run_is_neither_resumed_nor_overwritten(finished: Path, config: MakeConfig) -> None:
    before = (finished / "metrics.jsonl").read_text()
    resumed(finished)
    assert (finished / "metrics.jsonl").read_text() == before
    with pytest.raises(LineartimeError, match=f"{finished} already holds a run: resume it"):
        trained(config(out=finished))


def test_auto_resume_starts_a_run_resumes_it_and_leaves_a_finished_one(
    config: MakeConfig, interrupt_after: InterruptAfter, whole: Path
) -> None:
    parts = config(auto_resume=True)
    with interrupt_after(3):
        assert not train(parts).finished
    for _ in range(2):
        assert train(parts).finished
    assert losses(parts.run_directory) == losses(whole)
    with pytest.raises(ArgumentError, match=r"^seed is 5, but the run in .* was started with 0"):
        train(replace(parts, seed=5))
    with pytest.raises(ArgumentError, match=r"^auto_resume needs the folder of the run"):
        train(auto_resume=True)


def test_auto_resume_takes_what_a_run_began_with_again(
    finished: Path, config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, finished.with_name("other"))
    monkeypatch.chdir(finished.parent)
    given: dict[str, Any] = {"data": config().data, "cache": config().cache, "steps": 2, "eval_every": 2, "out": "second"}
    for _ in range(2):
        assert lineartime.train(**given, init_from="finished", auto_resume=True).finished
    with pytest.raises(ArgumentError, match=r"^init_from is other, but the run in second began with .*finished"):
        lineartime.train(**given, init_from="other", auto_resume=True)


def test_too_many_infinite_steps_in_a_row_end_the_run_and_leave_a_good_checkpoint(config: MakeConfig) -> None:
    broken = config(steps=50, learning_rate=1e30, warmup_steps=0, clip_norm=0.0, max_skipped=3, eval_every=50)
    with pytest.raises(
        LineartimeError,
        match=r"consecutive skipped steps .*the last checkpoint is .*step-0000.*: .*`learning_rate` below 1e\+30",
    ):
        trained(broken)
    model = lineartime.load(broken.run_directory)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_infinite_step_changes_nothing_and_is_counted(config: MakeConfig, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    trainer = prepare(config())
    objective, calls = trainer.parallel.objective, []

    def now_and_then(*batch: Any) -> torch.Tensor:
        calls.append(1)
        loss = objective(*batch)
        if len(calls) in (2, 3):
            return (
                loss * float("nan") if broken == "loss" else loss + (trainer.model.backbone.embedding.weight * 0).sqrt().sum()
            )
        return loss

    trainer.parallel.objective = now_and_then  # type: ignore[assignment]
    weights = []
    take = trainer.take_step

    def watched(*arguments: Any) -> bool:
        stopped = take(*arguments)
        weights.append(trainer.model.backbone.embedding.weight.detach().clone())
        return stopped

    monkeypatch.setattr(trainer, "take_step", watched)
    trainer.run()
    changes = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert changes == [False, False, True, True, True]
    assert trainer.skipped == 2
    assert read_training_state(last_checkpoint(trainer.config.run_directory)).skipped == 2
    text = (trainer.config.run_directory / "metrics.jsonl").read_text()
    assert "NaN" not in text  # which is no JSON
    assert [line["skipped"] for line in metrics(trainer.config.run_directory) if "skipped" in line][-1] == 2


@pytest.mark.parametrize("name", ["model.safetensors", "training.json"])
def test_damaged_last_checkpoint_is_named_and_without_it_the_run_goes_on_from_the_one_before(
    stopped: Path, whole: Path, name: str
) -> None:
    with (stopped / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')  # as a killed process leaves it
    last = last_checkpoint(stopped)
    (last / name).write_bytes((last / name).read_bytes()[:-9])
    with pytest.raises(
        LineartimeError, match=f"step-00000003 is damaged .{name}: .*: use step-00000002, or delete the damaged"
    ):
        resumed(stopped)
    shutil.rmtree(last)
    resumed(stopped)
    assert losses(stopped) == losses(whole)


def test_step_of_many_batches_is_that_of_one_large_batch(config: MakeConfig, tmp_path: Path) -> None:
    runs = [
        trained(config(batch_size=size, tokens_per_batch=6 * 24, steps=3, task="mlm", out=tmp_path / str(size)))
        for size in (1, 6)
    ]
    assert losses(runs[0]) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(runs[1])]


def test_gradients_are_clipped(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = prepare(config(clip_norm=1e-3, steps=1))
    norms = []
    monkeypatch.setattr(
        trainer.optimizer,
        "step",
        lambda *_: norms.append(
            torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm().item()
        ),
    )
    trainer.run()
    assert metrics(trainer.config.run_directory)[0]["gradient_norm"] > 1e-2  # the norm before clipping
    assert norms[0] == pytest.approx(1e-3, rel=1e-2)


def test_autocast_of_the_caller_leaves_a_run_as_it_is(config: MakeConfig, tmp_path: Path) -> None:
    options = {"preset": "transformer++-tiny", "override": ("d_model=16", "n_blocks=1", "n_heads=2"), "optimizer": "muon"}
    alone = trained(config(out=tmp_path / "alone", **options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = trained(config(out=tmp_path / "inside", **options))
        evaluated = lineartime.evaluate(inside, max_tokens=100)  # the saved weights, not copies of earlier ones
    assert losses(inside) == losses(alone)
    assert validations(inside) == validations(alone)
    assert evaluated == lineartime.evaluate(inside, max_tokens=100)
    assert {parameter.dtype for parameter in lineartime.load(inside).parameters()} == {torch.float32}


def test_run_is_resumed_from_another_folder_and_with_another_cache(
    config: MakeConfig, tmp_path: Path, interrupt_after: InterruptAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(ByteTokenizer().to_json())
    monkeypatch.chdir(tmp_path)
    with interrupt_after(1):
        trained(config(data="text.txt", tokenizer=str(tokenizer), steps=3))
    tokenizer.unlink()  # the run has it
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(losses(resumed(config().run_directory, cache=tmp_path / "another cache"))) == 3


def test_run_keeps_its_model_when_its_preset_means_another_one_today(
    config: MakeConfig, interrupt_after: InterruptAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = TrainConfig.model_config
    with monkeypatch.context() as then, interrupt_after(3):
        then.setattr(TrainConfig, "model_config", lambda self, size: today(self, size).override(token_shift=True))
        run = trained(config())
    trained(config(resume=True))
    assert lineartime.load(run, checkpoint="last").config == config().model_config(258).override(token_shift=True)


def test_resumed_run_refuses_options_that_must_stay(finished: Path) -> None:
    refused: dict[str, tuple[Any, str]] = {
        "seed": (5, "0"),
        "tokenizer": ("bpe-300", "bytes"),
    }
    for name, (value, before) in refused.items():
        with pytest.raises(ArgumentError, match=f"^{name} is {value}, but the run in .* was started with {before}: leave"):
            resumed(finished, **{name: value})
    resumed(finished, tokenizer="bytes")  # which is that of a run that names none
    start = last_checkpoint(finished)
    asked = TrainConfig(precision="bf16", resume=True, out=finished)
    assert prepare(asked, start=start, given=("precision",)).config.precision == "bf16"
    assert saved_config(start).compile == "off"  # what "auto" came to
    with pytest.raises(LineartimeError, match="which is a checkpoint: give the folder of its run, or a new one"):
        resumed(start)
    with pytest.raises(LineartimeError, match="does not exist: give the folder of a run"):
        resumed(finished / "nothing")


def test_run_keeps_its_precision_on_another_machine_and_says_so(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupt_after: InterruptAfter
) -> None:
    monkeypatch.setattr(machine, "processor_features", lambda: {"avx512_bf16"})
    with interrupt_after(2):
        run = trained(config(precision="auto"))
    assert ", cpu, bf16; " in capsys.readouterr().err
    assert (saved_config(last_checkpoint(run)).precision, read_record(run).options["precision"]) == ("bf16", "bf16")
    monkeypatch.setattr(machine, "processor_features", lambda: {"avx2"})
    with interrupt_after(4):
        resumed(run)
    why = "fp32 would be faster here, because the processor has no units for bf16"
    assert f"Computing in bf16; {why}." in capsys.readouterr().err
    resumed(run, precision="fp32")
    assert "Computing in fp32, and no longer in bf16." in capsys.readouterr().err
    assert saved_config(last_checkpoint(run)).precision == "fp32"
    assert f"Computing in bf16; {why}." in prepare(config(precision="bf16", out=run.with_name("new"))).notes


def test_tracker_that_cannot_start_leaves_no_folder_of_a_run(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(*_: object) -> None:
        (tmp_path / "run" / "wandb").mkdir()
        raise RuntimeError("no key")

    with pytest.raises(LineartimeError, match=r"The tracker wandb needs wandb, .* pip install 'lineartime\[wandb\]'"):
        trained(config(track="wandb"))
    monkeypatch.setattr("lineartime.training.loop.require_packages", lambda *_, **__: None)
    monkeypatch.setattr(run_metrics, "_wandb", refuses)
    with pytest.raises(LineartimeError, match="The tracker wandb cannot start: no key; fix that, or leave it out of `track`"):
        trained(config(track=("tensorboard", "wandb")))
    assert not (tmp_path / "run").exists()


def test_run_is_not_resumed_on_other_text(config: MakeConfig, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for split in ("train", "valid"):
        (texts / f"{split}.txt").write_text(f"text to {split} on\n" * 200)
    run = trained(config(data=texts, steps=1))
    for split in ("train", "valid"):
        usual = (texts / f"{split}.txt").read_text()
        (texts / f"{split}.txt").write_text("another text\n" * 200)
        with pytest.raises(LineartimeError, match=r"The text of the run in .* has changed: it was .*; restore the old text"):
            resumed(run)
        (texts / f"{split}.txt").write_text(usual)
    resumed(run)


def test_streamed_run_is_resumed_on_a_copy_of_its_text(config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for folder in ("texts", "copy"):
        (tmp_path / folder).mkdir()
        for split in ("train", "valid"):
            lines = "".join(f'{{"text": "text {number} to {split} on"}}\n' for number in range(100))
            (tmp_path / folder / f"{split}.jsonl").write_text(lines)
    options: dict[str, Any] = {"streaming": True}
    trained(config(data=tmp_path / "texts", **options))
    trained(config(data=tmp_path / "copy", resume=True, **options))
    with (tmp_path / "copy" / "train.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(LineartimeError, match=r"The text of the run in .* has changed"):
        trained(config(data=tmp_path / "copy", resume=True, **options))


def test_text_that_was_moved_is_called_the_text_of_the_run(config: MakeConfig, text: Path) -> None:
    run = trained(config(steps=2, max_time=1e-6))
    moved = text.rename(text.with_name("moved.txt"))
    message = r"^The text of this run is .*text.txt, which is neither .*\. Give the place where it is now: `data`\.$"
    with pytest.raises(LineartimeError, match=message):
        resumed(run)
    with pytest.raises(LineartimeError, match=message):
        lineartime.evaluate(run)
    assert lineartime.evaluate(run, moved).tokens > 0
    assert train(resume=True, out=run, data=str(moved), max_time=9.0).finished


@pytest.mark.nightly
# PyTorch's own, within torch.compile, where a user does not see them.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_run_gives_the_losses_of_a_plain_one(config: MakeConfig, tmp_path: Path) -> None:
    plain = trained(config(steps=3, compile="off", out=tmp_path / "plain"))
    compiled = trained(config(steps=3, compile="on", out=tmp_path / "compiled"))
    assert losses(compiled) == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in losses(plain)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0, but must be at least 1"),
        ({"override": ("chunk_size",)}, "override contains 'chunk_size', which is not of the form NAME=VALUE"),
        ({"override": ("vocab_size=3",)}, "override cannot set vocab_size to 3: it follows from `tokenizer`, which has 258"),
        (
            {"preset": "flash-quad-tiny", "override": ("d_model=16", "n_blocks=1", "max_length=8")},
            "context_length is 24, but flash-quad-tiny reads at most 8 tokens: .* or `override` max_length=24",
        ),
        ({"context_length": 50_000}, r"There are \d+ tokens in the train split of .*text.txt, fewer than a context"),
        ({"context_parallel": 2}, "context_parallel is 2, but this is one process: start 2 with torchrun"),
        ({"parallel": "fsdp", "clip": "local"}, "use `clip='global'` or `parallel='ddp'`"),
        ({"keep_every": 3}, "keep_every is 3, but must be a multiple of `eval_every=2`: checkpoints follow evaluations"),
    ],
)
def test_options_outside_what_they_allow_are_named(config: MakeConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LineartimeError, match=message):
        trained(config(**options))


def test_second_interrupt_of_a_process_that_is_alone_acts_as_usual() -> None:
    with interrupts(alone=True) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_end_of_the_terminal_asks_a_run_to_stop_unless_it_was_started_to_outlive_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with interrupts(alone=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with interrupts(alone=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_of_several_processes_may_get_any_number_of_interrupts_before_it_has_saved() -> None:
    with interrupts(alone=False) as stop:
        for number in 2 * (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested
