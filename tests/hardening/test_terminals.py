"""Terminals, pipes, locales and names of files that are not as usual: nothing of that ends a training or an evaluation."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lineartime


class Broken(io.StringIO):
    """A stream that nobody reads any more."""

    def write(self, text: str) -> int:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.pictures
@pytest.mark.parametrize(
    "stream",
    [Broken(), None, io.TextIOWrapper(io.BytesIO(), "ascii", "strict")],
    ids=["broken pipe", "closed", "ASCII"],
)
def test_training_goes_on_where_messages_cannot_be_written(
    config: Callable[..., Any], stream: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    result = lineartime.train(config(steps=2, out=tmp_path / "日本"))
    assert result.finished
    assert (tmp_path / "日本" / "loss.png").exists()


@pytest.mark.slow
def test_output_that_cannot_be_written_is_a_sentence_and_characters_are_no_error() -> None:
    def run(script: str, **environment: str) -> tuple[int, str, str]:
        settings = {**os.environ, **environment}
        found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=settings, timeout=100)
        return found.returncode, found.stdout, found.stderr

    version = f"{sys.executable} -m lineartime --version"
    sentence = "error: Cannot write the output or a file: No space left on device; free some space, then try again.\n"
    assert run(f"{version} > /dev/full") == (1, "", sentence)
    assert run(f"{version} | true; exit ${{PIPESTATUS[0]}}") == (0, "", "")  # as `head` closes it
    script = "from lineartime.screen import open_standard_streams as o; o(); print('\\u65e5 \\udcff')"
    assert run(f'{sys.executable} -c "{script}"', PYTHONIOENCODING="ascii")[1] == "\\u65e5 \\udcff\n"
