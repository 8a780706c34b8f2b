"""The ground: files that are whole or not there, numbers in short form, the host, and what it would run."""

import ctypes
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lineartime import info
from lineartime.cli import main
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.files import new_file, new_folder, removed_on_failure, write_atomically
from lineartime.host import LARGE_PAGES, use_large_pages
from lineartime.info import explain_machine
from lineartime.native import why_not_native
from lineartime.ops.backends import choose_backend
from lineartime.units import column_table, counted, duration, markdown_table, size


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    write_atomically(file, "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_failure_removes_what_it_added_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")

    def fail() -> None:
        (tmp_path / "folder" / "inside").mkdir(parents=True)
        (tmp_path / "file").write_text("text")
        raise KeyError

    with pytest.raises(KeyError), removed_on_failure(tmp_path):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(KeyError), removed_on_failure(tmp_path / "nowhere"):
        raise KeyError


def test_new_file_or_folder_appears_whole_with_the_folders_above_it(tmp_path: Path) -> None:
    with new_file("file", tmp_path / "a" / "b.pt2") as partial:
        partial.write_text("text")
        assert partial.suffix == ".pt2"  # which writers of other libraries look at
        assert not (tmp_path / "a" / "b.pt2").exists()
    with new_folder("folder", tmp_path / "c" / "d") as folder:
        (folder / "file").write_text("text")
    assert [file.name for file in sorted(tmp_path.rglob("*")) if file.is_file()] == ["b.pt2", "file"]


def test_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with new_file("out", tmp_path / "file") as partial:
            partial.write_text("late")
            (tmp_path / "file").write_text("early")

    with pytest.raises(ArgumentError, match=r"out is .*file, which exists already"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "early")]


def test_existing_file_is_not_replaced_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ArgumentError, match=r"file is .*file, which exists already"), new_file("file", tmp_path / "file"):
        raise AssertionError
    full = OSError(28, "No space left on device")
    for new in (new_file, new_folder):
        with (
            pytest.raises(LineartimeError, match=r"Cannot write .*other: No space left on device"),
            new("out", tmp_path / "other"),
        ):
            raise full
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_file_that_fails_elsewhere_is_the_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match=r"Cannot use .*source: No such file"), new_folder("out", tmp_path / "out"):
        (tmp_path / "source").read_text()
    (tmp_path / "file").touch()
    with pytest.raises(LineartimeError, match=r"Cannot write .*out: "), new_folder("out", tmp_path / "file" / "out"):
        raise AssertionError


def test_partial_file_of_a_killed_process_is_removed_once_it_is_old(tmp_path: Path) -> None:
    left = [tmp_path / f".{stem}.{'b2' * 16}.partial{suffix}" for stem, suffix in (("a", ".pt2"), ("b", ".pt2"), ("c", ""))]
    for path in left:
        path.touch()
    for age, kept in ((0, {0, 1, 2}), (7200, {1, 2})):
        os.utime(left[0], (time.time() - age,) * 2)
        with new_file("file", tmp_path / "a.pt2"):
            pass
        (tmp_path / "a.pt2").unlink()
        assert {place for place, path in enumerate(left) if path.exists()} == kept
    left[2].unlink()
    left[2].mkdir()
    os.utime(left[2], (0, 0))
    with new_folder("folder", tmp_path / "c"):
        pass
    assert not left[2].exists()
    assert left[1].exists(), "of another file"


def test_links_and_folders_above_are_no_new_folders(tmp_path: Path) -> None:
    """The rename at the end would fail, after all the work."""
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    wrong = {
        "broken": r"folder is .*broken, which exists already",
        "empty/..": "which is not the name of a new folder",
        "step-00000009": "the name of a checkpoint in a run: choose another name",
        "x" * 300: "Cannot read .*: File name too long",
    }
    for name, message in wrong.items():
        with pytest.raises(LineartimeError, match=message), new_folder("folder", tmp_path / name):
            raise AssertionError


def test_files_are_as_readable_as_usual_whatever_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    with new_file("out", tmp_path / "file") as partial:
        partial.unlink()
        partial.touch(0o600)
    with new_folder("out", tmp_path / "folder") as partial:
        (partial / "file").touch(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "folder" / "file").stat().st_mode == usual


def test_durations_have_two_units_and_counts_and_sizes_three_digits() -> None:
    times = {0.4: "0 s", 59.6: "1 min 0 s", 200: "3 min 20 s", 19_799: "5 h 29 min", 86_400 * 3 + 7200: "3 d 2 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    counts = {0: "0", 12_000: "12,000", 1_234_567: "1.23 M", 2e6: "2 M", 4.5e10: "45 G", 999_600_000: "1 G", 1e12: "1,000 G"}
    assert {number: counted(number) for number in counts} == counts
    sizes = {0: "0 B", 999: "999 B", 999.6: "1 kB", 12_345: "12.3 kB", 5.73e9: "5.73 GB", 2.5e12: "2,500 GB"}
    assert {number: size(number) for number in sizes} == sizes


def test_table_has_text_on_the_left_numbers_on_the_right_bars_in_their_cells_and_no_empty_columns() -> None:
    table = markdown_table(["name", "kind", "ms"], [["a|b", "x", "1"], ["c", "y", "20"]], left=2)
    assert table == "| name | kind | ms |\n| --- | --- | ---: |\n| a\\|b | x | 1 |\n| c | y | 20 |\n"
    assert column_table({"system": ["a"], "x": ["1"], "paper": ["-"]}) == "| system | x |\n| --- | ---: |\n| a | 1 |"


FAULTS = """
import ctypes, resource
from contextlib import nullcontext
from lineartime.host import freed_memory_kept

BLOCKS, SIZE = 12, 16 * 2**20
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [library.malloc(SIZE) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in reversed(blocks):
        library.free(block)

def faults_of_a_step():
    step()
    step()
    before = faults()
    step()
    return faults() - before

with freed_memory_kept():
    inside = faults_of_a_step()
held = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
print(inside, faults_of_a_step(), held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of GNU can be told to keep memory")
def test_freed_memory_is_kept_for_the_next_step_and_returned_at_the_end() -> None:
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("the C library is not GNU's")
    if LARGE_PAGES.exists() and "[always]" in LARGE_PAGES.read_text():
        pytest.skip("the system gives this memory in pages of 2 MiB, so there are few faults to count")
    import resource  # missing on Windows

    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    inside, outside, held = map(int, ran.stdout.split())
    pages = 12 * 16 * 2**20 // resource.getpagesize()
    assert inside < pages // 100
    assert outside > pages // 2
    assert held < 12 * 16 * 2**20


def test_command_line_says_how_threads_wait_before_pytorch_is_loaded() -> None:
    script = """
import os, sys
from lineartime import __main__ as program
import lineartime.cli
assert "torch" not in sys.modules
lineartime.cli.main = lambda: print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules) or 0
program.main()
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["5000", "False"]


