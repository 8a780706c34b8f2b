"""What experiments and added systems list can be built, is of equal size, and is in the paper where they say so."""

import re
from typing import Any

import pytest
from tests.models.test_config import MILLIONS
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.choices import ScaleName
from lineartime.errors import ArgumentError
from lineartime.experiments import catalogue, command
from lineartime.experiments.catalogue import Setting
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import TOLERANCE, Candidate, Job, Plan, make_plan
from lineartime.experiments.report import paper_numbers, paper_tables
from lineartime.experiments.runner import all_jobs
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

from .conftest import Options

QUALITY = [name for name, experiment in catalogue.EXPERIMENTS.items() if experiment.kind == "quality"]
ALL_SCALES: tuple[ScaleName, ...] = ("cpu", "gpu", "paper")


def plan_of(name: str, scale: ScaleName) -> Plan:
    return make_plan(ReproduceConfig(name, scale))


def all_plans(*scales: ScaleName) -> list[Plan]:
    experiments = catalogue.EXPERIMENTS.items()
    return [plan_of(name, scale) for name, experiment in experiments for scale in scales if experiment.settings[scale]]


def candidates_of(plan: Plan) -> list[Candidate]:
    return [each for candidates in plan.candidates.values() for each in candidates]


def test_models_of_a_setting_differ_and_are_of_one_size() -> None:
    for plan in all_plans(*ALL_SCALES):
        for setting, candidates in plan.candidates.items():
            models = [each.model for each in candidates]
            assert all(model not in models[:index] for index, model in enumerate(models)), f"{plan.config}, {setting}"
            for each in candidates if plan.config.scale != "paper" else ():
                assert abs(each.parameters / candidates[0].parameters - 1) <= TOLERANCE, f"{plan.config}, {each.arm.name}"
                if plan.config.scale == "gpu" and setting.size == "main":
                    assert 36e6 <= each.parameters <= 44e6, f"{each.folder}: {each.parameters:,}"


def test_runs_have_options_of_training_that_make_their_model() -> None:
    for plan in (plan_of(name, scale) for name in QUALITY for scale in ALL_SCALES[:2]):
        models = {each.folder: each.model for each in candidates_of(plan)}
        for job in (job for job in all_jobs(plan) if job.kind == "speed"):
            config = TrainConfig.from_dict(job.options)
            config.check()
            assert config.model_config(plan.scale.vocab_size) == models[job.folder.parent]
            assert config.rows(0, 1).per_step * config.context_length >= plan.scale.tokens_per_batch


def jobs_of_the_paper(name: str) -> list[tuple[Candidate, Job]]:
    plan = plan_of(name, "paper")
    made = {each.folder: each for each in candidates_of(plan)}
    return [(made[job.folder.parent], job) for job in all_jobs(plan)]


@pytest.mark.parametrize("name", [name for name in QUALITY if catalogue.EXPERIMENTS[name].settings["paper"]])
def test_scale_paper_is_the_papers_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[TrainConfig] = []
    monkeypatch.setattr("lineartime.training.loop.train_completed", trained.append)
    for each, job in jobs_of_the_paper(name):
        options = job.options
        assert (options["steps"], options["tokens_per_batch"], options["learning_rate"]) == (125_000, 2**18, 7e-4)
        assert (options["context_length"], options["compile"]) == (each.setting.context, "auto")
        assert TrainConfig.from_dict(options).model_config(32_000) == each.model
        stated = MILLIONS.get(options["preset"])
        if stated is not None and options["preset"] != "transformer-base":  # whose learned positions follow the context
            assert round(each.parameters / 1e6) == stated, options["preset"]
        train(TrainConfig.from_dict(options))
        assert trained.pop() == TrainConfig.from_dict(options), each.folder


