import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.data.tokenizers import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.finetuning import seq2seq as module
from lineartime.finetuning.pairs import Pair, find_pairs, read_pairs
from lineartime.finetuning.pairs_config import PairsConfig
from lineartime.finetuning.predict import predict
from lineartime.finetuning.seq2seq import seq2seq
from lineartime.models import EncoderDecoder

SMALL = ("d_model=32", "n_encoder_blocks=1", "n_decoder_blocks=1", "mixer.d_qk=16", "cross.d_qk=16")
Say = Callable[[str], None]


@pytest.fixture
def quiet() -> Say:
    return lambda line: None


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose target is a letter for each word of the source: 100, of which 20 are held out."""
    rows = [{"source": f"{'ab'[n % 2]} {'cd'[n // 2 % 2]}", "target": f"{'xy'[n % 2]}{'zw'[n // 2 % 2]}"} for n in range(100)]
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


@pytest.fixture
def config(doubled: Path, tmp_path: Path) -> Callable[..., PairsConfig]:
    def configured(out: str = "out", **given: Any) -> PairsConfig:
        base = PairsConfig(doubled, tmp_path / out, override=SMALL, epochs=6.0, batch_size=8, learning_rate=1e-2, dropout=0.0)
        return replace(base, **given)

    return configured


def test_training_learns_and_its_folder_writes_targets_alone(
    config: Callable[..., PairsConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(epochs=12.0)
    result = seq2seq(given)
    assert result.metrics["exact_match"] == result.metrics["chrf"] == 100
    assert capsys.readouterr().out.startswith("80 pairs to train with, 20 held out; ")
    names = ["model.json", "model.safetensors", "predictions.jsonl", "seq2seq.json", "tokenizer.json"]
    assert sorted(path.name for path in given.out.iterdir()) == names
    assert seq2seq(replace(given, resume=True)) == result

    model = lineartime.load(given.out)
    assert isinstance(model, EncoderDecoder)
    lineartime.save(model, lineartime.load_tokenizer(given.out), tmp_path / "copy")
    again = lineartime.load(tmp_path / "copy").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())

    rows = [{"source": source} for source in ["a c", "b d", "b c", "a d"] * 20]
    sources, whole, cut = write(tmp_path / "in.jsonl", rows), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert predict(given.out, sources, whole, beams=3) == 80
    written = [json.loads(line) for line in whole.read_text().splitlines()]
    assert written[:4] == [{"id": str(n), "target": target} for n, target in enumerate(["xz", "yw", "yz", "xw"], 1)]
    cut.write_bytes(whole.read_bytes()[:400])
    assert predict(given.out, sources, cut, resume=True, batch_size=3, beams=3) == 80
    assert cut.read_text() == whole.read_text()


def test_commands_for_language_models_name_an_encoder_decoder(config: Callable[..., PairsConfig], quiet: Say) -> None:
    given = config(epochs=0.5)
    seq2seq(given, quiet)
    for read in (lineartime.evaluate, lineartime.checkpoint.load_with_tokenizer):
        with pytest.raises(
            LineartimeError, match=r"holds an encoder-decoder, which `predict\(\)` uses: give one with a language"
        ):
            read(given.out)


@pytest.mark.nightly  # fine-tuning resumes by the same code every day
def test_a_training_that_was_killed_resumes_to_the_same_losses(
    config: Callable[..., PairsConfig], monkeypatch: pytest.MonkeyPatch, quiet: Say
) -> None:
    options: dict[str, Any] = {"epochs": 4.0, "dropout": 0.2, "tokenizer": "bpe-262"}
    whole = seq2seq(config("whole", **options), quiet)
    script = f"""
import os
from pathlib import Path
from lineartime.finetuning import seq2seq as module
from lineartime.finetuning.pairs_config import PairsConfig
evaluate, calls = module.PairTask.evaluate, []
def killed(*arguments):
    calls.append(None)
    return os._exit(9) if len(calls) == 3 else evaluate(*arguments)
