"""Conversion between folders of lineartime and of transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.hf.tiny import change_weights, close, masked_model, own
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.errors import LineartimeError
from lineartime.hf import LineartimeForMaskedLM, LineartimeModel, convert, from_transformers
from lineartime.hf.model import FIELDS

EMBEDDING, NORM = "model.backbone.embedding.weight", "model.backbone.norm.weight"


def change_json(file: Path, **values: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}))


def test_a_run_goes_there_and_back_unchanged(config: Callable[..., Any], tmp_path: Path) -> None:
    result = lineartime.train(config())
    assert result.checkpoint is not None
    convert(tmp_path / "run", tmp_path / "hf")
    convert(tmp_path / "run", tmp_path / "first", checkpoint=4)
    ids = torch.arange(20)[None]
    best = lineartime.load(tmp_path / "run")
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(there(ids).logits, best(ids), atol=0, rtol=0)
    convert(tmp_path / "hf", tmp_path / "back")
    for name in ("model.safetensors", "model.json"):
        assert (tmp_path / "back" / name).read_bytes() == (result.checkpoint / name).read_bytes()
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert not torch.equal(first(ids).logits, best(ids))
    assert there.config.n_positions == 24  # the length that an evaluation harness takes


@pytest.mark.parametrize("system", ["transformer++", "bigbird"])
def test_a_masked_model_in_several_bf16_files_comes_back(system: str, tmp_path: Path) -> None:
    lineartime.save(own(masked_model(system, vocab_size=258)), ByteTokenizer(), tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "hf")
    exact, loaded = (LineartimeForMaskedLM.from_pretrained(tmp_path / "hf", dtype=kind) for kind in ("auto", torch.bfloat16))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    close(loaded(torch.arange(20)[None]).logits.float(), exact(torch.arange(20)[None]).logits, 3e-2)
    loaded.save_pretrained(tmp_path / "hf16", max_shard_size="20KB")
    shutil.copy(tmp_path / "hf" / "tokenizer.json", tmp_path / "hf16")
    assert (tmp_path / "hf16" / "model.safetensors.index.json").exists()
    back = lineartime.load(from_transformers(tmp_path / "hf16", tmp_path / "back"))
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    ids = torch.arange(20)[None]
    torch.testing.assert_close(back.backbone.state_dict(), loaded.float().model.backbone.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(back(ids), loaded(ids).logits)


def test_a_folder_describes_the_model_in_full(folder: Path) -> None:
    names = {"README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in folder.iterdir()} == {*names, "tokenizer.json", "tokenizer_config.json"}
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "A language model (task clm) of 7,887 parameters" in card
    data = json.loads((folder / "config.json").read_text())
    assert set(FIELDS) <= set(data)
    assert "auto_map" not in data  # no remote code
    assert AutoConfig.from_pretrained(folder).auto_map == {}  # which TRL reads


def test_a_model_tuned_in_transformers_with_an_added_token_comes_back(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|user|>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "tuned")
    back = convert(tmp_path / "tuned", tmp_path / "back")
    read = lineartime.load_tokenizer(back)
    assert (read.end_of_document, read.mask, read.vocab_size) == (256, 257, 259)
    ids = read.encode("<|user|>añ [END]")
    assert ids.tolist() == [258, *"añ [END]".encode()]
    rows = torch.from_numpy(ids)[None]
    torch.testing.assert_close(lineartime.load(back)(rows), model(rows).logits)


def test_a_configuration_of_an_earlier_version_with_an_ignored_option_is_loaded(folder: Path) -> None:
    change_json(folder / "config.json", chunk_size=64)
    assert AutoConfig.from_pretrained(folder).mixer["chunk_size"] == 8
    assert AutoModelForCausalLM.from_pretrained(folder, num_labels=3, dtype=torch.bfloat16).config.num_labels == 3


@pytest.mark.parametrize("tied", [True, False])
def test_the_padding_of_a_vocabulary_is_left_out(tied: bool, tmp_path: Path) -> None:
    built = lineartime.build("flash-tiny", n_blocks=1, d_model=16, d_qk=8, tie_word_embeddings=tied)
    lineartime.save(built, ByteTokenizer(), tmp_path / "own")
    folder = convert(tmp_path / "own", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
    model.save_pretrained(folder)
    back = lineartime.load(convert(folder, tmp_path / "back"))
    assert (model.config.vocab_size, back.config.vocab_size) == (320, 258)
    ids = torch.arange(258)[None]
    torch.testing.assert_close(back(ids), model(ids).logits[..., :258])
    model.resize_token_embeddings(258 + 128, mean_resizing=False)
    model.save_pretrained(folder)
    with pytest.raises(LineartimeError, match="holds a tokenizer of 258 tokens and a model of 386"):
        convert(folder, tmp_path / "refused")


@pytest.mark.parametrize(("tied", "same"), [(True, True), (True, False), (False, True)])
def test_an_output_layer_of_its_own_without_bias_is_not_dropped(tied: bool, same: bool, folder: Path, tmp_path: Path) -> None:
    change_weights(
        folder, lambda w: w.update({"lm_head.weight": w[EMBEDDING] + (0.0 if same else torch.randn_like(w[EMBEDDING]))})
    )
    change_json(folder / "config.json", tie_word_embeddings=tied)
    output = load_file(folder / "model.safetensors")["lm_head.weight"]
    back = lineartime.load(convert(folder, tmp_path / "back"))
    assert back.config.tie_word_embeddings == (tied and same)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(back(ids), AutoModelForCausalLM.from_pretrained(folder)(ids).logits)
    torch.testing.assert_close(back(ids), LineartimeModel.from_pretrained(folder)(ids).last_hidden_state @ output.T)


# Damaged and other sources ----------------------------------------------------------------------------------------------


def _index(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    change_json(folder / "model.safetensors.index.json", weight_map={"x": name})


def _json(name: str = "config.json", **values: Any) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / name, **values)


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


WEIGHTS, END, TEXTS = "model.safetensors", "generation_config.json", "tokenizer_config.json"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "other type": (_json(model_type="llama"), "model of type 'llama': only models of type"),
    "untied": (_json(tie_word_embeddings=False), "lacks lm_head.weight"),
    "wrong type": (_json(d_model="16"), "describes no model .*d_model is '16'"),
    "absurd width": (_json(d_model=10**6), "but its config.json specifies"),
    "another depth": (_json(n_blocks=3), "lacks backbone.blocks.2.*: it holds another"),
    "a head for a task": (
        lambda f: AutoModelForSequenceClassification.from_pretrained(f).save_pretrained(f),
        "holds score.*, which a language model does not have",
    ),
    "no JSON": (_bytes("config.json", lambda _: b"{"), r"config.json is damaged \(it is not JSON"),
    "missing name": (lambda f: change_weights(f, lambda w: w.pop(NORM)), "lacks backbone.norm.weight"),
    "integers": (
        lambda f: change_weights(f, lambda w: w.update({EMBEDDING: w[EMBEDDING].to(torch.int8)})),
        "holds backbone.embedding.weight as torch.int8, but weights must be floats",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "Cannot read .*model.safetensors"),
    "cut": (_bytes(WEIGHTS, lambda content: content[:-9]), "is damaged"),
    "a header that lies": (_bytes(WEIGHTS, lambda _: (2**62).to_bytes(8, "little") + b"{}"), "model.safetensors is damaged"),
    "a path out of the folder": (
        lambda f: _index(f, "../elsewhere.safetensors"),
        "names .*'../elsewhere.safetensors'.*, but must name weight files in its folder",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "Cannot read .*tokenizer.json"),
    "a broken tokenizer": (_bytes("tokenizer.json", lambda _: b"\xff{"), "is not a tokenizer file"),
    "another end": (_json(eos_token_id=10), "config.json ends texts with eos_token_id 10, but .* with token 256"),
    "another end for generate": (_json(END, eos_token_id=[256, 10]), f"{END} ends texts with eos_token_id .*256, 10"),
    "another end of texts": (
        _json(TEXTS, eos_token="[MASK]"),
        rf"{TEXTS} ends texts with eos_token '\[MASK\]', but lineartime",
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_or_hostile_folder_ends_in_one_sentence(damage: str, folder: Path, tmp_path: Path) -> None:
    spoil, message = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(LineartimeError, match=message) as error:
        from_transformers(folder, tmp_path / "back")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "back").exists()


def test_a_source_that_is_none_and_a_destination_that_is_taken_are_refused(folder: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    for source, message in (
        ("nowhere", "source is .*nowhere, which is no folder"),
        ("empty", "source is .*empty, which holds neither a run or checkpoint nor a model of transformers"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / source, tmp_path / "new")
    with pytest.raises(ValueError, match=r"checkpoint is last, but .*hf is no run: leave it out"):
        convert(folder, tmp_path / "new", checkpoint="last")
    (folder / "model.safetensors").unlink()  # a taken destination is refused before the source is read
    for source in ("hf", "own"):
        with pytest.raises(ValueError, match=r"destination is .*own, which exists already"):
            convert(tmp_path / source, tmp_path / "own")
    assert set(tmp_path.iterdir()) == {*before, tmp_path / "empty"}
