"""Files of other packages as folders that the commands read."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.foreign import test_gau_alpha as formulas
from tests.foreign.test_flash_pytorch import theirs
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import lineartime
from lineartime import hf
from lineartime.cli import main
from lineartime.data.tokenizers import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.foreign.conversion import convert, is_foreign
from lineartime.foreign.weights import read_weights


def test_gau_alpha_is_filled_in_evaluated_and_read_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = formulas.write_folder(tmp_path / "theirs")
    ours, text = tmp_path / "ours", tmp_path / "text.txt"
    text.write_text("天地 abc。人 daa\n" * 40, encoding="utf-8")
    assert main(["convert", str(tmp_path / "theirs"), str(ours)]) == 0
    assert "a model of lineartime, which `lineartime fill" in capsys.readouterr().out
    assert main(["fill", str(ours), "--text", "天[MASK]人"]) == 0
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    evaluation = next(line.split()[1:] for line in page.splitlines() if line.startswith("    lineartime eval"))
    paths = {"models/gau-alpha": str(ours), "text.txt": str(text)}
    assert main([paths.get(word, word) for word in evaluation]) == 0
    model, tokenizer = lineartime.load(ours), lineartime.load_tokenizer(ours)
    ids = tokenizer.encode("天地 ABca。x")
    assert [formulas.PIECES[token] for token in ids] == ["天", "地", "[UNK]", "。", "[UNK]"]
    assert (tokenizer.mask, tokenizer.end_of_document) == (4, 3)
    rows, real = torch.tensor(ids)[None], torch.ones(1, len(ids), dtype=torch.bool)
    expected = formulas.forward(weights, formulas.CONFIG, rows, real, torch.zeros_like(rows))
    torch.testing.assert_close(model(rows), expected, atol=1e-4, rtol=1e-5)

    hf.convert(ours, tmp_path / "hf")
    adapted = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    types = torch.ones_like(rows)
    torch.testing.assert_close(adapted(rows).logits, model(rows), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(adapted(rows, token_type_ids=types).logits, model(rows, token_types=types), atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("天地")["input_ids"] == [2, *tokenizer.encode("天地"), 3]
    hf.convert(tmp_path / "hf", tmp_path / "back")
    assert torch.equal(lineartime.load(tmp_path / "back")(rows), model(rows))


def test_fine_tuned_classifier_of_gau_alpha_keeps_its_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the published package computed it, from the first token."""
    source, ours = formulas.PUBLISHED / "fine-tuned", tmp_path / "ours"
    with pytest.warns(UserWarning, match="which ours does not have"):
        assert main(["convert", str(source), str(ours)]) == 0
    assert "a model of transformers" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(ours).eval()
    given = torch.load(source / "reference.pt", weights_only=True)
    ids, types, mask = given["ids"], given["types"], given["mask"]
    found = model(ids, attention_mask=mask, token_type_ids=types).logits
    torch.testing.assert_close(found, given["logits"], atol=1e-5 * float(given["logits"].abs().max()), rtol=0)
    order = mask.argsort(dim=1, stable=True)  # padding before the text
    ids, mask, types = (each.gather(1, order) for each in (ids, mask, types))
    torch.testing.assert_close(model(ids, attention_mask=mask, token_type_ids=types).logits, found)
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    pair = AutoTokenizer.from_pretrained(ours)("ab", "c")
    assert pair["input_ids"][0] == 2
    assert sorted(set(pair["token_type_ids"])) == [0, 1]


def fine_tuned(folder: Path, name: str, head: str, rows: int, **changes: Any) -> dict[str, Any]:
    """A folder of a class of GAU-alpha with a head on its backbone; returns all weights."""
    weights = formulas.write_folder(folder, architectures=[name], **changes)
    del weights["cls.predictions.decoder.weight"]
    d = formulas.CONFIG["hidden_size"]
    weights |= {f"{head}.weight": torch.randn(rows, d), f"{head}.bias": torch.randn(rows)}
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


