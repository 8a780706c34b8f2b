import json
import sys
from pathlib import Path

import pytest

import lineartime
from lineartime.cli import main
from lineartime.data.tokenizers import ByteTokenizer

from .conftest import Fails


def test_a_model_is_tuned_and_asked_and_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    model = lineartime.build("flash-tiny", "mlm", vocab_size=258, d_model=16, n_blocks=1, d_qk=8, chunk_size=8)
    lineartime.save(model, ByteTokenizer(), tmp_path / "run")
    answers = [{"text": "b", "answer_start": 2}]
    paragraph = {"context": "a b c", "qas": [{"id": "1", "question": "?", "answers": answers}]}
    (tmp_path / "asked.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}] * 3}))
    run, data, out = str(tmp_path / "run"), str(tmp_path / "asked.json"), str(tmp_path / "out")
    other = ["finetune", run, "--data", data, "--out", str(tmp_path / "new")]
    command = ["finetune", run, "--data", data, "--out", out, "--context-length", "32", "--stride", "4"]
    assert main([*command, "--epochs", "1", "--learning-rates", "1e-3"]) == 0
    assert "rate  exact match" in capsys.readouterr().out
    assert main(["predict", out, data, "--out", str(tmp_path / "answers.json")]) == 0
    assert list(json.loads((tmp_path / "answers.json").read_text())) == ["1", "2", "3"]  # one id for all
    with monkeypatch.context() as patch:
        for name in ("datasets", "transformers", "lineartime.finetuning.tune", "lineartime.finetuning.predict"):
            patch.setitem(sys.modules, name, None)  # not installed
        for asked in (other, ["predict", out, data, "--out", "new.json"]):
            fails(asked, r" needs datasets, which is not installed: pip install 'lineartime\[finetune\]'")
    fails(command, "--out is .*out, which is not empty: give `resume=True` to go on there")
    fails([*other, "--chunk-size", "16"], "--chunk-size is 16, but the model was trained with 8")
    fails([*other, "--data", "none.json"], "--data is none.json, which does not exist")
    fails([*other, "--lora-rank", "-1"], "--lora-rank is -1, but must be at least 0")
    fails([*other, "--context-length", "8", "--stride", "6"], "leaves 4 tokens of the 8 for its text")