module.PairTask.evaluate = killed
module.seq2seq(PairsConfig(**{vars(config("cut", **options))!r}.copy()), print)
""".replace("PosixPath", "Path")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    with pytest.raises(ArgumentError, match=r"^run is .*cut, whose training was stopped: go on with it by `resume=True`"):
        predict(config("cut").out, config().data, config("cut").out / "o.jsonl")
    resumed = seq2seq(config("cut", resume=True, **options), quiet)
    assert (resumed.losses, resumed.metrics) == (whole.losses, whole.metrics)
    with pytest.raises(ArgumentError, match=r"^epochs is 9.0, but .*cut was begun with 4.0: resume with the same options"):
        seq2seq(config("cut", resume=True, **{**options, "epochs": 9.0}), quiet)


def test_of_equal_exact_matches_the_lowest_loss_is_kept(
    config: Callable[..., PairsConfig], monkeypatch: pytest.MonkeyPatch, quiet: Say
) -> None:
    """Exact matches and losses of four epochs: the third is best."""

    def write_targets(*_: Any) -> list[str]:
        exact, _ = seen.pop(0) if len(seen) > 1 else seen[0]
        right = [pair.target for pair in find_pairs(config().data)["validation"]]
        return [*right[:exact], *["?"] * (len(right) - exact)]

    def loss(model: Any, batch: Any, reduction: str) -> torch.Tensor:
        count = (batch["labels"] != module.IGNORED).sum()
        return real(model, batch, reduction) if reduction == "mean" else seen[0][1] * count

    seen, real = [(3, 0.9), (5, 1.9), (5, 1.2), (5, 1.3)], module._loss
    monkeypatch.setattr(module, "write_targets", write_targets)
    monkeypatch.setattr(module, "_loss", loss)
    result = seq2seq(config(epochs=4.0), quiet)
    assert (result.epoch, result.metrics["exact_match"]) == (3.0, 25.0)
    assert result.metrics["loss"] == pytest.approx(1.2)


def test_padding_changes_neither_loss_nor_targets(config: Callable[..., PairsConfig]) -> None:
    """Sources and targets of 0 to 6 characters, read alone or together."""
    pairs = [Pair(str(n), "abcdef"[:n], "fedcba"[n:], "") for n in range(7)]
    tokenizer, found = ByteTokenizer(), []
    model = EncoderDecoder(config().model(tokenizer.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for batch_size, beams in ((1, 1), (7, 1), (1, 2), (7, 2)):
        given = config(batch_size=batch_size, beams=beams)
        task = module.PairTask(pairs, pairs, tokenizer, model, given)
        found.append((task.evaluate(module.Learner(model))["loss"], task.predictions))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]
    assert min(len(set(predictions)) for _, predictions in found) > 3


def test_pairs_are_held_out_by_place_or_by_the_names_of_files(doubled: Path, tmp_path: Path) -> None:
    keys = {split: [int(pair.key) for pair in pairs] for split, pairs in find_pairs(doubled).items()}
    assert keys["validation"] == list(range(1, 101, 5))
    assert sorted(keys["train"] + keys["validation"]) == list(range(1, 101))
    write(tmp_path / "my-train.jsonl", [{"id": "t", "source": "", "target": "b"}])
    write(tmp_path / "dev.jsonl", [{"id": 7, "source": "a", "target": ""}])
    found = find_pairs(tmp_path)
    assert [found[split][0].key for split in ("train", "validation")] == ["t", "7"]
    (tmp_path / "dev.jsonl").rename(tmp_path / "rest.jsonl")
    with pytest.raises(ArgumentError, match=r"^data is .*, which lacks a .jsonl file named for training or for validation"):
        find_pairs(tmp_path)


def test_bad_input_is_named_by_its_line_and_leaves_nothing(
    config: Callable[..., PairsConfig], tmp_path: Path, quiet: Say
) -> None:
    good, file = {"source": "a", "target": "b"}, tmp_path / "bad.jsonl"
    for line, message in (
        ('{"source": "a"}', r"bad.jsonl has line 3 without target, but it must be a text"),
        ('{"source": 5, "target": "b"}', r"bad.jsonl has line 3 whose source is 5, but it must be a text"),
        ("a\tb", r"bad.jsonl has line 3 that cannot be read \(it is not JSON"),
        ("[1]", r"bad.jsonl has line 3 that is \[1\], but it must be an object"),
        (
            r'{"source": "\ud800", "target": "b"}',
            r"bad.jsonl has line 3 that cannot be read \(it holds half of a character",
        ),
    ):
        file.write_text(f"{json.dumps(good)}\n\n{line}\n")
        with pytest.raises(LineartimeError, match=message):
            list(read_pairs(file))
    long = write(tmp_path / "long.jsonl", [good, {"source": "a", "target": "b" * 8}])
    for given, message in (
        (config(data=write(tmp_path / "empty.jsonl", [])), r"empty.jsonl holds 0 pairs, but at least one is held out"),
        (config(data=tmp_path / "none"), r"^data is .*none, which does not exist"),
        (
            config(data=long, override=(*SMALL, "max_length=8")),
            r"long.jsonl, line 2, has a target of 9 tokens, but the model reads at most 8: leave it out",
        ),
        (config(preset="flash-tny"), r"^preset is 'flash-tny', which is not a preset \(did you mean"),
        (config(preset="transformer-tiny"), r"^preset is 'transformer-tiny', which sets norm, absolute_position"),
        (config(override=("d_qk=8",)), r"^override does not fit the model: d_qk is an option of both mixer and cross: set"),
        (config(override=("vocab_size=8",)), r"^override cannot set vocab_size: use `tokenizer`"),
        (config(tokenizer="bpe-8"), r"^tokenizer is bpe-8, but bpe tokenizers have from 260"),
    ):
        with pytest.raises(LineartimeError, match=message):
            seq2seq(given, quiet)
        assert not any(given.out.iterdir())
    with pytest.raises(ArgumentError, match=r"^batch_size is 0, but must be at least 1"):
        config(batch_size=0)
