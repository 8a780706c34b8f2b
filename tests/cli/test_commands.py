"""Commands that convert, export, fill and list: what they print, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


def test_a_run_is_converted_there_and_back(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_masked_model_is_one_for_fill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    theirs, ours = Path(__file__).parents[1] / "assets" / "gau_alpha" / "published", str(tmp_path / "ours")
    with pytest.warns(UserWarning, match="which ours does not have"):  # its dropout
        assert main(["convert", str(theirs), ours]) == 0
    assert "which `lineartime fill" in capfd.readouterr().out
    assert main(["fill", ours, "--text", "a[MASK]c", "--top", "2"]) == 0
    capfd.readouterr()


def test_other_commands_name_this_one_for_a_model_of_transformers(folder: Path, tmp_path: Path, fails: Fails) -> None:
    there = str(tmp_path / "there")
    assert main(["convert", str(folder / "run"), there]) == 0
    for command in (["generate", there], ["eval", there]):
        fails(command, "there holds a transformers model: convert it by `lineartime convert`.")


def test_wrong_folders_are_named(folder: Path, tmp_path: Path, fails: Fails) -> None:
    taken = str(folder)
    fails(["convert", str(folder / "run"), taken], "destination is .*, which exists already")
    fails(["convert", "nowhere", "new"], "source is nowhere, which does not exist: give the folder of a model, or")
    fails(["convert", "nowhere"], "DESTINATION", status=2)


@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")
def test_a_run_becomes_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(folder / "run")
    monkeypatch.setattr("lineartime.export.write_onnx", lambda program, file: file)  # tests/test_export.py writes real ones
    assert main(["export", run, "step.pt2"]) == 0
    assert "step.pt2: a step of streams" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["step.pt2"]
    assert main(["export", run, "text.pt2", "--part", "text"]) == 0
    assert "for torch.export.load" in capsys.readouterr().out
    assert main(["export", run, "text.onnx", "--part", "text", "--format", "onnx"]) == 0
    assert "text.onnx: ids [B, T] to logits [B, T, V], in ONNX" in capsys.readouterr().out
    fails(["export", run, "step.pt2"], "file is step.pt2, which exists already")
    fails(["export", run, "step.zip"], "file is step.zip, but must end in .pt2")
    package = ["--part", "text", "--format", "package"]
    fails(["export", run, "a.pt2", *package], "--format is package, but .* use program or onnx, or `part=step`")
    fails(["export", run], "FILE", status=2)


@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")
def test_a_masked_language_model_becomes_a_program_of_whole_texts(
    masked: str, capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    fails(["export", masked, "step.pt2"], "--part is step, but a masked language model reads whole texts: use `part=text`")
    assert main(["export", masked, "text.pt2", "--part", "text"]) == 0
    assert "text.pt2: ids and mask [B, T] to logits [B, T, V]" in capsys.readouterr().out


def test_a_masked_model_shows_candidates_for_each_mask(
    masked: str, folder: Path, capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    capsys.readouterr()
    arguments = ["fill", masked, "--text", "the [MASK] of [MASK]"]
    assert main([*arguments, "--top", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["masks"]
    assert [len(candidates) for candidates in found] == [2, 2]
    assert found[0][0]["probability"] >= found[0][1]["probability"] > 0
    assert main([*arguments, "--top", "258"]) == 0
    shown = capsys.readouterr().out
    assert "mask 1 of 2" in shown
    assert "mask 2 of 2" in shown
    for readable in ('"a"', '" "', r'"\n"', r'"\xc3"', '"[MASK]"', '"[END]"'):
        assert shown.count(f" {readable} ") == 2, readable
    fails(["fill", masked, "--text", "the of"], r"--text is 'the of', which holds no \[MASK\]")
    fails([*arguments, "--top", "0"], "--top is 0, but must be at least 1")
    fails(["fill", masked], "--text", status=2)
    fails(["fill", str(folder / "run"), "--text", "[MASK]"], "model is a causal language model, which cannot fill masks")
