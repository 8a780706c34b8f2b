"""The site: its generated pages are complete, it builds without a warning, and its how-to pages do what they say."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.layers import check_mixer
from lineartime.layers.residual import constructor_options
from lineartime.models.systems import SYSTEMS
from lineartime.training.optimizers import hidden_maps

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_formula_below_a_source_stays_a_block_of_its_own(generate: dict[str, Any]) -> None:
    page = generate["formula"](SYSTEMS["cosformer"].mixer)
    assert "\n\n    out[t] = sum over visible j of s(t, j) v[j]" in page
    assert "arXiv 2202.08791" not in page  # which has a section of its own


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
    script = """
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
build(load_config("mkdocs.yml", strict=True, site_dir=sys.argv[1]))
"""
    # Python's warnings are those of mkdocs' plugins; a broken link or reference ends the build.
    command = [sys.executable, "-c", script, str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    built = {file.relative_to(tmp_path / "site").as_posix(): file.read_text() for file in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "results.html", "systems/flash.html", "api/layers.html"} <= set(built)
    assert "generate.py" not in {file.name for file in tmp_path.rglob("*")}
    for name, page in built.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*stylesheet[^>]*>", page)
        assert not [address for address in loaded if address.startswith(("http", "//"))], name


def blocks(page: str, title: str | None = None) -> list[str]:
    heading = "" if title is None else f' title="{re.escape(title)}"'
    return re.findall(rf"```python{heading}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.nightly
def test_mechanism_that_is_added_as_its_page_says_keeps_the_contract(tmp_path: Path) -> None:
    package = shutil.copytree(Path(lineartime.__file__).parent, tmp_path / "src" / "lineartime")
    contract = Path(shutil.copy(ROOT / "tests" / "layers" / "test_mixer_contract.py", tmp_path))
    page = "adding-a-mechanism.md"

    (file,) = blocks(page, "src/lineartime/baselines/linear_relu2.py")
    (package / "baselines" / "linear_relu2.py").write_text(file)
    for where, before, title in (
        (package / "baselines" / "__init__.py", "from lineartime.baselines.linear_taylor import", "import"),
        (package / "models" / "systems.py", '    "linear-taylor": System', "row"),
        (contract, '    "linear-taylor": [', "contract"),
    ):
        (added,) = blocks(page, title)
        text = where.read_text()
        assert text.count(before) == 1
        where.write_text(text.replace(before, added + before))

    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "linear-relu2"]
    result = subprocess.run([*tests, contract], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) > 20
    command = [sys.executable, "-m", "lineartime", "presets", "linear-relu2"]
    listed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "linear-relu2-tiny" in listed.stdout


@pytest.mark.nightly
def test_mechanism_in_a_file_of_its_own_is_registered_as_its_page_says(tmp_path: Path) -> None:
    page = "adding-a-mechanism.md"
    (file,), (end,) = blocks(page, "src/lineartime/baselines/linear_relu2.py"), blocks(page, "at the end of linear_relu2.py")
    (tmp_path / "linear_relu2.py").write_text(file + end)
    command = [sys.executable, "-m", "lineartime", "presets", "linear-relu2", "--import", "linear_relu2.py"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "linear-relu2-tiny" in listed.stdout


def test_whole_mixer_of_its_page_keeps_its_promises(only_systems_of_the_library_afterwards: None) -> None:
    page, session = "adding-a-mechanism.md", {"__name__": "retention"}
    for title in ("retention.py", "check"):
        (code,) = blocks(page, title)
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
