"""A catalogue of what can be wrong in the files that the library reads back: each ends in one sentence.

The cases are made from the fields of the dataclasses that describe the files, so that a new field brings its own.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime import files
from lineartime.checkpoint.format import TrainingState, ValidationLoss, write_files
from lineartime.data import ByteTokenizer, load_corpus, token_stream
from lineartime.data.encode import EncodedTextInfo
from lineartime.errors import LineartimeError
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import folder_of, with_saved_options
from lineartime.experiments.runner import Outcome
from lineartime.fields import Between
from lineartime.models.config import ModelConfig
from lineartime.models.layer_config import KINDS as KINDS_OF_LAYERS
from lineartime.models.layer_config import LayerConfig, own_options
from lineartime.runs.metrics import read_damaged_metrics
from lineartime.runs.record import Record, read_record
from lineartime.training.config import TrainConfig
from lineartime.training.saving import saved_config

NAN, HUGE = math.nan, 10**30
MODEL = lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8, chunk_size=8)
DIGEST = "0" * 64
CONFIG = TrainConfig(steps=9).to_dict()
POSITION = {"rows": 3, "of": 8, "lanes": {"0": {"epoch": 0, "source": {"examples": 3}, "used": 2}}}
GIT = {"commit": "abc", "branch": "main", "changed": True}
MACHINE = {"system": "Linux", "processor": "x", "cores": 2, "threads": 1, "processes": 1, "gpus": ["y"], "cuda": "13"}
PROCESS = {
    "time": "2026-01-01T00:00:00+00:00",
    "command": ["lineartime", "train"],
    "changed_options": {"precision": "bf16"},
    "versions": {"torch": "2.13"},
    "machine": MACHINE,
    "git": GIT,
    "error": "Text.",
}
TEST = {"name": "", "context_length": 8, "loss": 2.0, "bits_per_byte": 3.0, "word_perplexity": 9.0, "tokens": 5, "text": "x"}
TIME = {"subject": "flash-tiny", "length": 8, "batch": 1, "tokens": 8, "median_seconds": 0.1, "spread_seconds": 0.1}
PLAN = {**{name: [] for name in ("data", "code", "books", "wikipedia", "optimizers")}, "budget": 1.0, "tuning": 1.0}


class File(NamedTuple):
    """A file that is read back: what describes it, what it holds, and how it is written below a folder and read from there."""

    content: Any
    example: dict[str, Any]
    place: str
    read: Callable[[Path], Any]
    part: str = ""


def checkpoint(folder: Path) -> Path:
    return folder / "step-00000003"


def read_facts(folder: Path) -> Any:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("some words\n" * 9)
    return token_stream(load_corpus([str(text)], "text"), "all", ByteTokenizer(), folder / "cache")


FILES = {
    "model.json": File(
        ModelConfig, MODEL.config.to_dict(), "step-00000003/model.json", lambda f: lineartime.load(checkpoint(f))
    ),
    "training.json": File(
        TrainingState,
        {"step": 3, "text": "x", "data": POSITION, "config": CONFIG, "skipped": 1, "validation_loss": 2.0},
        "step-00000003/training.json",
        lambda f: saved_config(checkpoint(f)),
    ),
    "options of training.json": File(
        TrainConfig,
        {"step": 3, "text": "x", "data": {"rows": 3}, "config": CONFIG},
        "step-00000003/training.json",
        lambda f: saved_config(checkpoint(f)),
        part="config",
    ),
    "validation.json": File(
        ValidationLoss, {"validation_loss": 2.0}, "step-00000003/validation.json", lambda f: checkpoints.best_checkpoint(f)
    ),
    "run.json": File(Record, {"options": {"seed": 1}, "seed": 1, "processes": [PROCESS]}, "run.json", read_record),
    "facts.json": File(
        EncodedTextInfo,
        {
            "dtype": "uint16",
            "n_tokens": 1,
            "n_bytes": 1,
            "n_words": 1,
            "n_documents": 1,
            "sha256": {"tokens-00000.bin": DIGEST},
        },
        "cache/*/facts.json",
        read_facts,
    ),
    "outcome.json": File(
        Outcome,
        {
            "kind": "run",
            "error": None,
            "tests": [{**TEST, "by_position": [[0, 1, 2.0]]}],
            "time": "now",
            "machine": {"cpu": "x", "threads": 1},
            "entries": [{**TIME, "problem": None, "dtype": "fp32", "mode": "eager"}],
        },
        "outcome.json",
        lambda f: files.read_file(f / "outcome.json", Outcome),
    ),
    "plan.json": File(
        ReproduceConfig,
        {**PLAN, "compile": "off", "precision": "auto", "threads": 1},
        "lm-cpu/plan.json",
        lambda f: with_saved_options(ReproduceConfig("lm", out=f)),
    ),
}


# The cases ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A value at a place in a file: the keys that lead to it, and the field that the sentence must name."""

    file: str
    keys: tuple[Any, ...]
    value: Any
    field: str


