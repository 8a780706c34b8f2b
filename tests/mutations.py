"""Breaks one line of the library at a time, and shows which tests notice: `python tests/mutations.py [name ...]`.

Each mutation in mutations.txt replaces a text that stands once in a file of a temporary copy of src/, runs the tests that are
most likely to notice it, and stops at the first that fails. A mutation that survives means that a test is missing. The table
goes to the standard output, in Markdown.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

MUTATIONS = Path(__file__).with_suffix(".txt")
OPTIONS = ["-q", "-x", "-n", "0", "-m", "not nightly", "-p", "no:cacheprovider", "--tb=no"]


class Mutation(NamedTuple):
    """A line of src/lineartime that is broken, and the tests that should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def read(text: str) -> Iterator[Mutation]:
    """Mutations, each as its name, `file: tests`, lines of the old text after "- ", and of the new one after "+ "."""
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("# ")]
        if lines:
            name, where, *change = lines
            file, _, tests = where.partition(": ")
            old, new = ("\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+")
            yield Mutation(name, file, old, new, tests)


def find(mutation: Mutation, source: Path) -> str | None:
    """What is wrong with a mutation; None if its text stands once in its file."""
    file = source / "lineartime" / mutation.file
    if not file.exists():
        return "the file is gone"
    count = file.read_text().count(mutation.old)
    return None if count == 1 else f"the text stands {count} times in the file"


def run(mutation: Mutation, source: Path) -> tuple[bool, str]:
    """Whether a test noticed the mutation in a copy of src/, and which test did or what was run."""
    file = source / "lineartime" / mutation.file
    before = file.read_text()
    file.write_text(before.replace(mutation.old, mutation.new))
    tests = [sys.executable, "-m", "pytest", *OPTIONS, *mutation.tests.split()]
    # Without compiled files, which would be taken for those of the text before.
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(tests, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    file.write_text(before)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::\w+|\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed is not None:
        return True, failed[1]
    return False, mutation.tests if done.returncode == 0 else f"pytest ended with status {done.returncode}"


def main(names: list[str]) -> int:
    """Run the mutations of these names, or all, and print the table; the number of those that no test noticed."""
    known = {mutation.name: mutation for mutation in read(MUTATIONS.read_text())}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{unknown[0]!r} is not a mutation in {MUTATIONS.name}.")
    chosen = [known[name] for name in names or known]
    survived = 0
    print("| mutation | file | noticed | by | s |\n|---|---|---|---|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for mutation in chosen:
            begin, problem = time.perf_counter(), find(mutation, source)
            noticed, by = (False, problem) if problem is not None else run(mutation, source)
            survived += not noticed
            seconds = time.perf_counter() - begin
            print(
                f"| {mutation.name} | {mutation.file} | {'yes' if noticed else '**no**'} | {by} | {seconds:.0f} |", flush=True
            )
    print(f"\n{len(chosen) - survived} of {len(chosen)} mutations were noticed.")
    return survived


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