def test_scale_paper_divides_and_clips_as_published() -> None:
    for each, job in jobs_of_the_paper("lm"):
        scores = each.model.mixer.options
        assert scores.get("normalization", "paper") == "paper"
        if "max_length" in scores:  # without it, a causal GAU divides by 512, and has no table of biases
            assert scores["max_length"] == each.setting.context
        clipped_together = None if each.arm.name == "transformer" else max(2**18 // 64, each.setting.context)
        assert job.options.get("clip_tokens") == clipped_together, each.arm.name
    asked = {each.arm.name: each.model.mixer.options for each, _ in jobs_of_the_paper("normalization")}
    assert asked["flash count"]["normalization"] == "count"
    assert "chunk_size=512" in jobs_of_the_paper("pg19")[0][1].options["override"]
    chunks = [job.options["override"] for _, job in jobs_of_the_paper("chunk-size")[:2]]
    assert chunks == [["chunk_size=64", "normalization=paper"], ["chunk_size=128", "normalization=paper"]]


def test_arms_name_systems_presets_and_rows_that_exist() -> None:
    for name, experiment in catalogue.EXPERIMENTS.items():
        arms = {arm.name: arm for arm in experiment.arms}
        assert len(arms) == len(experiment.arms), f"{name}: two arms have the same name"
        assert experiment.baseline in arms
        rows = {row for table in experiment.paper_tables for row in paper_tables()[table]["rows"]}
        for arm in experiment.arms:
            if experiment.paper_tables and arm.paper_row and "paper" in arm.scales:
                assert arm.paper_row in rows, f"{name}: {arm.paper_row}"


def test_paper_numbers_are_those_of_its_tables() -> None:
    wikipedia = Setting("wikipedia", 2048)
    assert paper_numbers(("lm_wiki40b",), "FLASH", wikipedia) == {"pplx": 15.525, "latency_ms": 56.7, "speedup": 1.6}
    assert paper_numbers(("lm_wiki40b",), "Combiner", wikipedia) == {"pplx": 16.344, "latency_ms": 71.8}
    assert paper_numbers(("lm_pg19",), "FLASH", Setting("books", 8192))["speedup"] == 12.12
    assert "speedup" not in paper_numbers(("lm_pg19",), "FLASH", Setting("books", 1024))  # null in the table
    assert paper_numbers(("ablation_gau", "ablation_mhsa"), "softmax -> relu2", wikipedia) == {"pplx": 17.15}
    assert paper_numbers(("ablation_gau",), "no gating", wikipedia, "mlm") == {"pplx": 4.58}
    assert paper_numbers(("lm_wiki40b",), "FLASH", Setting("wikipedia", 64)) == {}
    assert (
        paper_numbers(("lm_wiki40b",), "FLASH", Setting("books", 2048)) == {}
    )  # numbers of Wikipedia do not stand beside books


def test_list_shows_what_is_asked_for_and_each_text_once() -> None:
    def listed(**values: Any) -> str:
        return "\n".join(command.describe(make_plan(ReproduceConfig("lm", **values))))

    shown = listed(systems=("combiner",), contexts=(512,))
    assert [part in shown for part in ("  combiner ", "512 tokens", "  flash", "4,096 tokens")] == [True, True, False, False]
    total = "6 speed measurements, 8 trials, 1 run: 18 min 0 s of training"
    assert shown.endswith(f"{total}\n0 of 15 have ended; left: {total}")
    assert listed(scale="paper", systems=("flash",)).endswith("left: 5 runs of 125,000 steps of 262,144 tokens")
    memory = list(command.describe(make_plan(ReproduceConfig("memory"))))
    assert memory[-2] == "40 runs of 2,000 steps of 4,096 tokens"
    texts = listed(systems=("flash",), books=("b.txt",), data=("d.txt",))
    assert re.findall("text of .*", texts) == ["text of wikipedia: d.txt", "text of books: b.txt"]


class Relu(KernelAttention):
    """Linear attention with features relu(x)."""

    name = "relu"

    def features(self, x: Tensor) -> Tensor:
        return x.relu() + 0.001


def test_added_system_may_have_other_options(options: Options) -> None:
    plan = make_plan(options(add=("flash:chunk_size=8:token_shift=true", "flash", "flash:chunk_size=8:token_shift=true")))
    candidates = candidates_of(plan)
    assert [each.arm.name for each in candidates] == ["flash", "transformer++", "flash:chunk_size=8:token_shift=true"]
    added = candidates[-1]
    assert (added.model.mixer.options["chunk_size"], added.model.mixer.options["token_shift"]) == (8, True)
    assert added.folder.name == "flash-chunk_size=8-token_shift=true"
    assert added.arm.seeds == 2


@pytest.mark.parametrize(
    ("name", "item", "message"),
    [
        ("lm", "own", r"^add has 'own', but 'own' is no system: use one of `presets\(\)`, or import the module"),
        ("lm", "flash:chunks=8", "^add has 'flash:chunks=8', but chunks is not an option"),
        ("lm", "flash:d_model=64", "^add has 'flash:d_model=64', but d_model is the same, or follows from the parameters"),
        ("lm", "linformer", "^add has 'linformer', but system is linformer, which cannot be causal"),
        ("latency", "combiner", "^add is combiner, but this experiment measures all its models together"),
    ],
)
def test_added_systems_that_cannot_be_are_named(options: Options, name: str, item: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_plan(options(name, add=(item,)))
