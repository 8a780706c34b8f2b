"""What the documents say is true: their code runs, and their commands exist."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from tests.peers.packages import PACKAGES

import lineartime
from lineartime.cli import COMMANDS, parse

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SESSIONS = ("use.md", "transformers.md", "export.md", "fine-tuning.md")

LONG = ("export.md", "fine-tuning.md", "transformers.md")  # they compile, or train with other packages


def code_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


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
        if code_blocks(document.read_text())
    ],
)
@pytest.mark.usefixtures("only_systems_of_the_library_afterwards")
def test_code_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where runs may be left
    session: dict[str, object] = {"__name__": "__main__"}
    for block in code_blocks(document.read_text()):
        # Every block stands for itself, but those of pages that say that they are one session.
        exec(compile(block, document.name, "exec"), session if document.name in SESSIONS else dict(session))


def test_page_on_use_shows_every_public_function() -> None:
    blocks = "".join(code_blocks((ROOT / "docs" / "use.md").read_text()))
    functions = [name for name in lineartime.__all__ if name[0].islower() and name != "build"]
    assert {"train", "evaluate", "save", "fill_mask", "generate_text"} <= set(functions)
    for name in functions:
        assert f"lineartime.{name}(" in blocks, name


def test_errors_that_the_page_on_use_quotes_are_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    *_, block = code_blocks((ROOT / "docs" / "use.md").read_text())
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
    assert runpy.run_path(str(ROOT / "benchmarks" / "quality.py"))["readme_sentence"]() in text
    table = runpy.run_path(str(ROOT / "benchmarks" / "length.py"))["readme_table"]()
    assert table in (ROOT / "README.md").read_text()


def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (document.parent / link).exists(), (document, link)
        for path in re.findall(r"`((?:benchmarks|docs|tests|src)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (document, path)


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