@pytest.mark.skipif(why_not_native() is not None, reason=f"functions in C++ cannot be built: {why_not_native()}")
def test_threads_are_those_of_pytorch() -> None:
    """A second library of threads would start as many threads again."""
    script = """
import torch
from lineartime import FLASH
torch.set_num_threads(3)
layer = FLASH(16, d_qk=8, chunk_size=8)
layer(torch.randn(2, 32, 16)).sum().backward()
print(len({line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "iomp" in line}))
print(sum("tiles-" in line for line in open("/proc/self/maps")) > 0)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "True"]


def mapping_of(address: int) -> dict[str, str]:
    """What Linux says of the memory at an address."""
    found = False
    facts: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(x, 16) for x in name.split("-"))
            found = begin <= address < end
        elif found:
            facts[name[:-1]] = rest.strip()
    return facts


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages to give")
def test_large_pages_are_asked_for_and_hold_what_was_there() -> None:
    large = 2 * 2**20
    with mmap.mmap(-1, 8 * large, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        memory[:] = b"abcd" * (2 * large)
        use_large_pages([(address + 100, 6 * large)])
        assert memory[:] == b"abcd" * (2 * large)
        moved = mapping_of(address)["AnonHugePages"]
        use_large_pages([(address, 100)], now=False)
        assert "hg" not in mapping_of(address)["VmFlags"].split()  # too small
        use_large_pages([(address, large)], now=False)
        assert "hg" in mapping_of(address)["VmFlags"].split()
        del view
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if version >= (6, 1) and "[never]" not in LARGE_PAGES.read_text() and free_large_pages() > 16:
        assert int(moved.split()[0]) * 1024 >= 6 * large


HEAP = """
import ctypes
from pathlib import Path
from lineartime import host
host.memory_bytes = lambda: 12 * 2**30
library = ctypes.CDLL(None)
library.sbrk.restype = ctypes.c_void_p
before = library.sbrk(0)
with host.freed_memory_kept():
    print(library.sbrk(0) - before)
    heap = Path("/proc/self/smaps").read_text().split("[heap]")[1:]
    print(any("hg" in part.split("VmFlags:")[1].splitlines()[0].split() for part in heap))
"""


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages to give")
def test_heap_of_steps_grows_once_in_large_pages_on_a_machine_with_more_memory_than_an_int_can_say() -> None:
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("the C library is not GNU's")
    ran = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    grown, large = ran.stdout.split()
    assert int(grown) > 2**30
    assert large == "True"


def free_large_pages() -> int:
    """How many pages of 2 MiB are free in one piece."""
    return sum(sum(map(int, line.split()[13:])) for line in Path("/proc/buddyinfo").read_text().splitlines())


def test_it_tells_the_backend_that_runs_and_why_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(info, "LARGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    facts = {fact.name: fact for fact in explain_machine()}
    assert facts["large pages"].value == "no"
    assert facts["large pages"].why == f"{tmp_path / 'enabled'} is never, not madvise"
    chosen = choose_backend("auto", ("torch", "tiled", "triton"), torch.empty(0), torch.float32, "relu2")
    assert facts["attention, fp32"].value == chosen == "tiled"
    assert facts["attention, fp32"].why.startswith("not triton: ")
    assert facts["device"].value == "cpu"


def test_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "is_installed", lambda package: False)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["matplotlib"] == {"value": "not installed", "why": "pip install 'lineartime[plot]'"}


def test_it_tells_the_size_of_the_cache_and_what_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fact = next(fact for fact in explain_machine() if fact.name == "cache")
    assert fact.value == "0 B"
    (tmp_path / "lineartime" / "text").mkdir(parents=True)
    with (tmp_path / "lineartime" / "text" / "tokens").open("wb") as file:
        file.truncate(1_300_000_000)  # sparse
    fact = next(fact for fact in explain_machine() if fact.name == "cache")
    assert (fact.value, str(tmp_path / "lineartime") in fact.why) == ("1.3 GB", True)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="C++ functions need Linux and g++")
@pytest.mark.skipif(os.environ.get("LINEARTIME_NATIVE") == "0", reason="they are turned off")
def test_functions_in_c_plus_plus_are_built_where_there_is_a_compiler() -> None:
    """Otherwise, all tests of these functions would be skipped, and every model would be slower, unseen."""
    assert why_not_native() is None