MISSING = "(missing)"
KINDS: dict[Any, list[Any]] = {
    int: ["3", [3], {"a": 3}, 1.5, True, NAN, HUGE],
    float: ["3", [3.0], {"a": 3}, True, NAN, math.inf, -math.inf],
    str: [3, ["x"], {"a": "x"}, True, NAN, "x\0y"],
    Path: [3, ["x"], {"a": "x"}, True, "x\0y"],
    bool: ["true", 1, [True], {"a": 1}],
    tuple: [3, {"a": 1}, True, [[[]]]],
    dict: [3, [1], "x", True],
    "object": [3, [1], "x", True, {"unknown": 1}],
    Literal: ["unknown", 3, [1], {"a": 1}, True],
}


def wrong_values(hint: Any) -> list[Any]:
    """What a field of this type must not have, from the type alone."""
    if get_origin(hint) is Annotated:
        base, limit, *_ = get_args(hint)
        below = [-1] if isinstance(limit, Between) and (limit.least == 0 or limit.above == 0) else []
        at = [0] if isinstance(limit, Between) and (limit.least == 1 or limit.above == 0) else []
        return [*wrong_values(base), *below, *at]
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        wrong = wrong_values(options[0]) if len(options) == 1 else [{"a": 1}, NAN, [[[]]]]
        return [value for value in wrong if value is not None]
    if hint is Any:
        return [NAN, HUGE]
    kind = "object" if dataclasses.is_dataclass(hint) or hint is LayerConfig else get_origin(hint) or hint
    return [*KINDS[kind], None]


def cases_of(file: str, content: Any, example: Any, keys: tuple[Any, ...]) -> Iterator[Case]:
    """Every field of a dataclass, and of those within it, with each wrong value, and without it."""
    hints = get_type_hints(content, include_extras=True)
    for field in dataclasses.fields(content):
        hint, path = hints[field.name], (*keys, field.name)
        for value in wrong_values(hint):
            yield Case(file, path, value, field.name)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield Case(file, path, MISSING, field.name)
        inner, value = parts_of(hint), example.get(field.name)
        if dataclasses.is_dataclass(inner) and inner is not LayerConfig and value:
            for key, part in (("", value),) if "rows" in value else items(value):
                yield from cases_of(file, inner, part, path if key == "" else (*path, key))
    yield Case(file, (*keys, "colour"), "red", "colour")


def items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The first part of a list or an object of dataclasses; the value itself if it is one dataclass."""
    if isinstance(value, list):
        yield 0, value[0]
    elif all(isinstance(part, dict) for part in value.values()):
        yield next(iter(value.items()))
    else:
        yield "", value


def parts_of(hint: Any) -> Any:
    """The dataclass in an optional field, a list or an object."""
    if get_origin(hint) in (Union, UnionType):
        return parts_of(next(option for option in get_args(hint) if option is not type(None)))
    if get_origin(hint) is tuple:
        return parts_of(get_args(hint)[0])
    return parts_of(get_args(hint)[1]) if get_origin(hint) is dict else hint


def layer_cases() -> Iterator[Case]:
    """Every option of a layer in model.json."""
    for name, option in own_options(lineartime.FLASH).items():
        for value in wrong_values(option.type):
            yield Case("model.json", ("mixer", name), value, name)
    for kind in (None, 3, ["flash"], {"a": 1}, "mlp", "unknown"):
        yield Case("model.json", ("mixer", "kind"), kind, "kind")


def all_cases() -> list[Case]:
    found = [*layer_cases()]
    for name, file in FILES.items():
        keys = (file.part,) if file.part else ()
        found += cases_of(name, file.content, file.example[file.part] if file.part else file.example, keys)
    # What a dataclass cannot tell: a text may be one text or several; a layer is described by its kind.
    texts = [case for case in found if case.keys == ("config", "data") and not isinstance(case.value, (int, dict, float))]
    return [case for case in found if case not in texts]


CASES = all_cases()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each file, as the library writes them."""
    folder = tmp_path_factory.mktemp("files")
    (checkpoint(folder) / "optimizer").mkdir(parents=True)
    save_file({"exp_avg": torch.zeros(3)}, checkpoint(folder) / "optimizer" / "moments.safetensors")
    write_files(checkpoint(folder), MODEL.state_dict(), MODEL.config, ByteTokenizer())
    read_facts(folder)
    folder_of(ReproduceConfig("lm", out=folder)).mkdir()
    for file in FILES.values():
        if file.content is not EncodedTextInfo and file.content is not ModelConfig:
            (folder / file.place).write_text(json.dumps(file.example))
    return folder


