import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lineartime
from lineartime import machine
from lineartime.checkpoint import (
    best_checkpoint,
    last_checkpoint,
    list_checkpoints,
    read_training_state,
    read_validation_loss,
    verify,
)
from lineartime.checkpoint.contents import HELD_OUT
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM, MaskedLM
from lineartime.runs import trackers
from lineartime.runs.record import read_record
from lineartime.training import contention
from lineartime.training.config import TrainConfig
from lineartime.training.contention import Contention, Usage
from lineartime.training.interrupts import Stop
from lineartime.training.loop import Trainer, prepare, train
from lineartime.training.resuming import saved_config
from lineartime.training.validation import Validation

MakeConfig = Callable[..., TrainConfig]
InterruptAfter = Callable[[int], AbstractContextManager[None]]


def trained(config: TrainConfig) -> Path:
    """Train, and return the run's folder."""
    return train(config).run


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run) if "loss" in line]


def validations(run: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["validation_loss"]) for line in metrics(run) if "validation_loss" in line]


def test_a_model_learns(config: MakeConfig) -> None:
    override = ("d_model=32", "n_blocks=2", "d_qk=16", "chunk_size=16")
    run = trained(config(override=override, steps=250, batch_size=8, eval_every=125, learning_rate=1e-2))
    curve = losses(run)
    assert curve[0][1] == pytest.approx(5.55, abs=0.1)  # log 258: it knows nothing yet
    assert curve[-1][1] < 2.9  # less than the letters' frequencies tell
    assert validations(run)[-1][1] < 2.9


def test_a_masked_model_learns(config: MakeConfig) -> None:
    run = trained(
        config(task="mlm", steps=60, batch_size=8, learning_rate=1e-2, eval_every=30, override=("d_model=32", "n_blocks=2"))
    )
    assert isinstance(lineartime.load(run), MaskedLM)
    assert losses(run)[-1][1] < 4.0
    assert "validation_bits_per_byte" not in metrics(run)[-1]


def test_a_step_without_masked_tokens_has_no_loss(config: MakeConfig) -> None:
    run = trained(
        config(task="mlm", context_length=8, batch_size=1, steps=20, learning_rate=1e-5, override=("d_model=16", "n_blocks=1"))
    )
    known = dict(losses(run))
    assert 0 < len(known) < 20  # 0.85^8 = 27 % of the steps have none
    assert min(known.values()) > 5  # of ln 258 = 5.55, as nothing is learned
    assert {line["step"] for line in metrics(run) if "gradient_norm" in line} == set(range(1, 21))


