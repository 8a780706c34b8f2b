"""What the experiments list can be built, is of equal size, and is in the paper where they say so."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lineartime.choices import ScaleName
from lineartime.experiments import catalogue, estimate
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.definitions import Setting
from lineartime.experiments.folder import with_saved_options, write_plan
from lineartime.experiments.models import TOLERANCE
from lineartime.experiments.paper import paper_cost, paper_loss, paper_numbers, paper_tables
from lineartime.experiments.plan import Plan, make_plan
from lineartime.experiments.texts import text_notes
from lineartime.models.presets import PAPER_MILLIONS, PRESETS
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

QUALITY = [name for name, experiment in catalogue.EXPERIMENTS.items() if experiment.kind == "quality"]


def plan_of(name: str, scale: ScaleName) -> Plan:
    return make_plan(ReproduceConfig(name, scale))


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_all_models_have_as_many_parameters(scale: ScaleName) -> None:
    for name in catalogue.EXPERIMENTS:
        plan = plan_of(name, scale)
        for setting in plan.settings:
            first, *others = plan.entries_of(setting)
            for other in others:
                off = other.parameters / first.parameters - 1
                assert abs(off) <= TOLERANCE, f"{name}, {other.arm.name}: {off:+.1%}"


def test_the_scale_gpu_trains_forty_million_parameters_for_at_most_eight_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_peak", lambda *_: 600e12)  # of an H200 in bf16
    monkeypatch.setattr(estimate, "choose_device", lambda _: torch.device("cuda"))
    for name in catalogue.EXPERIMENTS:
        plan = plan_of(name, "gpu")
        for entry in plan.entries:
            if entry.setting.size == "main":
                assert 36e6 <= entry.parameters <= 44e6, f"{name}, {entry.arm.name}: {entry.parameters:,}"
        for entry, job in estimate.all_jobs(plan):
            assert estimate.estimated_seconds(plan, entry, job) <= 480, job.folder


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_every_run_has_options_of_training_that_make_its_model(scale: ScaleName) -> None:
    for name in QUALITY:
        plan = plan_of(name, scale)
        for entry in plan.entries:
            for job in (
                plan.speed_job(entry, "adamw"),
                plan.tuning_job(entry, "adamw", 1e-3, 50),
                plan.final_job(entry, "adamw", 1, 1e-3, 50),
            ):
                config = TrainConfig.from_dict(dict(job.options))
                config.check()
                assert config.model_config(plan.scale.vocab_size) == entry.model
                assert config.rows(0, 1).per_step * config.context_length >= plan.scale.tokens_per_batch


def test_the_scale_of_the_paper_is_its_configuration() -> None:
    for name in QUALITY:
        if not catalogue.EXPERIMENTS[name].settings["paper"]:
            continue
        plan = plan_of(name, "paper")
        for entry in plan.entries:
            options = plan.final_job(entry, "adamw", 0).options
            assert (options["steps"], options["tokens_per_batch"], options["learning_rate"]) == (125_000, 2**18, 7e-4)
            assert options["context_length"] == entry.setting.context
            assert options["compile"] == "auto"
            assert TrainConfig.from_dict(dict(options)).model_config(32_000) == entry.model
            stated = PAPER_MILLIONS.get(options["preset"])
            if stated is not None and options["preset"] != "transformer-base":  # whose learned positions follow the context
                assert round(entry.parameters / 1e6) == stated, options["preset"]
    assert {entry.options["preset"] for entry in plan_of("pg19", "paper").entries} >= {"flash-large", "transformer+-large"}
    assert "chunk_size=512" in plan_of("pg19", "paper").entries[0].options["override"]
    assert "gau-scaling-1024" in {entry.options["preset"] for entry in plan_of("gau-vs-mhsa", "paper").entries}
    chunks = [entry.options["override"] for entry in plan_of("chunk-size", "paper").entries[:2]]
    assert chunks == [["chunk_size=64", "normalization=paper"], ["chunk_size=128", "normalization=paper"]]


def test_a_job_of_the_paper_trains_with_exactly_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[TrainConfig] = []
    monkeypatch.setattr("lineartime.training.loop.train_completed", lambda config, left_out: trained.append(config))
    for name in ("lm", "layer-ablation", "mlm"):
        plan = plan_of(name, "paper")
        for entry in plan.entries:
            asked = TrainConfig.from_dict(dict(plan.final_job(entry, "adamw", 0).options))
            train(asked)
            assert trained == [asked], f"{name}, {entry.arm.name}, {entry.setting}"
            trained.clear()


def test_the_scale_of_the_paper_divides_and_clips_as_published() -> None:
    for entry in plan_of("lm", "paper").entries:
        scores = entry.model.mixer.options
        assert scores.get("normalization", "paper") == "paper"
        if "max_length" in scores:  # without it, a causal GAU divides by 512, and has no table of biases
            assert scores["max_length"] == entry.setting.context
        clipped_together = None if entry.arm.name == "transformer" else max(2**18 // 64, entry.setting.context)
        assert entry.options.get("clip_tokens") == clipped_together, entry.arm.name
    asked = {entry.arm.name: entry.model.mixer.options for entry in plan_of("normalization", "paper").entries}
    assert asked["flash count"]["normalization"] == "count"


def test_no_two_arms_of_a_setting_are_the_same_model() -> None:
    for name in catalogue.EXPERIMENTS:
        for scale in ("cpu", "gpu", "paper"):
            if not catalogue.EXPERIMENTS[name].settings[scale]:  # type: ignore[index]
                continue
            plan = plan_of(name, scale)
            for setting in plan.settings:
                models = [entry.model for entry in plan.entries_of(setting)]
                assert all(model not in models[:index] for index, model in enumerate(models)), f"{name}, {scale}, {setting}"


def test_a_second_call_compiles_the_runs_of_the_paper_as_the_first_does(tmp_path: Path) -> None:
    config = ReproduceConfig("lm", "paper", tmp_path)
    first = make_plan(config)
    write_plan(first)
    assert make_plan(with_saved_options(config)).entries == first.entries


def test_arms_name_systems_presets_and_rows_that_exist() -> None:
    for name, experiment in catalogue.EXPERIMENTS.items():
        arms = {arm.name: arm for arm in experiment.arms}
        assert len(arms) == len(experiment.arms), f"{name}: two arms have the same name"
        assert experiment.baseline in arms
        assert {arm for pair in experiment.pairs.values() for arm in pair} <= set(arms)
        rows = {row for table in experiment.paper_tables for row in paper_tables()[table]["rows"]}
        for arm in experiment.arms:
            assert arm.system in SYSTEMS
            if experiment.paper_tables and arm.paper_row and "paper" in arm.scales:
                assert arm.paper_row in rows, f"{name}: {arm.paper_row}"
            if arm.paper_preset and "{" not in arm.paper_preset:
                assert arm.paper_preset in PRESETS


def test_masked_models_of_minutes_read_bytes() -> None:
    for name, tokenizer, vocab_size, tuning in (("mlm", "bytes", 258, 240.0), ("lm", "bpe-4096", 4096, 60.0)):
        plan = make_plan(ReproduceConfig(name, "cpu"))
        assert plan.tuning == tuning
        for entry in plan.entries:
            assert (entry.options["tokenizer"], entry.model.vocab_size) == (tokenizer, vocab_size)


def test_every_optimiser_has_four_rates_at_every_scale_that_tunes() -> None:
    for name, optimizer in catalogue.OPTIMIZERS.items():
        for scale in ("cpu", "gpu"):
            assert len(optimizer.rates[scale]) == 4, name


def test_the_paper_has_what_its_tables_say() -> None:
    wikipedia = Setting("wikipedia", 2048)
    assert paper_numbers(("lm_wiki40b",), "FLASH", wikipedia) == {"pplx": 15.525, "latency_ms": 56.7, "speedup": 1.6}
    assert paper_numbers(("lm_wiki40b",), "Combiner", wikipedia) == {"pplx": 16.344, "latency_ms": 71.8}
    assert paper_numbers(("lm_pg19",), "FLASH", Setting("books", 8192))["speedup"] == 12.12
    assert "speedup" not in paper_numbers(("lm_pg19",), "FLASH", Setting("books", 1024))  # null in the table
    assert paper_numbers(("ablation_gau", "ablation_mhsa"), "softmax -> relu2", wikipedia) == {"pplx": 17.15}
    assert paper_numbers(("ablation_gau",), "no gating", wikipedia, "mlm") == {"pplx": 4.58}
    assert paper_numbers(("lm_wiki40b",), "FLASH", Setting("wikipedia", 64)) == {}
    assert paper_loss(("lm_wiki40b",), "", wikipedia) is None


def test_numbers_of_wikipedia_do_not_stand_beside_books() -> None:
    assert paper_numbers(("lm_wiki40b",), "FLASH", Setting("books", 2048)) == {}
    assert paper_cost("FLASH-Quad -> FLASH", Setting("books", 2048)) is None
    assert paper_cost("FLASH-Quad -> FLASH", Setting("wikipedia", 2048)) == 0.22
    assert paper_cost("TFM++ -> MC-TFM++", Setting("wikipedia", 512), "mlm") == 0.36
    assert paper_cost("TFM++ -> MC-TFM++", Setting("wikipedia", 300), "mlm") is None


def test_the_list_shows_only_the_models_and_settings_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "peak_flops", lambda device, dtype, seconds: 1e9)
    shown = "\n".join(estimate.describe(make_plan(ReproduceConfig("lm", systems=("combiner",), contexts=(512,)))))
    assert "  combiner " in shown
    assert "  flash" not in shown
    assert "wikipedia, 512 tokens" in shown
    assert "4,096 tokens" not in shown


def test_the_text_behind_a_name_is_shown_once() -> None:
    def notes(**values: Any) -> list[str]:
        return re.findall(
            r"text: [^)]*", "\n".join(estimate.describe(make_plan(ReproduceConfig(systems=("flash",), **values))))
        )

    library = "text: the Python standard library; the option {} gives another"
    assert notes(name="lm") == [library.format("wikipedia"), library.format("books")]
    assert notes(name="lm", books=("b.txt",), data=("d.txt",)) == [
        "text: d.txt; the option wikipedia gives another",
        "text: b.txt",
    ]
    assert notes(name="lm", scale="paper") == ["text: wiki40b; the option wikipedia gives another"]
    assert notes(name="lm", texts=("books",)) == [library.format("books")]
    latency = make_plan(ReproduceConfig("latency"))
    assert text_notes(latency) == {}  # which reads no text
