"""What is passed on: a wheel and a source distribution that install in an empty environment and work there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import lineartime

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools.build_meta import build_sdist, build_wheel; build_sdist('dist'); build_wheel('dist')"
SMOKE = """
import sys, lineartime, lineartime.cli, torch
assert sys.prefix in lineartime.__file__, lineartime.__file__
assert lineartime.FLASH(16, d_qk=8)(torch.randn(1, 50, 16)).shape == (1, 50, 16)
tiny = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "--context-length", "24", "--batch-size", "2", "--steps", "2"]
assert lineartime.cli.main(["train", *tiny, "--eval-windows", "2", "--out", "run", "--cache", "cache"]) == 0
assert lineartime.cli.main(["eval", "run", "--max-tokens", "200", "--cache", "cache"]) == 0
assert lineartime.cli.main(["presets", "tiny"]) == 0
from lineartime.experiments.report import paper_tables
assert paper_tables()  # as the costs of presets, from a file that is not Python
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both distributions, built in a copy: building writes beside the source code."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


def test_distributions_hold_every_file_of_the_package(built: Path) -> None:
    package = ROOT / "src" / "lineartime"
    files = [file for pattern in ("*.py", "*.cpp", "*.h", "py.typed", "*.json") for file in package.rglob(pattern)]
    names = {file.relative_to(ROOT / "src").as_posix() for file in files}
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        assert {name for name in opened.namelist() if name.startswith("lineartime/")} == names
    with tarfile.open(source) as opened:
        held = {name.partition("/src/")[2] for name in opened.getnames()}
    assert names <= held


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_distribution_installs_in_an_empty_environment_and_works(built: Path, kind: str, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (distribution,) = built.glob(kind)
    # Nothing is downloaded: the packages that lineartime needs are those of this environment.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))

    def run(*command: str) -> str:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    run(str(python), "-m", "pip", *install, str(distribution))
    run(str(python), "-W", "ignore", "-c", SMOKE)
    assert run(str(environment / "bin" / "lineartime"), "--version").startswith(f"lineartime {lineartime.__version__}")


def test_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert str(citation["version"]) == version[1]
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "authors", "message", "license"} <= citation.keys()
