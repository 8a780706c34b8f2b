"""Run the tests that concern a package with its oldest allowed, pinned and newest version: `python benchmarks/versions.py`.

The oldest is the first release that pyproject.toml allows, the newest the last one on the index. Each other version than the
pinned one gets an environment of its own, above the one that runs this script, in which pip installs it with what it needs.
Results are kept after each package, and those of earlier calls stay; name packages to run only these. At the end, or alone with
--table, the table goes to benchmarks/results/versions.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from measure import RESULTS, origin
from packaging.requirements import Requirement
from packaging.version import Version

from lineartime.units import markdown_table

ROOT = Path(__file__).parents[1]
FILE = RESULTS / "versions.json"
COLUMNS = ("oldest", "pinned", "newest")
IGNORED = ("-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
"""What packages say of names that will go: it changes nothing for a user yet."""
TRACKED = """
import pathlib, tempfile, lineartime
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "text.txt").write_text("a line of a text\\n" * 2000)
sizes = dict(n_blocks=1, d_model=16, d_qk=8, chunk_size=16)
lineartime.train(preset="flash-tiny", override=sizes, data=str(folder / "text.txt"), steps=2, context_length=16, batch_size=1,
    eval_windows=1, threads=1, compile="off", out=str(folder / "run"), cache=str(folder / "cache"), track=["{}"])
"""


@dataclass(frozen=True)
class Check:
    """A package, the extra that names it (empty for the core), and what to run: arguments of pytest, or a tracker's name."""

    package: str
    extra: str
    tests: tuple[str, ...] = ()
    tracker: str = ""

    def command(self, python: Path) -> list[str]:
        if self.tracker:
            return [str(python), "-c", TRACKED.format(self.tracker)]
        return [str(python), "-m", "pytest", "-q", "-n", str(os.cpu_count()), "-p", "no:cacheprovider", *IGNORED, *self.tests]


CORE = ("tests/ops", "tests/layers", "tests/models", "tests/baselines", "tests/generation", "-m", "not slow")
CHECKS = (
    Check("datasets", "data", ("tests/data",)),
    Check("transformers", "hf", ("tests/hf", "tests/peers/test_transformers.py")),
    Check(
        "tokenizers",
        "tokenizers",
        ("tests/data/test_tokenizers.py", "tests/data/test_tokens.py"),
    ),
    Check("zstandard", "data", ("tests/data/test_readers.py", "tests/data/test_corpora.py")),
    Check("pyyaml", "data", ("tests/cli/test_train.py",)),
    Check("matplotlib", "plot", ("tests/test_plots.py", "tests/runs", "tests/inspection")),
    Check("onnxscript", "onnx", ("tests/test_export.py", "-k", "onnx")),
    Check("onnx", "onnx", ("tests/test_export.py", "-k", "onnx")),
    Check("triton", "triton", ("tests/ops/triton", "-m", "not slow")),
    Check("x-transformers", "others", ("tests/peers/test_x_transformers.py",)),
    Check("performer-pytorch", "others", ("tests/peers/test_attention.py", "-k", "performer_pytorch")),
    Check("reformer-pytorch", "others", ("tests/peers/test_attention.py", "-k", "reformer_pytorch")),
    Check("linformer", "others", ("tests/peers/test_attention.py", "-k", "linformer")),
    Check("local-attention", "others", ("tests/peers/test_attention.py", "-k", "local_attention")),
    Check("FLASH-pytorch", "peers", ("tests/foreign/test_flash_pytorch.py",)),
    Check("wandb", "wandb", tracker="wandb"),
    Check("numpy", "", ("tests/data", "tests/test_evaluation.py")),
    Check("safetensors", "", ("tests/test_checkpoint.py", "tests/foreign")),
    Check("tyro", "", ("tests/cli",)),
    Check("rich", "", ("tests/cli", "tests/runs")),
    Check("tensorboardX", "", ("tests/runs",)),
    Check("torch", "", CORE),
)


def bounds(package: str) -> Requirement:
    """The first requirement of a package in pyproject.toml."""
    lines = re.findall(
        rf'^ *(?:[\w-]+ = \[)?.*?"({re.escape(package)}(?:\[[a-z]+\])?[=<>~][^"]*)"',
        (ROOT / "pyproject.toml").read_text(),
        re.M,
    )
    return Requirement(lines[0])


def releases(package: str) -> list[Version]:
    """All releases that pip finds for this Python, oldest first."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True, check=True
    )
    listed = re.search(r"Available versions: (.*)", found.stdout)
    assert listed is not None, found.stdout
    return sorted(Version(each) for each in listed[1].split(", ") if "+" not in each)


def chosen(package: str) -> dict[str, str]:
    """The version for each column; the pinned one is the installed one, or missing."""
    allowed = [each for each in releases(package) if each in bounds(package).specifier]
    versions = {"oldest": str(allowed[0]), "newest": str(allowed[-1])}
    try:
        return versions | {"pinned": installed(package)}
    except ImportError:
        return versions


def run(check: Check, version: str, folder: Path, logs: Path | None) -> str:
    """Install a version and run what concerns it: "123 passed", or what went wrong in a few words."""
    python = Path(sys.executable)
    if not is_installed(check.package, version):
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (own / "zz_others.pth").write_text(sysconfig.get_path("purelib"))
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-q", f"{check.package}=={version}"], capture_output=True, text=True
        )
        if done.returncode:
            return "does not install"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(check.command(python), cwd=ROOT, capture_output=True, text=True, env=environment)
    if logs is not None:
        (logs / f"{check.package}-{version}.log").write_text(done.stdout + done.stderr)
    if check.tracker:
        return "fails" if done.returncode else "a run"
    counts = re.findall(r"(\d+) (failed|passed|error)", (done.stdout.strip().splitlines() or [""])[-1])
    return ", ".join(f"{count} {what}" for count, what in counts) or "fails"


def is_installed(package: str, version: str) -> bool:
    try:
        return installed(package).partition("+")[0] == version.partition("+")[0]
    except ImportError:
        return False


def table(results: dict[str, Any]) -> str:
    rows = []
    for check in CHECKS:
        found = results.get(check.package, {})
        cells = [" ".join(filter(None, found.get(column, ()))).replace(" ", ": ", 1) or "-" for column in COLUMNS]
        if found:
            rows.append([f"`{check.package}`", f"`{check.extra}`" if check.extra else "", *cells])
    return markdown_table(["package", "extra", *COLUMNS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="the packages to check; all by default")
    parser.add_argument("--table", action="store_true", help="only write the table of the results so far")
    parser.add_argument("--logs", type=Path, help="a folder for what pytest says, which is deleted otherwise")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(FILE.read_text())["packages"] if FILE.exists() else {}
    for check in () if options.table else CHECKS:
        if options.packages and check.package not in options.packages:
            continue
        said: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as folder:
            for column, version in chosen(check.package).items():
                if version not in said:
                    said[version] = run(check, version, Path(folder) / version, options.logs)
                results.setdefault(check.package, {})[column] = [version, said[version]]
                print(check.package, column, version, said[version], flush=True)
        FILE.write_text(json.dumps({**origin(), "packages": results}, indent=1) + "\n")
    (RESULTS / "versions.md").write_text(table(results))


if __name__ == "__main__":
    main()
