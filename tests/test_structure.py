"""The house: imports point down, and the core needs torch alone."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import lineartime

SOURCE = Path(lineartime.__file__).parent
TESTS = Path(__file__).parent

# From the ground up; a room may import from its own floor's rooms as listed, and from every floor below.
FLOORS: list[set[str]] = [
    {"errors", "choices", "screen", "units"},
    {"fields"},
    {"host"},
    {"files", "machine", "native"},
    {"plots"},
    {"ops"},
    {"layers"},
    {"baselines", "foreign layers"},
    {"models"},
    {"seq2seq"},
    {"data"},
    {"checkpoint", "generation"},
    {"evaluation", "export", "foreign", "text_generation"},
    {"runs"},
    {"training"},
    {"bench", "info", "inspection"},
    {"experiments"},
    {"hf"},
    {"finetuning"},
    {"cli"},
    {"__main__"},
]


# The layers of other packages are below models, and the converters of their checkpoints above.
FOREIGN_LAYERS = {"mixers"}


def room_of(parts: Sequence[str]) -> str:
    if parts[-1] == "__main__":  # starts the command line
        return "__main__"
    return "foreign layers" if parts[0] == "foreign" and parts[1:] and parts[1] in FOREIGN_LAYERS else parts[0]


def room(file: Path) -> str:
    return room_of(file.relative_to(SOURCE).with_suffix("").parts)


def floor(name: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if name in rooms)


def imported_rooms(file: Path) -> set[str]:
    modules = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules.append(node.module or "")
    return {room_of(module.split(".")[1:]) for module in modules if module.startswith("lineartime.")}


def test_imports_point_down() -> None:
    files = [file for file in SOURCE.rglob("*.py") if file != SOURCE / "__init__.py"]
    assert len(files) > 25
    for file in files:
        for other in imported_rooms(file) - {room(file)}:
            assert floor(other) < floor(room(file)), f"{file.relative_to(SOURCE)} imports {other}, which is not below it"


def test_layers_and_models_need_torch_alone_and_rooms_are_entered_by_their_names() -> None:
    script = """
import sys
import torch
before = set(sys.modules)
import lineartime
lineartime.GAU(8, d_qk=4), lineartime.FLASH(8, d_qk=4), lineartime.presets()
lineartime.build("flash-tiny", n_blocks=1)(torch.zeros(1, 3, dtype=torch.long))
lineartime.presets()["flash-tiny"].longest_sequence  # which builds a layer without values
assert "torch._dynamo" not in sys.modules
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(name for name in new if name not in sys.stdlib_module_names and name not in ("lineartime", "torch")))
print(lineartime.ops.attend.__name__, lineartime.layers.GAU is lineartime.GAU)
print(lineartime.data.ByteTokenizer.vocab_size, lineartime.evaluation.evaluate is lineartime.evaluate)
print(*dir(lineartime))
try:
    lineartime.nothing
except AttributeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    others, *lines, names, error = result.stdout.splitlines()
    assert others == "", "packages other than torch, with the core alone"
    assert lines == ["attend True", "258 True"]
    assert {"FLASH", "load", "ops"} <= set(names.split())
    assert error == "module 'lineartime' has no attribute 'nothing'"


def test_public_names_are_all_there() -> None:
    models = ["CausalLM", "FLASH", "GAU", "LayerConfig", "MaskedLM", "ModelConfig", "build", "presets", "register_system"]
    use = ["evaluate", "fill_mask", "load", "load_tokenizer", "save", "train"]
    use += ["generate", "generate_batch", "generate_samples", "generate_text", "load_state", "read_prompt", "save_state"]
    values = [
        "ArgumentError",
        "Evaluation",
        "LineartimeError",
        "PromptState",
        "Sampling",
        "TrainConfig",
        "TrainingResult",
        "__version__",
    ]
    assert sorted(lineartime.__all__) == sorted(models + use + values)
    assert all(hasattr(lineartime, name) for name in lineartime.__all__)
    assert set(lineartime.__all__) <= set(dir(lineartime))
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", lineartime.__version__)


# Flags that are written outside of cli/.
FLAGS: dict[str, set[str]] = {
    "errors.py": {"--steps"},  # an example of what the command line makes of an argument
    "experiments/report.py": {"--scale", "--import", "--{"},  # the command that was given
    "runs/record.py": {"--always", "--dirty", "--abbrev", "--exclude"},  # git's
}


def test_only_the_command_line_knows_that_there_is_one() -> None:
    for file in SOURCE.rglob("*.py"):
        path, text = file.relative_to(SOURCE).as_posix(), file.read_text()
        if room(file) in ("cli", "__main__"):
            continue
        assert "tyro" not in text, path
        assert "argparse" not in text, path
        assert set(re.findall(r"--(?:[a-z][a-z-]*|{)", text)) <= FLAGS.get(path, set()), path


def test_every_package_lists_only_names_it_has() -> None:
    for name in ("ops", "layers", "models", "data", "evaluation", "foreign"):
        package = __import__(f"lineartime.{name}", fromlist=["__all__"])
        assert all(hasattr(package, exported) for exported in package.__all__)


def test_only_weights_of_others_are_unpickled_and_never_with_code() -> None:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        if file == SOURCE / "foreign" / "weights.py":
            assert re.findall(r"torch\.load\(.*\)", text) == ['torch.load(file, map_location="cpu", weights_only=True)']
            assert "import pickle" not in text
            continue
        assert "pickle" not in text, file
        assert "torch.load" not in text, file
        assert "torch.save" not in text, file


