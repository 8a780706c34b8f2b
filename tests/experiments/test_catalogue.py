"""What the experiments list can be built, is of equal size, and is in the paper where they say so."""

import re
from pathlib import Path
from typing import Any

import pytest

from lineartime.choices import ScaleName
from lineartime.experiments import catalogue, command
from lineartime.experiments.catalogue import Setting
from lineartime.experiments.collect import paper_cost, paper_numbers, paper_tables
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import TOLERANCE, Plan, make_plan, with_saved_options, write_plan
from lineartime.models.presets import PAPER_MILLIONS
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

QUALITY = [name for name, experiment in catalogue.EXPERIMENTS.items() if experiment.kind == "quality"]
SCALES: tuple[ScaleName, ...] = ("cpu", "gpu", "paper")


def plan_of(name: str, scale: ScaleName) -> Plan:
    return make_plan(ReproduceConfig(name, scale))


def all_plans(*scales: ScaleName) -> list[Plan]:
    experiments = catalogue.EXPERIMENTS.items()
    return [plan_of(name, scale) for name, experiment in experiments for scale in scales if experiment.settings[scale]]


def test_models_of_a_setting_differ_and_have_as_many_parameters() -> None:
    for plan in all_plans(*SCALES):
        for setting in plan.settings:
            candidates = plan.candidates_of(setting)
            models = [each.model for each in candidates]
            assert all(model not in models[:index] for index, model in enumerate(models)), f"{plan.config}, {setting}"
            for each in candidates if plan.tunes else ():
                assert abs(each.parameters / candidates[0].parameters - 1) <= TOLERANCE, f"{plan.config}, {each.arm.name}"


def test_gpu_models_have_40_million_parameters() -> None:
    for plan in (each for each in all_plans("gpu") if each.experiment.kind != "memory"):  # whose models are small
        for each in plan.candidates:
            if each.setting.size == "main":
                assert 36e6 <= each.parameters <= 44e6, f"{each.folder}: {each.parameters:,}"


def test_every_run_has_options_of_training_that_make_its_model() -> None:
    for plan in (plan_of(name, scale) for name in QUALITY for scale in SCALES[:2]):
        for each in plan.candidates:
            for job in (plan.speed_job(each, "adamw"), plan.final_job(each, "adamw", 1, 1e-3, 50)):
                config = TrainConfig.from_dict(job.options)
                config.check()
                assert config.model_config(plan.scale.vocab_size) == each.model
                assert config.rows(0, 1).per_step * config.context_length >= plan.scale.tokens_per_batch


def test_the_scale_of_the_paper_is_its_configuration() -> None:
    for plan in all_plans("paper"):
        for each in plan.candidates if plan.experiment.kind == "quality" else ():
            options = plan.final_job(each, "adamw", 0).options
            assert (options["steps"], options["tokens_per_batch"], options["learning_rate"]) == (125_000, 2**18, 7e-4)
            assert (options["context_length"], options["compile"]) == (each.setting.context, "auto")
            assert TrainConfig.from_dict(options).model_config(32_000) == each.model
            stated = PAPER_MILLIONS.get(options["preset"])
            if stated is not None and options["preset"] != "transformer-base":  # whose learned positions follow the context
                assert round(each.parameters / 1e6) == stated, options["preset"]
    assert "chunk_size=512" in plan_of("pg19", "paper").candidates[0].options["override"]
    chunks = [each.options["override"] for each in plan_of("chunk-size", "paper").candidates[:2]]
    assert chunks == [["chunk_size=64", "normalization=paper"], ["chunk_size=128", "normalization=paper"]]


def test_a_job_of_the_paper_trains_with_exactly_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[TrainConfig] = []
    monkeypatch.setattr("lineartime.training.loop.train_completed", lambda config, left_out: trained.append(config))
    for name in ("lm", "layer-ablation", "mlm"):
        plan = plan_of(name, "paper")
        for each in plan.candidates_of(plan.settings[0]):
            asked = TrainConfig.from_dict(plan.final_job(each, "adamw", 0).options)
            train(asked)
            assert trained.pop() == asked, each.folder