def test_a_prefix_model_trains_on_random_prefixes_and_is_measured_on_half_windows(
    config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("d_model=32", "n_blocks=1", "d_qk=16")
    run = trained(config(task="prefix-lm", steps=40, batch_size=8, learning_rate=1e-2, override=size))
    assert "Validation reads the first half of each sequence as its prefix" in capsys.readouterr().err
    model = lineartime.load(run)
    assert isinstance(model, CausalLM)
    assert model.config.task == "prefix-lm"
    assert losses(run)[-1][1] < 3.9
    assert "validation_bits_per_byte" in metrics(run)[-1]


def test_a_shuffle_of_documents_needs_a_stream(config: MakeConfig) -> None:
    with pytest.raises(ArgumentError, match=r"^shuffle_documents is 5, but needs streaming: text that is encoded beforehand"):
        config(shuffle_documents=5).check()
    with pytest.raises(ArgumentError, match=r"^lanes is 3, but needs streaming: leave it out"):
        config(lanes=3).check()
    config(lanes=3, shuffle_documents=5, like="another").check()  # taken from a run that streams its text


def test_a_stream_of_several_texts_holds_out_some_of_each(config: MakeConfig, tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, word in zip(files, ("aaaa ", "zzzz "), strict=True):
        file.write_text((json.dumps({"text": word * 30}) + "\n") * 200)
    trainer = prepare(config(data=[str(file) for file in files], streaming=True, lanes=2, eval_windows=4))
    held_out = bytes(trainer.text.validation.tokens[:][trainer.text.validation.tokens[:] < 256].astype("uint8"))
    trainer.text.loader.close()
    assert abs(held_out.count(b"a") - held_out.count(b"z")) <= 5
    assert 4 * trainer.config.context_length + 1 <= len(trainer.text.validation) <= 4 * trainer.config.context_length + 2


def test_prefixes_cannot_be_split_over_processes(config: MakeConfig) -> None:
    with pytest.raises(ArgumentError, match="task is prefix-lm, whose prefixes cannot be split over processes: leave out"):
        config(task="prefix-lm", context_parallel=2).check()


def test_the_best_and_the_last_checkpoints_stay(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([9.0, 3.0, 5.0, 4.0])
    monkeypatch.setattr(Validation, "loss", lambda self, stop: next(values))
    run = trained(config(steps=6))
    assert [path.name for path in list_checkpoints(run)] == ["step-00000002", "step-00000004", "step-00000006"]
    assert best_checkpoint(run).name == "step-00000002"
    assert last_checkpoint(run).name == "step-00000006"


def test_a_run_that_is_interrupted_before_its_first_evaluation_is_evaluated_and_its_last_step_is_the_best(
    config: MakeConfig, interrupt_after: InterruptAfter
) -> None:
    with interrupt_after(1):
        run = trained(config(eval_every=6))
    assert best_checkpoint(run).name == "step-00000001"
    [(step, loss)] = validations(run)
    assert (step, read_validation_loss(best_checkpoint(run))) == (1, loss)
    verify(best_checkpoint(run))


@pytest.mark.parametrize("stop", [1, 2])
def test_an_interrupted_step_is_saved_before_it_is_evaluated_and_another_interrupt_skips_only_that(
    config: MakeConfig,
    interrupt_after: InterruptAfter,
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = trained(config(out=tmp_path / "whole"))
    found: list[str] = []
    measure = Validation.loss

    def interrupted(self: Validation, stop: Stop | None = None) -> float | None:
        if stop is None:  # not the evaluation before the first step
            found.append(last_checkpoint(config().run_directory).name)
            os.kill(os.getpid(), signal.SIGINT)
        return measure(self, stop)

    with interrupt_after(stop), monkeypatch.context() as patch:
        patch.setattr(Validation, "loss", interrupted)
        result = train(config())
    assert (result.step, result.finished) == (stop, False)
    assert found == [f"step-0000000{stop}"]
    assert f"Step {stop} is not evaluated." in capsys.readouterr().err
    assert validations(result.run) == []
    trained(config(resume=True))
    assert losses(result.run) == losses(whole)
    assert validations(result.run) == validations(whole)  # with that of step 2, which was skipped


def test_a_request_to_stop_ends_an_evaluation_so_that_its_step_is_saved_at_once(
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
        {},
        {"tokens_per_batch": 96, "task": "mlm"},
        {"task": "prefix-lm", "packed": True},
        {"optimizer": "muon", "adamw_ratio": 0.5},
    ],
    ids=["clm", "mlm", "prefix-lm", "muon"],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    config: MakeConfig, tmp_path: Path, options: dict[str, Any], interrupt_after: InterruptAfter
) -> None:
    override = (*config().override, "dropout=0.1")  # so that random numbers count, too
    whole = trained(config(out=tmp_path / "whole", override=override, **options))
    run = tmp_path / "run"
    for stop in (1, 3, 4):  # between evaluations and at one
        with interrupt_after(stop):
            trained(config(override=override, **options, resume=run.exists()))
        assert losses(run)[-1][0] == stop
    trained(config(override=override, **options, resume=True))
    assert losses(run) == losses(whole)
    assert [point for point in validations(run) if point in validations(whole)] == validations(whole)
    moments = [load_file(next((last_checkpoint(path) / "optimizer").iterdir())) for path in (whole, run)]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    for name, weight in lineartime.load(last_checkpoint(whole)).state_dict().items():
        assert torch.equal(weight, lineartime.load(last_checkpoint(run)).state_dict()[name])


def test_a_run_whose_time_is_over_is_saved_and_can_be_resumed_with_other_time(config: MakeConfig, tmp_path: Path) -> None:
    whole = trained(config(steps=3, out=tmp_path / "whole"))
    run = trained(config(steps=3, max_time=1e-9))
    assert losses(run) == losses(whole)[:1]  # a step at a time, so that each call makes progress
    assert last_checkpoint(run).name == "step-00000001"
    trained(config(steps=3, max_time=5.0, resume=True))
    assert losses(run) == losses(whole)


def test_checkpoints_to_keep_stay_to_the_end(config: MakeConfig) -> None:
    run = trained(config(steps=7, eval_every=1, keep_every=2))
    assert {"step-00000002", "step-00000004", "step-00000006"} <= {path.name for path in list_checkpoints(run)}
    assert len(list_checkpoints(run)) < 7


def test_metrics_of_steps_after_the_checkpoint_are_forgotten(config: MakeConfig, interrupt_after: InterruptAfter) -> None:
    with interrupt_after(3):
        trained(config())
    run = config().run_directory
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')  # as a killed process leaves it
    trained(config(resume=True))
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]
    assert 99.0 not in [loss for _, loss in losses(run)]


def test_resuming_a_finished_run_does_nothing(config: MakeConfig) -> None:
    run = trained(config(steps=2))
    before = (run / "metrics.jsonl").read_text()
    trained(config(steps=2, resume=True))
    assert (run / "metrics.jsonl").read_text() == before


def test_a_second_run_never_overwrites_the_first(config: MakeConfig) -> None:
    run = trained(config(steps=1))
    with pytest.raises(LineartimeError, match=f"{run} already holds a run: resume it"):
        trained(config(steps=1))


def test_auto_resume_starts_a_run_resumes_it_and_leaves_a_finished_one(
    config: MakeConfig, interrupt_after: InterruptAfter, tmp_path: Path
) -> None:
    whole, parts = (config(auto_resume=True, steps=8, out=tmp_path / name) for name in ("whole", "parts"))
    for _ in range(2):
        assert train(whole).finished
    with interrupt_after(3):
        assert not train(parts).finished
    assert train(parts).finished
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "whole")] == list(range(1, 9))
    with pytest.raises(ArgumentError, match=r"^seed is 5, but the run in .* was started with 0"):
        train(replace(parts, seed=5))


