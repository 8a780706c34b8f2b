"""Tokenizers there and back, and chats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoConfig, AutoTokenizer, DataCollatorForLanguageModeling, DataCollatorWithFlattening

import lineartime
from lineartime.data import ByteTokenizer, JsonTokenizer, Tokenizer
from lineartime.hf import convert, fast_tokenizer

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
    "words": lambda: trained("words"),
    "with an end": lambda: trained("bpe", end=True),
}


def test_a_text_of_a_masked_model_is_framed_as_in_training(tmp_path: Path) -> None:
    words = trained("words")
    backend = tokenizers.Tokenizer.from_str(words.to_json())
    backend.add_special_tokens(["[MASK]", "[CLS]", "[SEP]"])
    own = JsonTokenizer(backend.to_str(), "words")
    for task, framed in (("mlm", True), ("clm", False)):
        model = lineartime.build("flash-tiny", task, n_blocks=1, d_model=16, d_qk=8, vocab_size=own.vocab_size)
        lineartime.save(model, own, tmp_path / task)
        convert(tmp_path / task, tmp_path / f"{task}-hf")
        fast = AutoTokenizer.from_pretrained(tmp_path / f"{task}-hf")
        ids = own.encode("the square of 3").tolist()
        assert own.frame == (backend.token_to_id("[CLS]"), backend.token_to_id("[SEP]"))
        assert fast("the square of 3").input_ids == ([own.frame[0], *ids, own.frame[1]] if framed else ids)
        convert(tmp_path / f"{task}-hf", tmp_path / f"{task}-back")
        assert lineartime.load_tokenizer(tmp_path / f"{task}-back").frame == own.frame


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
    assert (fast.mask_token_id, len(fast)) == (own.mask, own.vocab_size)
    assert fast(fast.mask_token + "a").input_ids[0] == own.mask
    convert(tmp_path / "hf", tmp_path / "back")
    back = lineartime.load_tokenizer(tmp_path / "back")
    assert type(back) is type(own)
    assert (back.end_of_document, back.mask, back.vocab_size) == (own.end_of_document, own.mask, own.vocab_size)
    assert all(back.encode(text).tolist() == own.encode(text).tolist() for text in TEXTS)


def test_a_tokenizer_knows_the_longest_text_of_its_model(tmp_path: Path) -> None:
    model = lineartime.build("transformer-tiny", n_blocks=1, d_model=16, n_heads=2, max_positions=32)
    lineartime.save(model, ByteTokenizer(), tmp_path / "own")
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "own", tmp_path / "hf"))
    assert tokenizer.model_max_length == AutoConfig.from_pretrained(tmp_path / "hf").n_positions == 32
    assert len(tokenizer("a" * 99, truncation=True).input_ids) == 32


# Chats ------------------------------------------------------------------------------------------------------------------


def test_a_chat_is_plain_turns_of_which_answers_end_as_documents_do(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi\n{{ x }} "},
        {"role": "assistant", "content": " hello"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "ye"}]},
    ]
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat == f"system: be kind\nuser: hi\n{{{{ x }}}}\nassistant: hello{tokenizer.eos_token}\nuser: bye\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(chat + "assistant:")["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.encode("user: hi") == list(b"user: hi")  # a text that is no chat


def test_answers_and_their_ends_are_what_a_chat_teaches() -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    chat = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "yo"}] * 2
    found = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    kept = [token for token, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own]
    assert kept == [*b" yo", 256] * 2
    batch = [{"input_ids": found["input_ids"]}]
    assert (DataCollatorWithFlattening()(batch)["labels"] == 256).sum() == 2
    assert not (DataCollatorForLanguageModeling(tokenizer, mlm=False)(batch)["labels"] == 256).any()