@pytest.mark.parametrize(
    ("name", "head", "summary"),
    [
        ("GAUAlphaForSequenceClassification", "classifier", "last"),
        ("GAUAlphaForSequenceClassification", "classifier", "mean"),
        ("GAUAlphaForTokenClassification", "classifier", None),
        ("GAUAlphaForQuestionAnswering", "qa_outputs", None),
    ],
)
def test_every_head_of_gau_alpha_is_converted(name: str, head: str, summary: str | None, tmp_path: Path) -> None:
    changes = {"summary_type": summary} if summary else {}
    weights = fine_tuned(tmp_path / "theirs", name, head, 2, **changes)
    hf.convert(tmp_path / "theirs", tmp_path / "ours")
    made = getattr(hf, name.replace("GAUAlpha", "Lineartime")).from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(5, len(formulas.PIECES), (2, 7))
    identity = torch.eye(formulas.CONFIG["hidden_size"])
    hidden = formulas.forward(
        {**weights, "cls.predictions.decoder.weight": identity}, formulas.CONFIG, ids, torch.ones_like(ids).bool(), ids * 0
    )
    pooled = {"last": hidden[:, -1], "mean": hidden.mean(1), None: hidden}[summary]
    expected = pooled @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]
    outputs = made(ids)
    found = torch.stack([outputs.start_logits, outputs.end_logits], -1) if head == "qa_outputs" else outputs.logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_heads_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    fine_tuned(tmp_path / "tuned", "GAUAlphaForSequenceClassification", "classifier", 2)
    with pytest.raises(LineartimeError, match=r"holds a GAUAlphaForSequenceClassification, with a head: lineartime.hf.convert"):
        convert(tmp_path / "tuned", tmp_path / "ours")
    fine_tuned(tmp_path / "choice", "GAUAlphaForMultipleChoice", "classifier", 1)
    fine_tuned(tmp_path / "summary", "GAUAlphaForSequenceClassification", "classifier", 2, summary_activation="tanh")
    fine_tuned(tmp_path / "headless", "GAUAlphaForTokenClassification", "score", 2)
    for folder, message in (
        ("choice", "holds a GAUAlphaForMultipleChoice, but only GAUAlphaForSequenceClassification, "),
        ("summary", "has a summary with parts of its own before the head"),
        ("headless", "The weights hold 'score.bias', which GAU-alpha does not have"),
    ):
        with pytest.raises(LineartimeError, match=message):
            hf.convert(tmp_path / folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_model_of_flash_pytorch_is_read_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*command: object, status: int = 0) -> str:
        """What `lineartime convert` says, in one line."""
        assert main(["convert", *map(str, command)]) == status
        printed = capsys.readouterr()
        return " ".join((printed.err if status else printed.out).split())

    arguments = {"causal": True, "group_size": 8, "query_key_dim": 8}
    other = theirs("FLASHTransformer", dim=16, num_tokens=256, depth=2, **arguments)
    file, ours = tmp_path / "theirs.pt", tmp_path / "ours"
    torch.save({"step": 3, "model": other.state_dict()}, file)
    built_with = ["--flash-pytorch", "causal=true", "group_size=8"]
    assert "--tokenizer is None, but must be given" in said(file, ours, *built_with, status=1)
    for wrong, message in (
        ("causal", "--flash-pytorch contains 'causal', which is not NAME=VALUE"),
        ("norm_type=layernorm", "norm_type is not an option of FLASH-pytorch, which has"),
        ("casual=true", "casual is not an option of FLASH-pytorch (did you mean causal?)"),
    ):
        assert message in said(file, ours, "--flash-pytorch", wrong, status=1)
    assert "--checkpoint is given, but converting" in said(file, ours, "--checkpoint", "best", status=1)
    assert not ours.exists()
    assert "bidirectional" not in said(file, ours, *built_with, "--tokenizer", "bytes")
    ids = torch.randint(256, (2, 19))
    model = lineartime.load(ours)
    expected = other(ids)
    torch.testing.assert_close(model(ids)[..., :256], expected, atol=1e-4, rtol=1e-5)
    assert model(ids)[..., 256:].max() < expected.min() - 100  # what bytes of theirs do not have is never predicted
    assert main(["generate", str(ours), "--prompt", "ab", "--max-tokens", "5"]) == 0
    capsys.readouterr()
    silent = said(file, tmp_path / "silent", "--flash-pytorch", "group_size=8", "--tokenizer", "bytes")
    assert "taken for a bidirectional model, the default of FLASH-pytorch: if it was" in silent


