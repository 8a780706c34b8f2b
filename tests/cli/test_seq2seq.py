import json
from pathlib import Path

import pytest

from lineartime.cli import main

from .conftest import Fails


def test_a_model_learns_pairs_and_writes_targets_and_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    data, out = tmp_path / "pairs.jsonl", str(tmp_path / "out")
    data.write_text("".join(json.dumps({"source": letter, "target": letter}) + "\n" for letter in "abcdef"))
    command = ["seq2seq", "--data", str(data), "--out", out, "--model", "flash-tiny", "--epochs", "1"]
    command += ["--override", "d_model=16", "n_encoder_blocks=1", "n_decoder_blocks=1", "cross.d_qk=8", "mixer.d_qk=8"]
    assert main(command) == 0
    assert f"{out}: exact match " in capsys.readouterr().out
    assert main(["predict", out, str(data), "--out", str(tmp_path / "o.jsonl"), "--beams", "2"]) == 0
    assert [json.loads(line)["id"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == list("123456")
    fails(command, "--out is .*out, which is not empty: give --resume to go on there")
    fails(["generate", out, "--prompt", "a"], "holds an encoder-decoder, which `lineartime predict` uses")
    fails(
        ["predict", out, str(data), "--out", str(tmp_path / "p.jsonl"), "--beams", "0"], "--beams is 0, but must be at least 1"
    )