@pytest.fixture
def spoiled(whole: Path) -> Iterator[Callable[[str, bytes], Callable[[], Any]]]:
    """Puts other bytes into a file, and returns what reads it; afterwards the file is as before."""
    before: dict[Path, bytes] = {}

    def spoil(name: str, content: bytes) -> Callable[[], Any]:
        [place] = whole.glob(FILES[name].place)
        before.setdefault(place, place.read_bytes())
        place.write_bytes(content)
        return lambda: FILES[name].read(whole)

    yield spoil
    for place, content in before.items():
        place.write_bytes(content)


def changed(example: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """A copy of plain data with another value at a place."""
    copy = json.loads(json.dumps(example))
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    if value == MISSING:
        inner.pop(keys[-1], None)
    else:
        inner[keys[-1]] = value
    return copy


def check_sentence(message: str, *named: str) -> None:
    assert "\n" not in message
    assert len(message) < 900
    for name in named:
        assert name in message, f"{name!r} is not in {message!r}"


def test_all_files_of_the_catalogue_are_read_as_they_are(whole: Path) -> None:
    assert {case.file for case in CASES} == set(FILES)
    for name, file in FILES.items():
        if name != "model.json":
            assert file.read(whole) is not None, name


@pytest.mark.parametrize("file", FILES)
def test_wrong_value_is_named_with_its_file_and_field(file: str, spoiled: Callable[[str, bytes], Callable[[], Any]]) -> None:
    example = FILES[file].example
    failures = []
    for case in (case for case in CASES if case.file == file):
        content = json.dumps(changed(example, case.keys, case.value)).encode()
        try:
            found = spoiled(file, content)()
        except LineartimeError as error:
            said = str(error)
            named = FILES[file].place.rpartition("/")[2] in said or "The options in" in said
            parts = (case.field, *shown_part(case))
            if not named or "\n" in said or len(said) > 900 or any(part not in said for part in parts):
                failures.append(f"{case}: {said[:300]}")
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}"[:300])
        else:
            failures.append(f"{case} was read as {found!r}"[:300])
    assert not failures, "\n".join(failures)


def shown_part(case: Case) -> list[str]:
    """What a sentence must show of a value: enough to find it."""
    if case.value == MISSING or case.field == "colour" or (case.field in KINDS_OF_LAYERS and isinstance(case.value, dict)):
        return []  # of an object for a layer, the kind is named
    if isinstance(case.value, dict):
        return ["unknown" if "unknown" in case.value else "a"]
    return [str(case.value[0]).strip("[]") if isinstance(case.value, list) else str(case.value).split("\0")[0]]


WHOLE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is not JSON"),
    "cut off": (b'{"step": 3', "it is not JSON"),
    "a list": (b"[]", "it is [], but must be an object"),
    "not UTF-8": (b'{"a": "\xff"}', "it is not UTF-8 at byte 7"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "it is not JSON"),
    "deep": (b"[" * 100_000, "lists and objects nested too deeply"),
    "digits": (b'{"step": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
}


@pytest.mark.parametrize("file", FILES)
def test_file_of_something_else_is_named(file: str, spoiled: Callable[[str, bytes], Callable[[], Any]]) -> None:
    for content, what in WHOLE_FILES.values():
        with pytest.raises(LineartimeError) as caught:
            spoiled(file, content)()
        check_sentence(str(caught.value), FILES[file].place.rpartition("/")[2], what)


LINES: dict[str, str] = {
    '{"loss": 1.0}': "step is missing",
    '{"step": -1}': "step is -1",
    '{"step": true}': "step is True",
    '{"step": 1000000000000000000}': "step is 1000000000000000000",
    '{"step": 1, "loss": null}': "loss is None",
    '{"step": 1, "loss": 1e999}': "loss is inf",
    '{"step": 1, "loss": 1e300}': "loss is 1e+300",
    '{"step": 1, "tokens": -5}': "tokens is -5",
    '{"step": 1, "skipped": "none"}': "skipped is 'none'",
    "3": "it is 3",
}


def test_damaged_line_of_metrics_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    text = "".join(f'{line}\n{{"step": {number}}}\n' for number, line in enumerate(LINES))
    (tmp_path / "metrics.jsonl").write_text(text)
    lines, problems = read_damaged_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(LINES)))
    for number, (problem, what) in enumerate(zip(problems, LINES.values(), strict=True)):
        check_sentence(problem, f"line {2 * number + 1}: ", what)