@pytest.mark.parametrize("option", ["like", "init_from"])
def test_auto_resume_takes_what_a_run_began_with_again(
    option: str, config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(out=tmp_path / "first"))
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {option: Path("first"), "data": config().data, "cache": config().cache}
    for _ in range(2):
        assert lineartime.train(**given, steps=4, eval_every=2, out="second", auto_resume=True).finished
    train(config(out=tmp_path / "other", seed=3))
    with pytest.raises(ArgumentError, match=f"^{option} is other, but the run in second began with .*first"):
        lineartime.train(**{**given, option: Path("other")}, steps=4, eval_every=2, out="second", auto_resume=True)
    with pytest.raises(ArgumentError, match=r"^auto_resume needs the folder of the run"):
        lineartime.train(**given, steps=4, eval_every=2, auto_resume=True)


def test_there_is_nothing_to_resume_in_an_empty_folder(config: MakeConfig) -> None:
    with pytest.raises(LineartimeError, match="does not exist: give the folder of a run"):
        trained(config(resume=True))


def test_too_many_infinite_steps_in_a_row_end_the_run_and_leave_a_good_checkpoint(config: MakeConfig) -> None:
    broken = config(steps=50, learning_rate=1e30, warmup_steps=0, clip_norm=0.0, max_skipped=3, eval_every=50)
    with pytest.raises(
        LineartimeError,
        match=r"consecutive skipped steps .*the last checkpoint is .*step-0000.*: .*learning_rate below 1e\+30",
    ):
        trained(broken)
    model = lineartime.load(broken.run_directory)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_an_infinite_step_changes_nothing_and_is_counted(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
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


def test_a_damaged_last_checkpoint_costs_only_the_steps_since_the_one_before(
    config: MakeConfig, tmp_path: Path, interrupt_after: InterruptAfter, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(config(out=tmp_path / "whole"))
    with interrupt_after(5):
        run = trained(config())
    file = last_checkpoint(run) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    trained(config(resume=True))
    assert "step-00000005 is damaged (model.safetensors is not what was written): resuming from step-00000004" in " ".join(
        capsys.readouterr().err.split()
    )
    assert losses(run) == losses(whole)


def test_a_step_of_many_batches_is_that_of_one_large_batch(config: MakeConfig, tmp_path: Path) -> None:
    runs = [
        trained(config(batch_size=size, tokens_per_batch=6 * 24, steps=3, task="mlm", out=tmp_path / str(size)))
        for size in (1, 2, 6)
    ]
    for run in runs[:2]:
        assert losses(run) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(runs[2])]


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


def test_bf16_trains_and_keeps_weights_in_fp32(config: MakeConfig) -> None:
    run = trained(config(precision="bf16"))
    assert {parameter.dtype for parameter in lineartime.load(run).parameters()} == {torch.float32}
    assert losses(run)[-1][1] < losses(run)[0][1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_autocast_of_the_caller_leaves_a_run_as_it_is(
    config: MakeConfig, precision: Any, enabled: bool, tmp_path: Path
) -> None:
    options = {"preset": "transformer++-tiny", "override": ("d_model=16", "n_blocks=1", "n_heads=2"), "optimizer": "muon"}
    alone = trained(config(precision=precision, out=tmp_path / "alone", **options))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        inside = trained(config(precision=precision, out=tmp_path / "inside", **options))
        evaluated = lineartime.evaluate(inside, max_tokens=100)  # the saved weights, not copies of earlier ones
    assert losses(inside) == losses(alone)
    assert validations(inside) == validations(alone)
    assert evaluated == lineartime.evaluate(inside, max_tokens=100)


def test_what_auto_came_to_is_kept_for_the_resumed_run(config: MakeConfig) -> None:
    run = trained(config(precision="auto", steps=1))
    saved = saved_config(last_checkpoint(run))
    assert saved.precision in ("fp32", "bf16")
    assert saved.compile == "off"


def test_a_run_is_resumed_from_another_folder_and_with_another_cache(
    config: MakeConfig, tmp_path: Path, interrupt_after: InterruptAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with interrupt_after(1):
        trained(config(data="text.txt"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = trained(config(resume=True, cache=tmp_path / "another cache"))
    assert len(losses(run)) == 6


def test_a_resumed_run_keeps_its_tokenizer_whatever_became_of_the_file(
    config: MakeConfig, tmp_path: Path, interrupt_after: InterruptAfter
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(ByteTokenizer().to_json())
    with interrupt_after(1):
        trained(config(tokenizer=str(tokenizer)))
    tokenizer.unlink()
    assert len(losses(trained(config(resume=True)))) == 6


def test_a_run_keeps_its_model_when_its_preset_means_another_one_today(
    config: MakeConfig, interrupt_after: InterruptAfter, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = TrainConfig.model_config
    with monkeypatch.context() as then, interrupt_after(3):
        then.setattr(TrainConfig, "model_config", lambda self, size: today(self, size).override(token_shift=True))
        run = trained(config())
    trained(config(resume=True))
    again = train(like=run, steps=1, out=run.with_name("again"))
    assert (
        again.model.config
        == lineartime.load(run, checkpoint="last").config
        == config().model_config(258).override(token_shift=True)
    )


def test_an_option_that_must_stay_is_refused_and_one_that_may_change_is_taken(config: MakeConfig) -> None:
    run = trained(config(steps=1))
    with pytest.raises(LineartimeError, match=r"seed is 5, but the run in .* was started with 0"):
        trained(config(steps=1, seed=5, resume=True))
    start = last_checkpoint(run)
    assert prepare(config(steps=1, precision="bf16", resume=True), start=start).config.precision == "bf16"
    assert prepare(config(steps=1, precision="auto", resume=True), start=start).config.precision == "fp32"
    with pytest.raises(LineartimeError, match="which is a checkpoint: give the folder of its run, or a new one"):
        trained(config(out=last_checkpoint(run)))


def test_bytes_are_the_tokenizer_of_a_run_that_names_none(config: MakeConfig) -> None:
    trained(config(steps=1))
    assert trained(config(steps=1, tokenizer="bytes", resume=True)) == config().run_directory
    with pytest.raises(ArgumentError, match=r"^tokenizer is bpe-300, but the run in .* was started with bytes"):
        trained(config(steps=1, tokenizer="bpe-300", resume=True))


@pytest.mark.parametrize("kinds", [("adamw", "muon"), ("muon", "adamw")])
def test_a_run_is_not_resumed_with_another_optimizer(config: MakeConfig, kinds: tuple[str, str]) -> None:
    started, asked = kinds
    trained(config(optimizer=started, steps=1, **({"adamw_ratio": 0.5} if started == "muon" else {})))
    with pytest.raises(LineartimeError, match=f"optimizer is {asked}, but the run in .* was started with {started}: leave"):
        train(out=config().run_directory, resume=True, optimizer=asked)


def test_a_run_of_muon_is_repeated_with_adamw_whatever_the_options_of_muon_were(config: MakeConfig) -> None:
    run = trained(config(optimizer="muon", adamw_ratio=0.5, steps=1))
    assert train(like=run, optimizer="adamw", out=run.with_name("adamw")).finished


def test_a_run_of_muon_records_the_learning_rates_of_both_parts(config: MakeConfig) -> None:
    run = trained(config(optimizer="muon", adamw_ratio=0.5, learning_rate=0.01, warmup_steps=2, steps=4))
    rates = [(line["learning_rate"], line["adamw_learning_rate"]) for line in metrics(run) if "loss" in line]
    assert rates == [pytest.approx(pair) for pair in [(0.005, 0.0025), (0.01, 0.005), (0.01, 0.005), (0.005, 0.0025)]]
    assert "adamw_learning_rate" not in metrics(trained(config(steps=1, out=run.with_name("adamw"))))[0]


def test_a_resumed_run_keeps_its_schedule(config: MakeConfig, interrupt_after: InterruptAfter) -> None:
    whole = trained(config(schedule="cosine", out=config().run_directory.with_name("whole")))
    with interrupt_after(3):
        trained(config(schedule="cosine"))
    with pytest.raises(LineartimeError, match=r"schedule is linear, but the run in .* was started with cosine"):
        train(out=config().run_directory, resume=True, schedule="linear")
    assert losses(trained(config(resume=True, schedule="cosine"))) == losses(whole)


BF16, FP32 = {"avx512_bf16"}, {"avx2"}


def test_a_run_keeps_its_precision_on_another_machine_and_says_so(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupt_after: InterruptAfter
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(machine, "processor_features", lambda: BF16)
    with interrupt_after(2):
        run = trained(config(precision="auto"))
    assert ", cpu, bf16; " in capsys.readouterr().err
    assert (saved_config(last_checkpoint(run)).precision, read_record(run).options["precision"]) == ("bf16", "bf16")
    monkeypatch.setattr(machine, "processor_features", lambda: FP32)
    with interrupt_after(4):
        train(out=run, resume=True)
    why = "a new run would compute in fp32 here, because the processor has no units for bf16"
    assert f"Computing in bf16, as before; {why}." in capsys.readouterr().err
    assert saved_config(last_checkpoint(run)).precision == "bf16"
    train(out=run, resume=True, precision="fp32")
    assert "Computing in fp32, and no longer in bf16." in capsys.readouterr().err
    assert saved_config(last_checkpoint(run)).precision == "fp32"
    trained(config(precision="bf16", steps=1, out=run.with_name("new")))
    slower = "fp32 would be faster here, because the processor has no units for bf16"
    assert f"Computing in bf16 as asked; {slower}." in capsys.readouterr().err


def test_a_run_whose_record_leaves_the_precision_open_resumes(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupt_after: InterruptAfter
) -> None:
    """As of a version that recorded the option and not what it resolved to."""
    monkeypatch.setattr(machine, "processor_features", lambda: FP32)
    with monkeypatch.context() as older, interrupt_after(2):
        older.setattr(TrainConfig, "to_dict", lambda self, of=TrainConfig.to_dict: {**of(self), "precision": "auto"})
        run = trained(config(precision="auto"))
    assert saved_config(last_checkpoint(run)).precision == "auto"
    capsys.readouterr()
    train(out=run, resume=True)
    assert "Computing in fp32: the processor has no units for bf16." in capsys.readouterr().err
    assert saved_config(last_checkpoint(run)).precision == "fp32"


def test_a_tracker_that_cannot_start_leaves_no_folder_of_a_run(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(*_: object) -> None:
        (tmp_path / "run" / "wandb").mkdir()
        raise RuntimeError("no key")

    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    monkeypatch.setattr("lineartime.training.loop.check_trackers", lambda names: None)
    monkeypatch.setattr(trackers, "WandB", refuses)
    with pytest.raises(LineartimeError, match="The tracker wandb cannot start: no key; fix that, or leave it out of track"):
        trained(config(track=("tensorboard", "wandb")))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(LineartimeError, match="cannot start"):
        trained(config(track="wandb"))
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock"] == ["notes.txt"]
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    trained(config(track=()))  # the same options start the run once the tracker is left out


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_read_or_written(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda package: False)
    with pytest.raises(LineartimeError, match="The tracker wandb needs wandb, which is not installed"):
        trained(config(track="wandb", data=str(tmp_path / "nothing" / "here.txt")))
    assert not (tmp_path / "run").exists()


def test_a_run_computes_with_its_threads_alone(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), set[int]()
    forward = Validation.loss

    def loss(self: Validation, stop: Stop | None) -> float | None:
        seen.add(torch.get_num_threads())
        return forward(self, stop)

    monkeypatch.setattr(Validation, "loss", loss)
    run = trained(config(steps=1, threads=before + 1))
    assert (seen, torch.get_num_threads()) == ({before + 1}, before)
    assert read_record(run).processes[0].machine.threads == before + 1


def test_contention_is_told_once_in_a_run(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contention, "WINDOW", 0.0)
    clock = count()
    busy = partial(Contention, read=lambda: Usage(tick := next(clock), 0.5 * tick, 1.5 * tick), cores=2)
    monkeypatch.setattr("lineartime.training.loop.Contention", busy)
    trained(config(threads=2))
    told = "Other programs use 1.0 of 2 cores, so that 2 threads wait for each other"
    assert capsys.readouterr().err.count(told) == 1


def test_a_run_is_not_resumed_on_other_held_out_text(config: MakeConfig, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for split in ("train", "valid"):
        (texts / f"{split}.txt").write_text(f"text to {split} on\n" * 200)
    run = trained(config(data=texts))
    (texts / "valid.txt").write_text("another text\n" * 200)
    with pytest.raises(LineartimeError, match=r"The text of the run in .* has changed"):
        trained(config(data=texts, resume=True))
    (texts / "valid.txt").write_text("text to valid on\n" * 200)
    state = read_training_state(last_checkpoint(run))
    text = prepare(config(data=texts, out=tmp_path / "again")).text
    assert text.is_text_of(state.text)
    assert text.is_text_of(state.text.removesuffix(f"{HELD_OUT}{state.held_out}"))  # which earlier versions wrote
    trained(config(data=texts, resume=True))


def test_a_streamed_run_is_resumed_on_a_copy_of_its_text(config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for folder in ("texts", "copy"):
        (tmp_path / folder).mkdir()
        for split in ("train", "valid"):
            lines = "".join(f'{{"text": "text {number} to {split} on"}}\n' for number in range(100))
            (tmp_path / folder / f"{split}.jsonl").write_text(lines)
    options: dict[str, Any] = {"streaming": True, "lanes": 2}
    trained(config(data=tmp_path / "texts", **options))
    trained(config(data=tmp_path / "copy", resume=True, **options))
    with (tmp_path / "copy" / "train.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(LineartimeError, match=r"The text of the run in .* has changed"):
        trained(config(data=tmp_path / "copy", resume=True, **options))


def test_a_run_is_not_resumed_on_other_text(config: MakeConfig, text: Path) -> None:
    trained(config())
    text.write_text(text.read_text() + "more text\n" * 50)
    with pytest.raises(LineartimeError, match=r"has changed: it was 13,908 tokens, .* now it is 14,3\d\d tokens, .*; restore"):
        trained(config(resume=True))


def test_other_files_in_the_folder_of_a_run_do_no_harm(config: MakeConfig) -> None:
    run = config().run_directory
    (run / "step-notes").mkdir(parents=True)
    (run / "step-00000001-backup").mkdir()
    (run / "manifest.json").write_text("{}")
    trained(config())
    assert last_checkpoint(run).name == "step-00000006"
    assert lineartime.load(run)
    assert (run / "step-00000001-backup").is_dir()


def test_a_small_text_needs_no_whole_context_to_validate_on(config: MakeConfig) -> None:
    run = trained(config(context_length=700, steps=1))  # 5% of the text are 690 bytes
    assert validations(run)[0][1] > 0


@pytest.mark.slow
# PyTorch's own, within torch.compile, where a user does not see them.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_run_gives_the_losses_of_a_plain_one(config: MakeConfig, tmp_path: Path) -> None:
    plain = trained(config(steps=3, compile="off", out=tmp_path / "plain"))
    compiled = trained(config(steps=3, compile="on", out=tmp_path / "compiled"))
    assert losses(compiled) == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in losses(plain)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0, but must be at least 1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, but must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"beta2": 1.0}, "beta2 is 1.0, but must be at least 0 and below 1"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', but must be one of 'adamw', 'muon'"),
        ({"optimizer": "muon", "momentum": 1.0}, "momentum is 1.0, but must be at least 0 and below 1"),
        ({"optimizer": "muon", "adamw_ratio": 0.0}, "adamw_ratio is 0.0, but must be above 0"),
        ({"adamw_ratio": 0.5}, "is 0.5, but is not used with optimizer='adamw': use optimizer='muon' or adamw_ratio=1.0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0, but must be at least 0"),
        ({"preset": "flash-giant"}, "preset is 'flash-giant', which is not a preset"),
        ({"override": ("chunk_size",)}, "override contains 'chunk_size', which is not of the form NAME=VALUE"),
        ({"override": ("chunk=3",)}, "override does not fit the model: chunk is not an option of this model"),
        (
            {"override": ("vocab_size=3",)},
            "override cannot set vocab_size to 3: it follows from tokenizer, which has 258",
        ),
        ({"override": ("task=mlm",)}, "override cannot set task: use task"),
        (
            {"preset": "performer-tiny", "task": "prefix-lm"},
            "task is 'prefix-lm', but performer-tiny cannot read a prefix in both directions; these systems can: flash,",
        ),
        ({"override": ("self=1",)}, "override does not fit the model: self is not an option of this model"),
        ({"override": ("d_model=15",)}, "override does not fit the model: d_model is 15, but must be even"),
        ({"weight_decay": float("nan")}, "weight_decay is nan, but must be a finite number"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"override": ("n_blocks=0",)}, "override does not fit the model: n_blocks is 0"),
        ({"seed": 2**64}, r"seed is 18446744073709551616, but must be at least 0 and below 2\^63"),
        (
            {"preset": "flash-quad-tiny", "override": ("d_model=16", "n_blocks=1", "max_length=8")},
            "context_length is 24, but flash-quad-tiny reads at most 8 tokens: .* or override max_length=24",
        ),
        ({"override": ("d_qk=7",)}, "override does not fit the model: d_qk is 7, but must be even"),
        ({"context_length": 50_000}, r"There are \d+ tokens in the train split of .*text.txt, fewer than a context"),
        ({"data": "/does/not/exist"}, "data is /does/not/exist, which is neither a file or folder nor the name of"),
        ({"tokenizer": "/does/not/exist"}, "tokenizer is /does/not/exist, which is neither a file nor a name"),
        ({"context_parallel": 2}, "context_parallel is 2, but this is one process: start 2 with torchrun"),
        (
            {"tokens_per_batch": 100},
            "tokens_per_batch is 100, but must be a positive multiple of 24, which is context_length",
        ),
    ],
)
def test_options_outside_what_they_allow_are_named(config: MakeConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LineartimeError, match=message):
        trained(config(**options))


def test_a_text_that_was_moved_is_called_the_text_of_the_run(config: MakeConfig, text: Path) -> None:
    run = trained(config(steps=2, max_time=1e-6))
    moved = text.rename(text.with_name("moved.txt"))
    message = r"^The text of this run is .*text.txt, which is neither .*\. Give the place where it is now: data\.$"
    with pytest.raises(LineartimeError, match=message):
        train(resume=True, out=run)
    with pytest.raises(LineartimeError, match=message):
        lineartime.evaluate(run)
    assert lineartime.evaluate(run, moved).tokens > 0
    assert train(resume=True, out=run, data=str(moved), max_time=9.0).finished


def test_a_gpu_that_is_not_there_is_named(config: MakeConfig) -> None:
    if torch.cuda.is_available():
        trained(config(device="cuda", steps=1))
    else:
        with pytest.raises(LineartimeError, match="device is cuda, but PyTorch sees no GPU"):
            trained(config(device="cuda"))


def test_training_leaves_the_random_numbers_of_the_caller_as_they_are(config: MakeConfig) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(config(steps=2))
    assert torch.equal(torch.rand(3), expected)


def test_a_run_in_a_thread_cannot_handle_signals_and_trains_all_the_same(config: MakeConfig) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trained, replace(config(), steps=1)).result()
    assert len(losses(run)) == 1
