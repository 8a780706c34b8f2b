"""Runs: what they learn, how they stop and go on, and what they refuse; the gradient of a step, and the held-out loss."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lineartime
from lineartime import machine
from lineartime.checkpoint import last_checkpoint, list_checkpoints, read_training_state, read_validation_loss
from lineartime.choices import Task
from lineartime.data import Batch, ByteTokenizer, read_window, spread_windows
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM, MaskedLM
from lineartime.runs import metrics as run_metrics
from lineartime.runs.metrics import NullReporter, read_metrics
from lineartime.runs.record import read_record
from lineartime.training import setup
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Stop, Trainer, interrupts, train
from lineartime.training.parallel import World, part_of
from lineartime.training.setup import complete, saved_config

MakeConfig = Callable[..., TrainConfig]


@contextmanager
def interrupting(step: int) -> Iterator[None]:
    """`with interrupting(3)`: press Ctrl-C while step 3 is computed."""
    take = Trainer.take_step

    def take_and_interrupt(self: Trainer, *arguments: Any) -> bool:
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_step", take_and_interrupt)
        yield


def trained(config: TrainConfig) -> Path:
    """Train, and return the run's folder."""
    return train(config).run


def resumed(run: Path, **options: Any) -> Path:
    """Resume, and return the run's folder."""
    return train(out=run, resume=True, **options).run


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run) if "loss" in line]


def validations(run: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["validation_loss"]) for line in read_metrics(run) if "validation_loss" in line]


def test_step_without_masked_tokens_has_no_loss(config: MakeConfig) -> None:
    run = trained(
        config(task="mlm", context_length=8, batch_size=1, steps=20, learning_rate=1e-5, override=("d_model=16", "n_blocks=1"))
    )
    known = dict(losses(run))
    assert 0 < len(known) < 20  # 0.85^8 = 27 % of the steps have none
    assert min(known.values()) > 5  # of ln 258 = 5.55, as nothing is learned
    assert {line["step"] for line in read_metrics(run) if "gradient_norm" in line} == set(range(1, 21))


@pytest.mark.parametrize(("task", "kind"), [("clm", CausalLM), ("mlm", MaskedLM), ("prefix-lm", CausalLM)])
def test_model_of_each_task_learns(config: MakeConfig, task: Task, kind: type[CausalLM | MaskedLM]) -> None:
    override = ("d_model=32", "n_blocks=1", "d_qk=16")
    run = trained(config(task=task, steps=50, batch_size=8, learning_rate=1e-2, eval_every=50, override=override))
    model = lineartime.load(run)
    assert (type(model), model.config.task) == (kind, task)
    assert losses(run)[-1][1] < 4.0
    assert ("validation_bits_per_byte" in read_metrics(run)[-1]) == (task != "mlm")


