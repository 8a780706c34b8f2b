"""Commands that convert, export, fill, inspect, fine-tune and reproduce: what they print, and what they refuse."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import lineartime
from lineartime.cli import main
from lineartime.data.tokenizers import ByteTokenizer
from lineartime.experiments import command
from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.experiments.config import ReproduceConfig

from .conftest import Fails, Prints


def test_a_run_is_converted_there_and_back_and_other_commands_name_this_one(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", str(folder / "run"), there, "--checkpoint", "last"]) == 0
    assert main(["convert", there, back]) == 0
    out, error = capfd.readouterr()
    assert out.splitlines() == [
        f"{there}: a model of transformers, which its Auto classes load after `import lineartime.hf`",
        f"{back}: a model of lineartime, which `lineartime generate {back}` and the other commands read",
    ]
    assert set(error.splitlines()) <= {f"converting {source} ..." for source in (folder / "run", there)}  # if it takes long
    assert main(["generate", back, "--prompt", "the", "--max-tokens", "3"]) == 0
    capfd.readouterr()
    for other in ("generate", "eval"):
        assert main([other, there]) == 1
        said = f"error: {there} holds a transformers model: convert it by `lineartime convert`.\n"
        assert capfd.readouterr().err == said


def test_wrong_folders_are_named(fails: Fails) -> None:
    fails(["convert", "nowhere", "new"], "source is nowhere, which does not exist: give the folder of a model, or")
    fails(["convert", "nowhere"], "DESTINATION", status=2)


@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")
def test_a_run_becomes_a_file(
    folder: Path, masked: str, tmp_path: Path, prints: Prints, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(folder / "run")
    monkeypatch.setattr("lineartime.export.write_onnx", lambda program, file: file)  # tests/test_export.py writes real ones
    assert "step.pt2: a step of streams" in prints("export", run, "step.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["step.pt2"]
    shown = prints("export", run, "text.pt2", "--part", "text", "--weights", "int8")
    assert "for torch.export.load" in shown
    assert torch.int8 in {tensor.dtype for tensor in torch.export.load("text.pt2").state_dict.values()}
    shown = prints("export", run, "text.onnx", "--part", "text", "--format", "onnx")
    assert "text.onnx: ids [B, T] to logits [B, T, V], in ONNX" in shown
    fails(["export", run, "step.pt2"], "file is step.pt2, which exists already")
    package = ["--part", "text", "--format", "package"]
    fails(["export", run, "a.pt2", *package], "--format is package, but .* use program or onnx, or `part=step`")
    fails(["export", run], "FILE", status=2)
    fails(["export", masked, "a.pt2", "--weights", "int8"], "is a masked language model, which cannot have int8 weights")
    fails(["export", masked, "a.pt2"], "--part is step, but a masked language model reads whole texts: use `part=text`")
    assert "b.pt2: ids and mask [B, T] to logits [B, T, V]" in prints("export", masked, "b.pt2", "--part", "text")


def test_a_masked_model_shows_candidates_for_each_mask(masked: str, prints: Prints, fails: Fails) -> None:
    asked = ("fill", masked, "--text", "the [MASK] of [MASK]")
    found = json.loads(prints(*asked, "--top", 2, "--json"))["masks"]
    assert [len(candidates) for candidates in found] == [2, 2]
    assert found[0][0]["probability"] >= found[0][1]["probability"] > 0
    shown = prints(*asked, "--top", 258)
    assert "mask 1 of 2" in shown
    assert "mask 2 of 2" in shown
    for readable in ('"a"', '" "', r'"\n"', r'"\xc3"', '"[MASK]"', '"[END]"'):
        assert shown.count(f" {readable} ") == 2, readable
    fails(["fill", masked], "--text", status=2)


def test_inspect_draws_a_run(folder: Path, prints: Prints) -> None:
    short = "The text is no longer than a chunk of 8 tokens, so the global part of FLASH is empty: inspect a longer text."
    assert prints("inspect", folder / "run", "--text", "7 * 7") == f"inspection.png: 5 tokens. {short}\n"
    assert Path("inspection.png").read_bytes().startswith(b"\x89PNG")
    long = ("--text-file", folder / "text.txt", "--out", "new/a.svg", "--max-tokens", 24)
    assert re.match("new/a.svg: 24 tokens. .* more tokens were left out.", prints("inspect", folder / "run", *long))


def test_inspect_names_wrong_options(folder: Path, fails: Fails) -> None:
    Path("empty").touch()
    fails(["inspect", str(folder / "run")], "--text is missing or empty, but must hold a text, here or in a file")
    fails(["inspect", str(folder / "run"), "--text-file", "empty"], "--text-file is missing or empty")
    fails(["inspect", "nothing", "--text", "a", "--out", "a.txt"], "a.txt has a suffix that is no picture format")  # at once


def test_a_model_is_tuned_and_asked_and_mistakes_are_named(
    tmp_path: Path, prints: Prints, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    model = lineartime.build("flash-tiny", "mlm", vocab_size=258, d_model=16, n_blocks=1, d_qk=8, chunk_size=8)
    lineartime.save(model, ByteTokenizer(), tmp_path / "run")
    answers = [{"text": "b", "answer_start": 2}]
    paragraph = {"context": "a b c", "qas": [{"id": "1", "question": "?", "answers": answers}]}
    (tmp_path / "asked.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}] * 3}))
    run, data, out = str(tmp_path / "run"), str(tmp_path / "asked.json"), str(tmp_path / "out")
    other = ["finetune", run, "--data", data, "--out", str(tmp_path / "new")]
    command = ["finetune", run, "--data", data, "--out", out, "--context-length", "32", "--stride", "4"]
    assert "rate  exact match" in prints(*command, "--epochs", 1, "--learning-rates", "1e-3")
    prints("predict", out, data, "--out", "answers.json")
    assert list(json.loads((tmp_path / "answers.json").read_text())) == ["1", "2", "3"]  # one id for all
    with monkeypatch.context() as patch:
        for name in ("datasets", "transformers", "lineartime.finetuning.tune", "lineartime.finetuning.predict"):
            patch.setitem(sys.modules, name, None)  # not installed
        for asked in (other, ["predict", out, data, "--out", "new.json"]):
            fails(asked, r" needs datasets, which is not installed: pip install 'lineartime\[finetune\]'")
    fails([*other, "--chunk-size", "16"], "--chunk-size is 16, but the model was trained with 8")
    fails([*other, "--lora-rank", "-1"], "--lora-rank is -1, but must be at least 0")


def test_interrupt_of_reproduce_says_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[ReproduceConfig] = []

    def interrupted(config: ReproduceConfig) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "reproduce", interrupted)
    assert main(["reproduce", "lm", "--books", "a b.txt", "c.txt", "--out", "x"]) == 130
    assert capsys.readouterr().err.strip() == "resume by: lineartime reproduce lm --books 'a b.txt' c.txt --out x"
    assert asked == [ReproduceConfig("lm", books=("a b.txt", "c.txt"), out=Path("x"))]


def test_help_of_reproduce_names_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    named = re.split(r"[\s,.]+", capsys.readouterr().out)
    assert set(EXPERIMENTS) <= set(named)