def test_the_scale_of_the_paper_divides_and_clips_as_published() -> None:
    for each in plan_of("lm", "paper").candidates:
        scores = each.model.mixer.options
        assert scores.get("normalization", "paper") == "paper"
        if "max_length" in scores:  # without it, a causal GAU divides by 512, and has no table of biases
            assert scores["max_length"] == each.setting.context
        clipped_together = None if each.arm.name == "transformer" else max(2**18 // 64, each.setting.context)
        assert each.options.get("clip_tokens") == clipped_together, each.arm.name
    asked = {each.arm.name: each.model.mixer.options for each in plan_of("normalization", "paper").candidates}
    assert asked["flash count"]["normalization"] == "count"


def test_a_second_call_compiles_the_runs_of_the_paper_as_the_first_does(tmp_path: Path) -> None:
    config = ReproduceConfig("lm", "paper", tmp_path)
    first = make_plan(config)
    write_plan(first)
    assert make_plan(with_saved_options(config)).candidates == first.candidates


def test_arms_name_systems_presets_and_rows_that_exist() -> None:
    for name, experiment in catalogue.EXPERIMENTS.items():
        arms = {arm.name: arm for arm in experiment.arms}
        assert len(arms) == len(experiment.arms), f"{name}: two arms have the same name"
        assert experiment.baseline in arms
        assert {arm for pair in experiment.pairs.values() for arm in pair} <= set(arms)
        rows = {row for table in experiment.paper_tables for row in paper_tables()[table]["rows"]}
        for arm in experiment.arms:
            if experiment.paper_tables and arm.paper_row and "paper" in arm.scales:
                assert arm.paper_row in rows, f"{name}: {arm.paper_row}"


def test_masked_models_of_minutes_read_bytes() -> None:
    plan = make_plan(ReproduceConfig("mlm", "cpu"))
    assert plan.config.tuning == 240
    assert {(each.options["tokenizer"], each.model.vocab_size) for each in plan.candidates} == {("bytes", 258)}


def test_the_paper_has_what_its_tables_say() -> None:
    wikipedia = Setting("wikipedia", 2048)
    assert paper_numbers(("lm_wiki40b",), "FLASH", wikipedia) == {"pplx": 15.525, "latency_ms": 56.7, "speedup": 1.6}
    assert paper_numbers(("lm_wiki40b",), "Combiner", wikipedia) == {"pplx": 16.344, "latency_ms": 71.8}
    assert paper_numbers(("lm_pg19",), "FLASH", Setting("books", 8192))["speedup"] == 12.12
    assert "speedup" not in paper_numbers(("lm_pg19",), "FLASH", Setting("books", 1024))  # null in the table
    assert paper_numbers(("ablation_gau", "ablation_mhsa"), "softmax -> relu2", wikipedia) == {"pplx": 17.15}
    assert paper_numbers(("ablation_gau",), "no gating", wikipedia, "mlm") == {"pplx": 4.58}
    assert paper_numbers(("lm_wiki40b",), "FLASH", Setting("wikipedia", 64)) == {}

    # Numbers of Wikipedia do not stand beside books.
    assert paper_numbers(("lm_wiki40b",), "FLASH", Setting("books", 2048)) == {}
    assert paper_cost("FLASH-Quad -> FLASH", Setting("books", 2048)) is None
    assert paper_cost("FLASH-Quad -> FLASH", Setting("wikipedia", 2048)) == 0.22
    assert paper_cost("TFM++ -> MC-TFM++", Setting("wikipedia", 512), "mlm") == 0.36
    assert paper_cost("TFM++ -> MC-TFM++", Setting("wikipedia", 300), "mlm") is None


def test_list_shows_what_is_asked_for_and_each_text_once() -> None:
    def listed(**values: Any) -> str:
        return "\n".join(command.describe(make_plan(ReproduceConfig("lm", **values))))

    shown = listed(systems=("combiner",), contexts=(512,))
    assert [part in shown for part in ("  combiner ", "512 tokens", "  flash", "4,096 tokens")] == [True, True, False, False]
    total = "1 run of 600 s, 8 trials of 60 s, 6 measurements of speed: 18 min 0 s of training"
    assert shown.endswith(f"{total}\n0 of 15 have ended; left: {total}")
    assert listed(scale="paper", systems=("flash",)).endswith("left: 5 runs of 125,000 steps of 262,144 tokens")

    library = "text: the Python standard library; the option {} gives another"
    for values, texts in (
        ({"texts": ("books",)}, [library.format("books")]),
        ({"books": ("b.txt",), "data": ("d.txt",)}, ["text: d.txt; the option wikipedia gives another", "text: b.txt"]),
        ({"scale": "paper"}, ["text: wiki40b; the option wikipedia gives another"]),
    ):
        assert re.findall(r"text: [^)]*", listed(systems=("flash",), **values)) == texts  # type: ignore[arg-type]
    assert command.text_notes(make_plan(ReproduceConfig("latency"))) == {}  # which reads no text