@pytest.mark.parametrize("prefix", ["net.", "model.", "model.net."])  # AutoregressiveWrapper, LightningModule, both
def test_a_model_inside_a_wrapper_of_its_users_is_read(prefix: str, tmp_path: Path) -> None:
    other = theirs("FLASHTransformer", dim=16, num_tokens=256, depth=1, group_size=8, norm_type="layernorm")
    torch.save({"state_dict": {prefix + name: tensor for name, tensor in other.state_dict().items()}}, tmp_path / "w.ckpt")
    convert(tmp_path / "w.ckpt", tmp_path / "ours", tokenizer=ByteTokenizer(), flash_pytorch={"group_size": 8})
    ids = torch.randint(256, (2, 19))
    torch.testing.assert_close(lineartime.load(tmp_path / "ours")(ids)[..., :256], other(ids), atol=1e-4, rtol=1e-5)


def test_a_source_that_does_not_fit_is_named(tmp_path: Path) -> None:
    torch.save(theirs("FLASHTransformer", dim=16, num_tokens=30, depth=1).state_dict(), tmp_path / "theirs.pt")
    with pytest.raises(ArgumentError, match="tokenizer has 258 tokens, but the model 30"):
        convert(tmp_path / "theirs.pt", tmp_path / "ours", tokenizer=ByteTokenizer())
    torch.save(theirs("FLASH", dim=16).state_dict(), tmp_path / "layer.pt")
    with pytest.raises(LineartimeError, match=r"holds no FLASHTransformer of FLASH-pytorch: use lineartime.foreign"):
        convert(tmp_path / "layer.pt", tmp_path / "ours", tokenizer=ByteTokenizer())
    for missing in ("vocab.txt", "pytorch_model.bin"):
        formulas.write_folder(tmp_path / f"without {missing}")
        (tmp_path / f"without {missing}" / missing).unlink()
        with pytest.raises(LineartimeError, match=f"but no .*{missing}: copy all files of the model"):
            convert(tmp_path / f"without {missing}", tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LineartimeError, match=r"empty holds no model of another package: give a folder of GAU-alpha, or"):
        convert(tmp_path / "empty", tmp_path / "ours")
    assert not is_foreign("a" * 300)  # longer than a name can be


# Files that are not believed ----------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code of a file has run')",))


def compressed(file: Path) -> None:
    torch.save({"a": torch.zeros(10)}, file)
    with zipfile.ZipFile(file) as archive:
        records = {record: archive.read(record) for record in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for record, content in records.items():
            archive.writestr(record, content)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda file: torch.save({"a": Harmful()}, file), "cannot be read safely .*it holds objects besides tensors"),
    "a bare pickle": (lambda file: file.write_bytes(pickle.dumps(Harmful())), "is no file of weights"),
    "half": (lambda file: (torch.save({"a": torch.zeros(999)}, file), file.write_bytes(file.read_bytes()[:900])), "is no file"),
    "one number said to be many": (lambda file: torch.save({"a": torch.zeros(1).expand(2**40)}, file), "'a' is larger than"),
    "compressed": (compressed, "an archive that torch.save does not write"),
    "infinite in float8": (
        lambda file: torch.save({"a": torch.tensor([torch.nan]).to(torch.float8_e5m2)}, file),
        "'a' holds numbers that are not finite",
    ),
    "no tensor": (lambda file: torch.save({"a": 3}, file), "holds 'a', which is no tensor"),
    "a list": (lambda file: torch.save([torch.zeros(2)], file), "holds no weights"),
    "sparse": (lambda file: torch.save({"a": torch.eye(2).to_sparse()}, file), "holds 'a', which is no tensor"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_nothing_and_is_one_sentence(name: str, tmp_path: Path) -> None:
    write, message = HOSTILE[name]
    write(tmp_path / "model.bin")
    with pytest.raises(LineartimeError, match=message) as raised:
        read_weights(tmp_path / "model.bin")
    assert "\n" not in str(raised.value)


def test_names_of_compiled_and_distributed_models_are_those_of_the_models(tmp_path: Path) -> None:
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "layers._orig_mod."):
        torch.save({f"{prefix}0.weight": torch.ones(2), "end": torch.ones(1)}, tmp_path / "w.pt")
        expected = "layers.0.weight" if prefix.startswith("layers") else "0.weight"
        assert set(read_weights(tmp_path / "w.pt")) == {expected, "end"}
