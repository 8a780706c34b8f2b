"""What the documents say is true: their code runs, their commands exist, and the pages of the site are complete."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.peers.packages import PACKAGES

import lineartime
from lineartime.cli import COMMANDS, parse
from lineartime.layers import check_mixer
from lineartime.layers.residual import constructor_options
from lineartime.models.systems import SYSTEMS
from lineartime.training.optimizers import hidden_maps

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SESSIONS = ("use.md", "transformers.md", "export.md", "fine-tuning.md")

LONG = ("export.md", "fine-tuning.md", "transformers.md")  # they compile, or train with other packages


def code_blocks(document: Path, title: str | None = None) -> list[str]:
    """Those of a title, or all without one."""
    heading = "" if title is None else f' title="{re.escape(title)}"'
    return re.findall(rf"```python{heading}\n(.*?)```", document.read_text(), re.DOTALL)


def commands(text: str) -> list[str]:
    """What is given to `lineartime`, also through torchrun."""
    start = r"^(?:    |\$ )?(?:torchrun .*-m )?lineartime "
    found = re.findall(rf"{start}((?:{'|'.join(COMMANDS)})\b.*)$", text, re.MULTILINE)
    return [line.split("  #")[0] for line in found]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which PEFT asks for
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, id=document.name, marks=pytest.mark.nightly if document.name in LONG else [])
        for document in DOCUMENTS
        if code_blocks(document)
    ],
)
@pytest.mark.usefixtures("only_systems_of_the_library_afterwards")
def test_code_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where runs may be left
    session: dict[str, object] = {"__name__": "__main__"}
    for block in code_blocks(document):
        # Every block stands for itself, but those of pages that say that they are one session.
        exec(compile(block, document.name, "exec"), session if document.name in SESSIONS else dict(session))


def test_page_on_use_shows_every_public_function() -> None:
    blocks = "".join(code_blocks(DOCS / "use.md"))
    functions = [name for name in lineartime.__all__ if name[0].islower() and name != "build"]
    assert {"train", "evaluate", "save", "fill_mask", "generate_text"} <= set(functions)
    for name in functions:
        assert f"lineartime.{name}(" in blocks, name


def test_errors_that_the_page_on_use_quotes_are_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    *_, block = code_blocks(DOCS / "use.md")
    quoted = block.split("print(error)  # ")[1].strip()
    exec(block, {"lineartime": lineartime, "model": lineartime.build("flash-tiny", n_blocks=1)})
    assert capsys.readouterr().out.strip() == quoted


def test_commands_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineartime.models.systems.import_modules", lambda names: None)  # of files that do not exist
    for document in DOCUMENTS:
        for command in commands(document.read_text()):
            name, *arguments = shlex.split(command)
            parse(name, arguments)


def test_every_command_is_shown() -> None:
    shown = {command.split()[0] for document in DOCUMENTS for command in commands(document.read_text())}
    assert shown == set(COMMANDS)


def test_numbers_of_the_readme_are_those_of_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    text = " ".join((ROOT / "README.md").read_text().split())
    for script in ("quality.py", "peers.py"):
        assert runpy.run_path(str(ROOT / "benchmarks" / script))["readme_sentence"]() in text
    table = runpy.run_path(str(ROOT / "benchmarks" / "length.py"))["readme_table"]()
    assert table in (ROOT / "README.md").read_text()


def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (document.parent / link).exists(), (document, link)
        for path in re.findall(r"`((?:benchmarks|docs|tests|src)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (document, path)
    for script in ROOT.glob("benchmarks/*.py"):
        for path in re.findall(r'"((?:tests|examples)/[\w./-]+)"', script.read_text()):
            assert (ROOT / path).exists(), (script, path)


def test_tree_names_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = [path.name for path in (ROOT / "src" / "lineartime").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(packages) >= 6
    for package in packages:
        assert f"{package}/" in text, package


def test_extras_hold_the_packages_that_are_compared_with_and_dev_has_all_of_them() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = dict(re.findall(r"^(peers|others|dev) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL))
    required = re.findall(r'"([\w-]+)[=>]=', extras["peers"] + extras["others"])
    assert sorted(required, key=str.lower) == sorted(PACKAGES.values(), key=str.lower)
    assert re.search(r'"lineartime\[.*\bpeers,others\b.*\]"', extras["dev"])


def test_make_has_the_targets_that_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        targets = re.findall(r"^    make ([\w-]+)", (ROOT / document).read_text(), re.MULTILINE)
        assert targets
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# The site, and its how-to pages ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    return runpy.run_path(str(DOCS / "generate.py"))


def test_formula_below_a_source_stays_a_block_of_its_own(generate: dict[str, Any]) -> None:
    page = generate["formula"](SYSTEMS["flowformer"].mixer)
    assert "\n\n    a = sigmoid(q), b = sigmoid(k)" in page
    assert "arXiv 2202.06258" not in page  # which has a section of its own


def test_page_of_a_system_has_its_formula_its_source_and_every_option(generate: dict[str, Any]) -> None:
    for name, system in SYSTEMS.items():
        page = generate["system_page"](name)
        formula, options, source = (re.split(r"^## ", page, flags=re.MULTILINE)[part] for part in (1, 2, 3))
        assert re.search(r"^    \S.*=", formula, re.MULTILINE), (
            f"{name}: neither its module nor one that it names has a formula"
        )
        assert re.search(r"arxiv\.org|https://|ours", source), f"no module or class in the line of {name} states a source"
        rows = {row.split(" | ")[0].strip("| `"): row for row in options.splitlines() if row.startswith("| `")}
        assert set(rows) == set(constructor_options(system.mixer))
        for row in rows.values():
            assert len(row.split(" | ")[-1].strip("| ")) > 10, f"no documentation describes {row}"


def test_reference_holds_every_public_class_and_function(generate: dict[str, Any]) -> None:
    page = generate["public_names_page"]()
    for name in set(lineartime.__all__) - {"__version__"}:
        assert re.search(rf"^::: lineartime\..*\b{name}$", page, re.MULTILINE), name


@pytest.mark.nightly
def test_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    built = {file.relative_to(tmp_path / "site").as_posix(): file.read_text() for file in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "results.html", "systems/flash.html", "api/layers.html"} <= set(built)
    assert "generate.py" not in {file.name for file in tmp_path.rglob("*")}
    for name, page in built.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*stylesheet[^>]*>", page)
        assert not [address for address in loaded if address.startswith(("http", "//"))], name


@pytest.mark.nightly
def test_mechanism_that_is_added_as_its_page_says_keeps_the_contract(tmp_path: Path) -> None:
    package = shutil.copytree(Path(lineartime.__file__).parent, tmp_path / "src" / "lineartime")
    page = DOCS / "adding-a-mechanism.md"

    (file,) = code_blocks(page, "src/lineartime/baselines/linear_relu2.py")
    (package / "baselines" / "linear_relu2.py").write_text(file)
    for where, before, title in (
        (package / "baselines" / "__init__.py", "from lineartime.baselines.mixed_chunk import MCTFM", "import"),
        (package / "models" / "systems.py", '    "linear-taylor": System', "row"),
    ):
        (added,) = code_blocks(page, title)
        text = where.read_text()
        assert text.count(before) == 1
        where.write_text(text.replace(before, added + before))

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(ROOT)])}
    contract = shutil.copy(ROOT / "tests" / "layers" / "test_mixer_contract.py", tmp_path)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "linear-relu2"]
    result = subprocess.run([*tests, contract], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) > 20
    command = [sys.executable, "-m", "lineartime", "presets", "linear-relu2"]
    listed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "linear-relu2-tiny" in listed.stdout


@pytest.mark.nightly
def test_mechanism_in_a_file_of_its_own_is_registered_as_its_page_says(tmp_path: Path) -> None:
    page = DOCS / "adding-a-mechanism.md"
    (file,), (end,) = (
        code_blocks(page, "src/lineartime/baselines/linear_relu2.py"),
        code_blocks(page, "at the end of linear_relu2.py"),
    )
    (tmp_path / "linear_relu2.py").write_text(file + end)
    command = [sys.executable, "-m", "lineartime", "presets", "linear-relu2", "--import", "linear_relu2.py"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "linear-relu2-tiny" in listed.stdout


def test_whole_mixer_of_its_page_keeps_its_promises(only_systems_of_the_library_afterwards: None) -> None:
    page, session = DOCS / "adding-a-mechanism.md", {"__name__": "retention"}
    for title in ("retention.py", "check"):
        (code,) = code_blocks(page, title)
        assert len(code.splitlines()) <= 60
        exec(code, session)
    kind: Any = session["Retention"]
    check_mixer(kind(16, causal=False))
    nothing, _ = kind(16, causal=True).extend(
        torch.randn(2, 5, 16), None, torch.zeros(2, 5, dtype=torch.bool)
    )  # all is padding
    assert not nothing.any()
    half = kind(16, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert len(hidden_maps(lineartime.build("retention-tiny", n_blocks=1))) == 4