def test_no_file_grows_into_several() -> None:
    for file in SOURCE.rglob("*.py"):
        lines = len(file.read_text().splitlines())
        assert lines <= 600, f"{file.relative_to(SOURCE)} has {lines} lines: is it one thing or several?"


# Files at the top of the package that are the ground; all others there count as "top".
GROUND = {"errors", "fields", "files", "host", "machine", "screen", "plots", "info", "choices", "units"}
COUNTED = {".py", ".cpp", ".h", ".json"}

# Lines of each room, as upper bounds in tens; `python tests/test_structure.py` prints what there is now.
BUDGETS: dict[str, int] = {
    "all source": 29860,
    "all tests": 21980,
    "baselines": 3160,
    "bench": 640,
    "checkpoint": 550,
    "cli": 1290,
    "data": 2840,
    "evaluation": 520,
    "experiments": 1780,
    "finetuning": 1400,
    "foreign": 1430,
    "generation": 780,
    "ground": 1430,
    "hf": 1350,
    "inspection": 260,
    "layers": 2560,
    "models": 2500,
    "ops": 3460,
    "runs": 840,
    "seq2seq": 300,
    "top": 970,
    "training": 1880,
}


def lines_of_rooms() -> dict[str, int]:
    """Lines of each package of the source, of its files outside of packages, and of all source and tests."""
    found: dict[str, int] = {}
    for file in sorted(SOURCE.rglob("*")):
        if file.suffix in COUNTED:
            parts = file.relative_to(SOURCE).parts
            name = parts[0] if parts[1:] else "ground" if file.stem in GROUND else "top"
            for key in (name, "all source"):
                found[key] = found.get(key, 0) + len(file.read_text().splitlines())
    found["all tests"] = sum(len(file.read_text().splitlines()) for file in TESTS.rglob("*.py"))
    return dict(sorted(found.items()))


def test_rooms_keep_within_their_budgets() -> None:
    lines = lines_of_rooms()
    over = {name: (number, BUDGETS.get(name)) for name, number in lines.items() if number > BUDGETS.get(name, 0)}
    assert not over, f"lines, and the budget: {over}"


# Where values of tensors may be looked at, which makes the host wait for a device, with the reason.
READS_VALUES = {
    "ops/packing.py": "the lengths of documents, once for all layers",
    "ops/checks.py": "the boundaries of packed documents, once for all layers; prefixes on a CPU",
    "ops/context.py": "compares the shapes of slices, once a forward pass",
    "ops/positions.py": "on Apple's GPUs alone, which have no float64",
    "ops/tiles.py": "a form for CPUs alone",
    "ops/state.py": "the longest stream, where it is readable without waiting",
    "ops/oracle.py": "the definition, which only tests run",
    "ops/mixed_chunk.py": "asks on a CPU alone whose chunk is full",
    "layers/mesa.py": "asks on a CPU alone whose chunk is full",
    "layers/contract.py": "compares results on the CPU, in a check of random tokens",
    "layers/mixer.py": "groups streams that stand at different positions, of mixers that do not take them together",
    "baselines/reformer.py": "its definition, which only tests run",
}
READERS = {"tolist", "item", "cpu", "numpy", "nonzero", "unique"}
ADDERS = {"index_add", "index_add_", "scatter_add", "scatter_add_"}
SUMS_WHOLE_NUMBERS = {  # or one number alone; of others, a GPU would give other bits every time
    "ops/packing.py": "marks.index_add(0, ends, torch.ones_like(ends))",
    "ops/cross_entropy.py": "d_logits.scatter_add_(1, column, -real.to(sums.dtype))",
    "baselines/reformer.py": "buckets.new_zeros(*buckets.shape[:-1], n_buckets).scatter_add(-1, buckets, torch.ones_like(buckets))",  # noqa: E501
}


def calls_of(file: Path) -> Iterator[tuple[str, str]]:
    """The name of each function or method that a file calls, and the call."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of_tensor = name not in ("int", "bool") or any(isinstance(part, ast.Call | ast.Subscript) for part in node.args)
            yield name if of_tensor else "", ast.unparse(node)


def test_no_layer_or_op_copies_values_to_the_host_or_adds_floats_in_any_order() -> None:
    for name in ("ops", "layers", "baselines"):
        for file in (SOURCE / name).rglob("*.py"):
            path = file.relative_to(SOURCE).as_posix()
            for called, call in calls_of(file):
                reads = called in READERS or (called in ("int", "bool") and ".any(" not in call and "triton" not in path)
                assert not reads or path in READS_VALUES, f"{path} calls {call}, which forces a device sync"
                assert called not in ADDERS or call == SUMS_WHOLE_NUMBERS.get(path), f"{path} calls {call}"


def test_each_mutation_breaks_a_line_that_stands_once_and_names_tests_that_exist() -> None:
    mutations = runpy.run_path(str(TESTS / "mutations.py"))
    for mutation in mutations["read"](mutations["MUTATIONS"].read_text()):
        assert mutations["find"](mutation, SOURCE.parent) is None, mutation.name
        for test in mutation.tests.split():
            assert not test.endswith(".py") or (TESTS.parent / test).exists(), (mutation.name, test)


if __name__ == "__main__":
    print("BUDGETS: dict[str, int] = {")
    for room_name, number in lines_of_rooms().items():
        print(f'    "{room_name}": {-(-number // 10) * 10},')
    print("}")