def test_interrupted_step_is_saved_before_it_is_evaluated(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[str] = []
    measure = Trainer.validation_loss

    def interrupted(self: Trainer, stop: Stop | None = None) -> float | None:
        if stop is None:  # not the evaluation before the first step
            found.append(last_checkpoint(config().run_directory).name)
            os.kill(os.getpid(), signal.SIGINT)
        return measure(self, stop)

    with interrupting(2), monkeypatch.context() as patch:
        patch.setattr(Trainer, "validation_loss", interrupted)
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
    measure, save = Trainer.validation_loss, Trainer.save

    def watched(self: Trainer, stop: Stop | None = None) -> float | None:
        if list_checkpoints(config().run_directory) and stop is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = measure(self, stop)
        moments.append("stopped" if loss is None else "measured")
        return loss

    def watched_save(self: Trainer) -> None:
        moments.append("saved")
        save(self)
        self.writer.finish()

    monkeypatch.setattr(Trainer, "validation_loss", watched)
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
def test_resumed_run_is_the_uninterrupted_one_to_the_bit(config: MakeConfig, tmp_path: Path, options: dict[str, Any]) -> None:
    # With dropout, random numbers count, too.
    options = {**options, "override": (*config().override, "dropout=0.1", *options.get("override", ()))}
    whole = trained(config(out=tmp_path / "whole", **options))
    run = tmp_path / "run"
    for stop in (3, 4):  # between evaluations and at one
        with interrupting(stop):
            trained(config(**options, resume=run.exists()))
        assert losses(run)[-1][0] == stop
    trained(config(**options, resume=True))
    assert losses(run) == losses(whole)
    assert [point for point in validations(run) if point in validations(whole)] == validations(whole)
    last = [last_checkpoint(path) for path in (whole, run)]
    moments = (load_file(next((each / "optimizer").iterdir())) for each in last)
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    torch.testing.assert_close(*(lineartime.load(each).state_dict() for each in last), rtol=0, atol=0)


def test_run_whose_time_is_over_is_saved_and_goes_on_with_other_time(
    config: MakeConfig, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(config(max_time=1e-9))
    assert "Stopped after step 1, which is saved (max_time is over: 1e-09 minutes)." in capsys.readouterr().err
    assert losses(run) == losses(whole)[:1]  # a step at a time, so that each call makes progress
    resumed(run, max_time=5.0)
    assert "Training stops after 5 minutes (max_time)." in capsys.readouterr().err
    assert losses(run) == losses(whole)


def test_auto_resume_starts_a_run_resumes_it_and_leaves_a_finished_one(config: MakeConfig, whole: Path) -> None:
    parts = config(auto_resume=True)
    with interrupting(3):
        assert not train(parts).finished
    for _ in range(2):
        assert train(parts).finished
    assert resumed(parts.run_directory) == parts.run_directory
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
    with pytest.raises(ArgumentError, match=r"^init_from is other, but the run in second was started with .*finished"):
        lineartime.train(**given, init_from="other", auto_resume=True)


def test_processes_that_torchrun_starts_again_resume_the_run_of_the_preset_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, asked = setup.complete({"recipe": "quick"}).run_directory, list[Path]()
    assert run != setup.complete({}).run_directory
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not setup.complete({"recipe": "quick"}).resume  # before the first checkpoint
    monkeypatch.setattr("lineartime.checkpoint.list_checkpoints", lambda folder: [folder])
    monkeypatch.setattr(setup, "_resumed", lambda folder, given: asked.append(folder))
    setup.complete({"recipe": "quick"})
    assert asked == [run]


def test_too_many_infinite_steps_in_a_row_end_the_run_and_leave_a_good_checkpoint(config: MakeConfig) -> None:
    broken = config(steps=50, learning_rate=1e30, warmup_steps=0, clip_norm=0.0, max_skipped=3, eval_every=50)
    advice = r"with `learning_rate` below 1e\+30 or more `warmup_steps`"
    with pytest.raises(LineartimeError, match=f"consecutive skipped steps .*the last checkpoint is .*step-0000.*: .*{advice}"):
        trained(broken)
    model = lineartime.load(broken.run_directory)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_infinite_step_changes_nothing_and_is_counted(config: MakeConfig, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    trainer = Trainer(config())
    forward, calls = trainer.parallel.objective.forward, []

    def now_and_then(*batch: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss: torch.Tensor = forward(*batch)
        if calls[-1] and sum(calls) in (2, 3):  # steps, and no evaluations
            return (
                loss * float("nan") if broken == "loss" else loss + (trainer.model.backbone.embedding.weight * 0).sqrt().sum()
            )
        return loss

    trainer.parallel.objective.forward = now_and_then  # type: ignore[method-assign]
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
    assert [line["skipped"] for line in read_metrics(trainer.config.run_directory) if "skipped" in line][-1] == 2


def test_damaged_last_checkpoint_is_named_and_without_it_the_run_goes_on_from_the_one_before(
    config: MakeConfig, whole: Path
) -> None:
    with interrupting(3):
        run = trained(config())
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')  # as a killed process leaves it
    last = last_checkpoint(run)
    for name in ("model.safetensors", "training.json"):
        content = (last / name).read_bytes()
        (last / name).write_bytes(content[:-9])
        damaged = f"step-00000003 is damaged .{name}: .*: use step-00000002, or delete the damaged"
        with pytest.raises(LineartimeError, match=damaged):
            resumed(run)
        (last / name).write_bytes(content)
    shutil.rmtree(last)
    resumed(run)
    assert losses(run) == losses(whole)


def test_step_of_many_batches_is_that_of_one_large_batch(config: MakeConfig, tmp_path: Path) -> None:
    runs = [
        trained(config(batch_size=size, tokens_per_batch=6 * 24, steps=3, task="mlm", out=tmp_path / str(size)))
        for size in (1, 6)
    ]
    assert losses(runs[0]) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(runs[1])]


def test_gradients_are_clipped(config: MakeConfig) -> None:
    trainer = Trainer(config(clip_norm=1e-3, steps=1))
    parameters, norms = list(trainer.model.parameters()), []
    trainer.optimizer.step = lambda: norms.append(torch.nn.utils.get_total_norm([p.grad for p in parameters]))  # type: ignore[method-assign, misc]
    trainer.run()
    assert read_metrics(trainer.config.run_directory)[0]["gradient_norm"] > 1e-2  # the norm before clipping
    assert norms[0].item() == pytest.approx(1e-3, rel=1e-2)


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
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(ByteTokenizer().to_json())
    monkeypatch.chdir(tmp_path)
    with interrupting(1):
        trained(config(data="text.txt", tokenizer=str(tokenizer), steps=3))
    tokenizer.unlink()  # the run has it
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(losses(resumed(config().run_directory, cache=tmp_path / "another cache"))) == 3


def test_run_keeps_its_model_when_its_preset_means_another_one_today(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = TrainConfig.model_config
    with monkeypatch.context() as then, interrupting(3):
        then.setattr(TrainConfig, "model_config", lambda self, size: today(self, size).override(token_shift=True))
        run = trained(config())
    trained(config(resume=True))
    assert lineartime.load(run, checkpoint="last").config == config().model_config(258).override(token_shift=True)


def test_resumed_run_refuses_options_that_must_stay(finished: Path) -> None:
    refused: dict[str, Any] = {"seed": (5, 0), "tokenizer": ("bpe-300", "bytes")}
    for name, (value, before) in refused.items():
        with pytest.raises(ArgumentError, match=f"^{name} is {value}, but the run in .* was started with {before}: leave"):
            resumed(finished, **{name: value})
    resumed(finished, tokenizer="bytes")  # which is that of a run that names none
    start = last_checkpoint(finished)
    assert complete({"precision": "bf16", "resume": True, "out": finished}).precision == "bf16"
    assert saved_config(start).compile == "off"  # what "auto" came to
    with pytest.raises(LineartimeError, match="which is a checkpoint: give the folder of its run, or a new one"):
        resumed(start)
    with pytest.raises(LineartimeError, match="does not exist: give the folder of the run to resume"):
        resumed(finished / "nothing")


def test_run_keeps_its_precision_on_another_machine_and_says_so(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "processor_features", lambda: {"avx512_bf16"})
    with interrupting(2):
        run = trained(config(precision="auto"))
    assert "; cpu, bf16, " in capsys.readouterr().err
    assert (saved_config(last_checkpoint(run)).precision, read_record(run).options["precision"]) == ("bf16", "bf16")
    monkeypatch.setattr(machine, "processor_features", lambda: {"avx2"})
    with interrupting(4):
        resumed(run)
    why = "fp32 would be faster here, because the processor has no units for bf16"
    assert f"Computing in bf16; {why}." in capsys.readouterr().err
    resumed(run, precision="fp32")
    assert "Computing in fp32, and no longer in bf16." in capsys.readouterr().err
    assert saved_config(last_checkpoint(run)).precision == "fp32"
    assert f"Computing in bf16; {why}." in Trainer(config(precision="bf16", out=run.with_name("new"))).notes


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


def test_run_is_resumed_on_a_copy_of_its_text_and_on_no_other(config: MakeConfig, tmp_path: Path) -> None:
    for folder in ("texts", "copy"):
        (tmp_path / folder).mkdir()
        for split in ("train", "valid"):
            lines = "".join(f'{{"text": "text {number} to {split} on"}}\n' for number in range(100))
            (tmp_path / folder / f"{split}.jsonl").write_text(lines)
    run = trained(config(data=tmp_path / "texts", steps=1))
    resumed(run, data=tmp_path / "copy")
    for split in ("train", "valid"):
        file = tmp_path / "copy" / f"{split}.jsonl"
        usual = file.read_text()
        file.write_text('{"text": "other"}\n' + usual)
        with pytest.raises(LineartimeError, match=r"The text of the run in .* has changed: it was .*; restore the old text"):
            resumed(run, data=tmp_path / "copy")
        file.write_text(usual)


def test_stream_is_resumed_on_no_other_text(config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    (tmp_path / "org/name").mkdir(parents=True)
    rows = tmp_path / "org/name/train.jsonl"
    rows.write_text("".join(f'{{"text": "row {number} of many"}}\n' for number in range(100)))
    run = trained(config(data="hub:org/name", streaming=True, steps=1))
    rows.write_text(rows.read_text() + '{"text": "other"}\n')
    with pytest.raises(LineartimeError, match=r"The text of the run in .* has changed: it was .*; restore the old text"):
        resumed(run)


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
        ({"context_parallel": 2}, "context_parallel is 2, which does not divide the number of processes, 1: start"),
        ({"parallel": "fsdp", "clip": "local"}, "use `clip=global` or `parallel=ddp`"),
        ({"keep_every": 3}, "keep_every is 3, but must be a multiple of `eval_every=2`: checkpoints follow evaluations"),
    ],
)
def test_options_outside_what_they_allow_are_named(config: MakeConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LineartimeError, match=message):
        trained(config(**options))


def test_signals_ask_a_run_to_stop_and_a_second_interrupt_of_a_process_that_is_alone_acts_as_usual() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with interrupts(alone=False) as stop:
                for _ in range(2):  # torchrun may send them many times
                    os.kill(os.getpid(), number)
                assert stop.requested
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with interrupts(alone=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


READERS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__, Tensor.__int__, Tensor.cpu, Tensor.numpy)


class HostCopies(TorchFunctionMode):
    """Counts how often losses and norms, float32 on the device, are copied to the host; its own sums are float64."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in READERS and args[0].dtype == torch.float32
        return function(*args, **(kwargs or {}))


def test_step_waits_for_the_device_once_however_many_micro_batches_it_has(config: MakeConfig) -> None:
    trainer = Trainer(config(tokens_per_batch=4 * 48))
    with HostCopies() as copies:
        trainer.take_step(NullReporter(), Stop())
    trainer.text.loader.close()
    assert copies.count == 1


@pytest.mark.parametrize("system", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny"])
def test_packed_batch_is_arranged_without_reading_anything_from_the_device(system: str) -> None:
    meta, ids = torch.device("meta"), torch.randint(0, 30, (1, 50))  # the meta device has no values to read
    model = lineartime.build(system, d_model=16, n_blocks=1, vocab_size=30).to(meta)
    batch = part_of(Batch(ids, ids, torch.tensor([0, 3, 40, 50])), World(), meta)
    assert model.total_loss(batch.inputs, batch.targets, cu_seqlens=batch.cu_seqlens).is_meta


def test_each_group_of_tokens_is_clipped_before_the_average(config: MakeConfig, monkeypatch: Any) -> None:
    trainer = Trainer(config(clip_tokens=48, tokens_per_batch=4 * 24, clip_norm=0.01))  # below the norm of any gradient here
    batches = trainer.text.loader.next_step()
    trainer.text.loader.close()
    parameters = list(trainer.model.parameters())
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:
        gradient = torch.autograd.grad(trainer.model.loss(batch.inputs, batch.targets), parameters)
        norm = torch.cat([part.flatten() for part in gradient]).norm()
        for total, part in zip(expected, gradient, strict=True):
            total += part * (0.01 / norm) / len(batches)
    found: list[Tensor | None] = []
    monkeypatch.setattr(trainer.text.loader, "next_step", lambda: batches)
    monkeypatch.setattr(trainer.optimizer, "step", lambda: found.extend(parameter.grad for parameter in parameters))
    trainer.take_step(NullReporter(), Stop())
    assert len(batches) == 2
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)


def test_quick_look_is_the_mean_over_its_windows_and_changes_no_mode_and_no_random_number(
    config: MakeConfig,
) -> None:
    trainer = Trainer(config(eval_windows=3, batch_size=2))
    trainer.model.train()
    before = torch.get_rng_state()
    loss = trainer.validation_loss()
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert loss == trainer.validation_loss()

    stream = trainer.text.validation
    starts = [index * ((len(stream) - 1) // 24) // 3 * 24 for index in range(3)]
    losses = []
    for start in starts:
        window = read_window(stream, start, 25)
        losses.append(F.cross_entropy(trainer.model(window[None, :-1])[0], window[1:]))
    assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_packed_run_is_measured_with_its_documents_apart(config: MakeConfig, tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):  # a line is a document
        lines = (json.dumps({"text": f"line {number}"}) for number in range(40))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    trainer = Trainer(config(data=tmp_path, packed=True, eval_windows=2, batch_size=2))
    text = trainer.text.validation
    windows = torch.stack([read_window(text, start, 25) for start in spread_windows(text, 2, 24)])
    end = trainer.tokenizer.end_of_document
    losses = []
    for window in windows:
        [*ends] = (window[:-1] == end).nonzero()[:, 0].tolist()
        for first, last in pairwise([-1, *ends, 24 - 1] if ends[-1:] != [23] else [-1, *ends]):
            document = window[first + 1 : last + 2]  # and the token after it, which an end of document does not predict
            targets = document[1:].masked_fill(document[:-1] == end, -100)
            losses.append(F.cross_entropy(trainer.model(document[None, :-1])[0], targets, reduction="sum").detach())
    count = int((windows[:, :-1] != end).sum())
    assert trainer.validation_loss() == pytest.approx(float(sum(losses)) / count, rel=1e-6)


def test_held_out_text_without_a_token_to_predict_is_an_error_and_not_a_loss_of_zero(
    config: MakeConfig, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "train.txt").write_text("text to train on\n" * 200)
    (texts / "valid.txt").write_text("ab")
    trainer = Trainer(config(data=texts, task="mlm"))
    with pytest.raises(LineartimeError, match="has no token to predict"):
        trainer.validation_loss()


def test_masked_tokens_are_the_same_ones_every_time(config: MakeConfig) -> None:
    losses = [Trainer(config(task="mlm", batch_size=size)).validation_loss() for size in (1, 2, 4)]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2


def test_prefix_model_is_measured_on_what_follows_half_of_each_window(config: MakeConfig) -> None:
    trainer = Trainer(config(task="prefix-lm", eval_windows=1))
    window = read_window(trainer.text.validation, 0, 25)
    logits = trainer.model(window[None, :-1], prefix_lengths=torch.tensor([12]))[0]
    assert trainer.validation_loss() == pytest.approx(F.cross_entropy(logits[11:], window[12:]).item(), rel=1e-6)
    losses = [Trainer(config(task="prefix-lm", batch_size=size)).validation_loss() for size in (1, 4)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
