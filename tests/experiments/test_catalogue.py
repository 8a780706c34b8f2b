"""What experiments and added systems list can be built, is of equal size, and is in the paper where they say so."""

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.choices import ScaleName
from lineartime.errors import ArgumentError
from lineartime.experiments import catalogue, command
from lineartime.experiments.catalogue import Setting
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import TOLERANCE, Candidate, Plan, make_plan
from lineartime.experiments.report import paper_numbers, paper_tables
from lineartime.experiments.runner import all_jobs
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig

from .conftest import Options

SCALES: tuple[ScaleName, ...] = ("cpu", "gpu")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [make_plan(ReproduceConfig(name, scale)) for name in catalogue.EXPERIMENTS for scale in SCALES]


def candidates_of(plan: Plan) -> list[Candidate]:
    return [each for candidates in plan.candidates.values() for each in candidates]


def test_models_of_a_setting_differ_and_are_of_one_size(plans: list[Plan]) -> None:
    for plan in plans:
        for setting, candidates in plan.candidates.items():
            models = [each.model for each in candidates]
            assert all(model not in models[:index] for index, model in enumerate(models)), f"{plan.config}, {setting}"
            for each in candidates:
                assert abs(each.parameters / candidates[0].parameters - 1) <= TOLERANCE, f"{plan.config}, {each.arm.name}"
                if plan.config.scale == "gpu" and not (setting.width or setting.task):
                    assert 36e6 <= each.parameters <= 44e6, f"{each.folder}: {each.parameters:,}"


def test_runs_have_options_of_training_that_make_their_model(plans: list[Plan]) -> None:
    for plan in plans:
        models = {each.folder: each.model for each in candidates_of(plan)}
        for job in (job for job in all_jobs(plan) if job.folder.name.endswith(("speed-0", "seed-0")) and job.options):
            config = TrainConfig.from_dict(job.options)
            config.check()
            model = models[job.folder.parent]
            assert config.model_config(model.vocab_size) == model
            assert config.rows(0, 1).per_step * config.context_length >= plan.scale.tokens_per_batch


def test_arms_have_names_of_their_own_and_the_papers_rows_those_of_systems() -> None:
    for name, experiment in catalogue.EXPERIMENTS.items():
        arms = {arm.name: arm for arm in experiment.arms}
        assert len(arms) == len(experiment.arms), f"{name}: two arms have the same name"
        assert experiment.baseline in arms
        rows = {row for table in experiment.paper_tables for row in paper_tables()[table]["rows"]}
        assert not rows or experiment.baseline in rows
        assert rows <= {*SYSTEMS, *arms}


def test_paper_numbers_are_those_of_its_tables() -> None:
    wikipedia = Setting("wikipedia", 2048)
    assert paper_numbers(("lm_wiki40b",), "flash", wikipedia) == {"pplx": 15.525, "latency_ms": 56.7, "speedup": 1.6}
    assert paper_numbers(("lm_wiki40b",), "combiner", wikipedia) == {"pplx": 16.344, "latency_ms": 71.8}
    assert paper_numbers(("lm_pg19",), "flash", Setting("books", 8192))["speedup"] == 12.12
    assert "speedup" not in paper_numbers(("lm_pg19",), "flash", Setting("books", 1024))  # null in the table
    assert paper_numbers(("ablation_gau", "ablation_mhsa"), "mhsa-relu2", wikipedia) == {"pplx": 17.15}
    assert paper_numbers(("ablation_gau",), "gau-ungated", wikipedia, "mlm") == {"pplx": 4.58}
    assert paper_numbers(("lm_wiki40b",), "flash", Setting("wikipedia", 64)) == {}
    assert paper_numbers(("lm_wiki40b",), "flash", Setting("books", 2048)) == {}  # those of Wikipedia


def test_plan_has_the_jobs_that_are_asked_for_and_names_each_text_once() -> None:
    def kinds(name: str = "lm", **values: Any) -> dict[str, int]:
        return Counter(job.kind for job in all_jobs(make_plan(ReproduceConfig(name, **values))))

    assert kinds(systems=("combiner",), contexts=(512,)) == {"speed": 6, "tune": 8, "run": 1}
    without_choice = kinds(systems=("flash",), contexts=(512,), optimizers=("muon",), rates=(0.01,))
    assert without_choice == {"speed": 3, "run": 2}  # of which nothing is tried
    assert kinds("memory") == {"run": 40}
    plan = make_plan(ReproduceConfig("lm", systems=("flash",), books=("b.txt",), data=("d.txt",)))
    assert command.text_notes(plan) == ["text of wikipedia: d.txt", "text of books: b.txt"]


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
    ("item", "message"),
    [
        ("own", r"^add has 'own', but 'own' is no system: use one that `lineartime presets` lists, or import the module"),
        ("flash:chunks=8", "^add has 'flash:chunks=8', but chunks is not an option"),
        ("flash:d_model=64", "^add has 'flash:d_model=64', but d_model is the same, or follows from the parameters"),
        ("linformer", "^add has 'linformer', but system is linformer, which cannot be causal"),
    ],
)
def test_added_systems_that_cannot_be_are_named(options: Options, item: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_plan(options(add=(item,)))
