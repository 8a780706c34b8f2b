"""Functions in C++ that are built at first use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lineartime import native
from lineartime.host import cache_folder
from lineartime.native import NativeFunctions, native_functions, why_not_native

ADD = """
extern "C" void add(Number* to, int64_t a, double b, void* nothing, int64_t threads) {
  to[0] = nothing == nullptr && threads > 0 ? a + b : NAN;
}
"""

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f"functions in C++ cannot be built: {why_not_native()}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_functions.cache_clear()
    yield
    native_functions.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "add.cpp"
    file.write_text(ADD)
    return file


def built() -> list[Path]:
    return sorted((cache_folder() / "native").iterdir())


def add(functions: NativeFunctions | None) -> float:
    assert functions is not None
    result = torch.zeros(1)
    functions.call("add", result, 2, 3.0, None)
    return result.item()


def test_library_is_built_once_and_again_when_its_source_changes(source: Path) -> None:
    assert add(native_functions(source, torch.float32)) == 5
    (file,) = built()
    before = file.stat().st_mtime_ns
    native_functions.cache_clear()
    assert add(native_functions(source, torch.float32)) == 5
    assert [x.stat().st_mtime_ns for x in built()] == [before]
    source.write_text(ADD.replace("a + b", "a - b"))
    native_functions.cache_clear()
    assert add(native_functions(source, torch.float32)) == -1
    assert len(built()) == 2


def test_build_that_fails_is_told_in_a_line_and_leaves_nothing(source: Path) -> None:
    source.write_text("this is no C++")
    with pytest.warns(RuntimeWarning, match=r"add.cpp cannot be used, .*LINEARTIME_NATIVE=0"):
        assert native_functions(source, torch.float32) is None
    assert built() == []


def test_build_that_takes_long_is_told_and_kept_for_the_next_process(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, real = tmp_path / "compiler", native.cpp_compiler()
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.05; done\nexec {real} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(native, "cpp_compiler", lambda: str(slow))
    monkeypatch.setattr(native, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(native, "_BUILD_SECONDS", 0.3)
    with pytest.warns(
        RuntimeWarning, match="add.cpp cannot be used, .* its build has taken 0 s, and goes on for the processes"
    ):
        assert native_functions(source, torch.float32) is None
    assert capsys.readouterr().err == "building functions in C++ from add.cpp, once on this machine ...\n"
    (tmp_path / "go").touch()
    assert native._BUILDS[-1].wait(60) == 0
    (file,) = built()
    native_functions.cache_clear()
    assert add(native_functions(source, torch.float32)) == 5
    assert built() == [file]


def test_library_that_others_could_have_put_there_is_not_loaded(source: Path) -> None:
    native_functions(source, torch.float32)
    native_functions.cache_clear()
    (cache_folder() / "native").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="belongs to someone else, or others can write to it"):
        assert native_functions(source, torch.float32) is None


def test_damaged_library_is_built_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_functions(source, torch.float32)
    (file,) = built()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # the system would not read a file again
    damaged = cache_folder() / "native" / file.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(file.read_bytes()[:100])
    native_functions.cache_clear()
    assert add(native_functions(source, torch.float32)) == 5
    assert damaged.read_bytes() == file.read_bytes()


def test_functions_that_are_missing_or_turned_off_have_a_reason_and_no_warning(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native, "cpp_compiler", lambda: None)
        assert why_not_native() == "there is no GNU C++ compiler here"
        patch.setattr(native, "openmp_library", lambda: None)
        assert why_not_native() == "this PyTorch does not bring its OpenMP library, libgomp"
        assert native_functions(source, torch.float32) is None
    monkeypatch.setenv("LINEARTIME_NATIVE", "0")
    native_functions.cache_clear()
    assert native_functions(source, torch.float32) is None
    assert why_not_native() == "LINEARTIME_NATIVE is 0"
