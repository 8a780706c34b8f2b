"""Conversion between folders of lineartime and of transformers, and its tokenizers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lineartime
from lineartime.data import ByteTokenizer, JsonTokenizer, Tokenizer
from lineartime.errors import LineartimeError
from lineartime.hf import (
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    convert,
    fast_tokenizer,
    from_transformers,
)
from lineartime.hf.card import model_card
from lineartime.hf.config import FIELDS
from lineartime.hf.tokenizer import plain_tokenizer

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

TEXTS = ["the square of 3 is 9", " leading, and  two spaces\n\ttabs", "añ é 漢字 \U0001f600", "", "a , b ."]


def trained(kind: str, end: bool = False) -> JsonTokenizer:
    """A trained tokenizer, with special tokens of its own or without."""
    if kind == "bpe":
        backend: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    else:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator([f"the square of {i} is {i * i}" for i in range(99)], trainer)
    if end:
        backend.add_special_tokens(["</s>"])
        end_token = backend.token_to_id("</s>")
        backend.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", end_token)])
    return JsonTokenizer(backend.to_str(), "trained")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "bpe": lambda: trained("bpe"),
    "words": lambda: trained("words"),
    "with an end": lambda: trained("bpe", end=True),
}


@pytest.fixture
def model() -> lineartime.models.CausalLM:
    return lineartime.build("flash-tiny", n_blocks=2, d_model=16, d_qk=8, chunk_size=8).eval()


@pytest.fixture
def folder(model: lineartime.models.CausalLM, tmp_path: Path) -> Path:
    """A model of bytes, saved for transformers."""
    lineartime.save(model, ByteTokenizer(), tmp_path / "own")
    return convert(tmp_path / "own", tmp_path / "hf")


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_a_tokenizer_gives_the_same_ids_in_transformers_and_comes_back(kind: str, tmp_path: Path) -> None:
    own = TOKENIZERS[kind]()
    model = lineartime.build("flash-tiny", n_blocks=1, d_model=16, d_qk=8, vocab_size=own.vocab_size)
    lineartime.save(model, own, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "hf")
    fast = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        ids = own.encode(text).tolist()
        assert fast(text).input_ids == ids
        assert fast.decode(ids, skip_special_tokens=True) == own.decode(ids)
    assert (fast.eos_token_id, fast.bos_token_id, fast.pad_token_id) == (own.end_of_document,) * 3
    assert fast.mask_token_id == own.mask
    assert len(fast) == own.vocab_size
    assert fast(fast.mask_token + "a").input_ids[0] == own.mask
    convert(tmp_path / "hf", tmp_path / "back")
    back = lineartime.load_tokenizer(tmp_path / "back")
    assert type(back) is type(own)
    assert (back.end_of_document, back.mask, back.vocab_size) == (own.end_of_document, own.mask, own.vocab_size)
    assert all(back.encode(text).tolist() == own.encode(text).tolist() for text in TEXTS)


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
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (result.checkpoint / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.json").read_text() == (result.checkpoint / "model.json").read_text()
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert not torch.equal(first(ids).logits, best(ids))


@pytest.mark.parametrize("system", ["transformer++", "reformer", "bigbird", "linformer"])
def test_a_masked_model_in_several_bf16_files_comes_back(system: str, tiny: Tiny, awake: Awake, tmp_path: Path) -> None:
    model = awake(LineartimeForMaskedLM(tiny(system, "mlm", vocab_size=258)))
    convert(_saved(model, tmp_path), tmp_path / "hf")
    loaded = LineartimeForMaskedLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "hf16", max_shard_size="20KB")
    shutil.copy(tmp_path / "hf" / "tokenizer.json", tmp_path / "hf16")
    assert (tmp_path / "hf16" / "model.safetensors.index.json").exists()
    back = lineartime.load(from_transformers(tmp_path / "hf16", tmp_path / "back"))
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    ids = torch.arange(20)[None]
    torch.testing.assert_close(back.backbone.state_dict(), loaded.float().model.backbone.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(back(ids), loaded(ids).logits)


def test_a_chat_is_plain_turns_of_which_answers_end_as_documents_do(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi\n{{ x }} "},
        {"role": "assistant", "content": " hello"},
        {"role": "user", "content": "bye"},
    ]
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat == f"system: be kind\nuser: hi\n{{{{ x }}}}\nassistant: hello{tokenizer.eos_token}\nuser: bye\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(chat + "assistant:")["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.encode("user: hi") == list(b"user: hi")  # a text that is no chat


def _saved(model: Any, tmp_path: Path) -> Path:
    own = lineartime.build(model.config.to_model_config())
    own.backbone.load_state_dict(model.model.backbone.state_dict())
    return lineartime.save(own, ByteTokenizer(), tmp_path / "own")


def test_a_folder_has_a_card_and_describes_the_model_in_full(folder: Path) -> None:
    files = {file.name for file in folder.iterdir()}
    assert files == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "FLASH: gated units with mixed chunk attention" in card
    assert "AutoModelForCausalLM" in card
    data = json.loads((folder / "config.json").read_text())
    assert set(FIELDS) <= set(data)
    assert "auto_map" not in data  # no remote code
    assert AutoConfig.from_pretrained(folder).auto_map == {}  # which TRL reads
    assert data["mixer"]["chunk_size"] == 8


def test_the_card_of_a_run_says_how_it_was_trained(tmp_path: Path) -> None:
    (tmp_path / "a|b.txt").write_text("a text to learn\n" * 200)
    small = {"override": {"d_model": 16, "n_blocks": 1, "d_qk": 8}, "context_length": 16, "eval_windows": 2, "steps": 2}
    lineartime.train(**small, data=tmp_path / "a|b.txt", cache=tmp_path / "cache", out=tmp_path / "run")
    card = (convert(tmp_path / "run", tmp_path / "model") / "README.md").read_text()
    facts = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")][2:]
    assert [fact for fact, _ in facts[:4]] == ["blocks", "width", "vocabulary", "longest text"]
    assert facts[4:8] == [
        ["trained on", "a\\|b.txt"],
        ["steps", "2"],
        ["tokens per step", "64"],
        ["context in training", "16 tokens"],
    ]
    assert re.fullmatch(r"\d\.\d{4} nats per token", dict(facts)["held-out loss"])
    assert "nats per token |\n\nTransformers loads" in card
    assert AutoConfig.from_pretrained(tmp_path / "model").n_positions == 16  # the length that an evaluation harness takes


def test_a_model_tuned_in_transformers_comes_back(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tuned")
    own = lineartime.load(convert(tmp_path / "tuned", tmp_path / "back"))
    ids = torch.arange(20)[None]
    torch.testing.assert_close(own(ids), model(ids).logits)
    assert isinstance(lineartime.load_tokenizer(tmp_path / "back"), ByteTokenizer)


def test_a_model_of_bytes_with_an_added_token_comes_back(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|user|>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "tuned")
    own = lineartime.load(convert(tmp_path / "tuned", tmp_path / "back"))
    back = lineartime.load_tokenizer(tmp_path / "back")
    assert (back.end_of_document, back.mask, back.vocab_size) == (256, 257, 259)
    ids = back.encode("<|user|>añ [END]")
    assert ids.tolist() == [258, *"añ [END]".encode()]
    torch.testing.assert_close(own(torch.from_numpy(ids)[None]), model(torch.from_numpy(ids)[None]).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_padding_of_a_vocabulary_is_left_out(tied: bool, tmp_path: Path) -> None:
    own = lineartime.build("flash-tiny", n_blocks=1, d_model=16, d_qk=8, tie_word_embeddings=tied)
    lineartime.save(own, ByteTokenizer(), tmp_path / "own")
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


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("clm", "A causal language model of"),
        ("mlm", "A masked language model of"),
        ("prefix-lm", "A prefix language model (it"),
    ],
)
def test_a_card_says_what_a_model_is_and_how_to_install_what_reads_it(task: Any, words: str) -> None:
    model = lineartime.build("flash-tiny", task, n_blocks=1, d_model=16, d_qk=8)
    card = model_card(model.config, "name", model.n_parameters)
    assert f"\n{words}" in card
    assert "trained on" not in card
    assert "pip install '.[hf]'" in card  # not yet from PyPI


@pytest.mark.parametrize(
    ("name", "part"), [("chunk_size", "mixer"), ("d_qk", "mixer"), ("n_heads", "mixer"), ("expansion", "feed_forward")]
)
def test_an_option_of_a_layer_beside_its_layer_is_not_ignored(name: str, part: str, tiny: Tiny) -> None:
    layers = {"mixer": {"kind": "flash"}} if name in ("chunk_size", "d_qk") else tiny("transformer").to_dict()
    given = {field: layers[field] for field in ("mixer", "feed_forward") if field in layers}
    with pytest.raises(
        lineartime.ArgumentError, match=f"{name} is 2, which is an option of {part} and no field of the model: put it into"
    ):
        LineartimeConfig(**given, **{name: 2})


def test_a_configuration_of_an_earlier_version_with_an_ignored_option_is_loaded(folder: Path) -> None:
    _change(folder / "config.json", chunk_size=64)
    assert AutoConfig.from_pretrained(folder).mixer["chunk_size"] == 8
    assert AutoModelForCausalLM.from_pretrained(folder, num_labels=3, dtype=torch.bfloat16).config.num_labels == 3


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def _index(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))


NORM = "model.backbone.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "other type": (lambda f: _change(f / "config.json", model_type="llama"), "model of type 'llama': only models of type"),
    "untied": (lambda f: _change(f / "config.json", tie_word_embeddings=False), "lacks lm_head.weight"),
    "unknown layer": (
        lambda f: _change(f / "config.json", mixer={"kind": "none"}),
        "mixer.kind is 'none'",
    ),
    "wrong type": (lambda f: _change(f / "config.json", d_model="16"), "describes no model .*d_model is '16'"),
    "absurd width": (lambda f: _change(f / "config.json", d_model=10**6), "but its config.json specifies"),
    "absurd depth": (
        lambda f: _change(f / "config.json", n_blocks=10**5),
        "2 blocks, but its config.json specifies 100000",
    ),
    "absurd vocabulary": (
        lambda f: _change(f / "config.json", vocab_size=2 * 10**9),
        "another model|no model that can",
    ),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config.json is damaged \(it is not JSON"),
    "deep JSON": (
        lambda f: (f / "config.json").write_text("[" * 10**5),
        r"config.json is damaged \(it has lists and objects nested",
    ),
    "a list": (lambda f: (f / "config.json").write_text("[]"), r"config.json is damaged \(it is .*, but must be an object"),
    "missing name": (lambda f: _change_weights(f, lambda w: w.pop(NORM)), "lacks backbone.norm.weight"),
    "unexpected name": (
        lambda f: _change_weights(f, lambda w: w.update(score=w[NORM] + 0)),
        "holds score, which a",
    ),
    "wrong shape": (lambda f: _change_weights(f, lambda w: w.update({NORM: torch.ones(17)})), r"shape \[17\], but .* \[16\]"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "no safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04pickle"), "model.safetensors is damaged"),
    "cut": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "is damaged"),
    "a header that lies": (
        lambda f: (f / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}"),
        "model.safetensors is damaged",
    ),
    "a path out of the folder": (
        lambda f: _index(f, "../elsewhere.safetensors"),
        "'../elsewhere.safetensors', which is not a weight file",
    ),
    "a pickle in the index": (
        lambda f: _index(f, "pytorch_model.bin"),
        "'pytorch_model.bin', which is not a weight file",
    ),
    "an empty index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "names no files of weights"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "Cannot read .*tokenizer.json"),
    "another tokenizer": (
        lambda f: (f / "tokenizer.json").write_text(trained("bpe").to_json()),
        "a tokenizer of 302 tokens and a model of 258",
    ),
    "another end of text": (
        lambda f: _change(f / "tokenizer_config.json", eos_token="[MASK]"),
        r"tokenizer_config.json ends texts with eos_token '\[MASK\]', but lineartime ends documents of this tokenizer with '",
    ),
    "another end of text, as earlier versions wrote it": (
        lambda f: _change(f / "tokenizer_config.json", eos_token={"content": "a", "special": True}),
        "ends texts with eos_token 'a'",
    ),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_bytes(b"\xff{"), "is not a tokenizer file"),
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
    (tmp_path / "empty").mkdir()
    for source, message in (
        (tmp_path / "nowhere", "source is .*nowhere, which is no folder"),
        (tmp_path / "empty", "source is .*empty, which holds neither a run or checkpoint nor a model of transformers"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "new")
    for source in (folder, tmp_path / "own"):
        with pytest.raises(ValueError, match=r"destination is .*own, which exists already"):
            convert(source, tmp_path / "own")
    with pytest.raises(ValueError, match=r"checkpoint is last, but .*hf is no run: leave it out"):
        convert(folder, tmp_path / "new", checkpoint="last")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_destination_that_is_taken_is_refused_before_the_source_is_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"destination is .*own, which exists already"):
        from_transformers(folder, tmp_path / "own")


def test_a_model_for_a_task_cannot_become_one_of_lineartime(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(tmp_path / "task")
    shutil.copy(folder / "tokenizer.json", tmp_path / "task")
    with pytest.raises(LineartimeError, match=r"holds score.*, which a language model does not have"):
        convert(tmp_path / "task", tmp_path / "back")


def test_the_configuration_holds_every_field_of_a_model(tiny: Tiny) -> None:
    config = tiny("transformer", dropout=0.1)
    assert LineartimeConfig.from_dict(config.to_dict()).to_model_config() == config.to_model_config()
    assert (config.hidden_size, config.num_hidden_layers, config.max_positions) == (16, 2, 1024)
    assert LineartimeConfig().to_model_config().mixer.kind == "flash"
    with pytest.raises(ValueError, match="dropout is 'a', but must be a number"):
        LineartimeConfig(dropout="a")
    assert LineartimeForCausalLM(tiny()).config.architectures is None


def test_a_definition_needs_no_more_than_its_model() -> None:
    definition = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})
    assert plain_tokenizer(definition, "given").encode("ab").tolist() == [0, 1]
    own = fast_tokenizer(ByteTokenizer(), None).backend_tokenizer.to_str()
    assert isinstance(plain_tokenizer(own, "given"), ByteTokenizer)
