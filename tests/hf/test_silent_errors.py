"""What transformers, its `Trainer`, PEFT and a chat ask of a model, and what was once answered wrongly without an error."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.errors import LineartimeError
from lineartime.hf import (
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForQuestionAnswering,
    LineartimeForTokenClassification,
    LineartimeModel,
    convert,
    fast_tokenizer,
)
from lineartime.hf.cache import CACHE

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


def ids_of(*shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of bytes, saved for transformers."""
    model = lineartime.build("flash-tiny", n_blocks=2, d_model=16, d_qk=8, chunk_size=8).eval()
    lineartime.save(model, ByteTokenizer(), tmp_path / "own")
    return convert(tmp_path / "own", tmp_path / "hf")


@pytest.mark.parametrize("kind", [LineartimeForCausalLM, LineartimeForMaskedLM, LineartimeForTokenClassification])
def test_labels_are_not_compared_with_other_tokens(kind: Any, tiny: Tiny) -> None:
    model = kind(tiny("flash", task="mlm" if kind is LineartimeForMaskedLM else "clm"))
    ids = ids_of(2, 9)
    with pytest.raises(ValueError, match=r"labels has shape \[9, 2\], but must be \[B, T\] = \[2, 9\]"):
        model(ids, labels=ids.T)
    with pytest.raises(ValueError, match="labels is a list, but must be a tensor"):
        model(ids, labels=ids.tolist())


def test_labels_need_the_logits_of_all_tokens(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    with pytest.raises(ValueError, match="logits_to_keep leaves out tokens, but labels need the logits of all"):
        causal(ids, labels=ids, logits_to_keep=1)
    torch.testing.assert_close(causal(ids, labels=ids, logits_to_keep=9).loss, causal(ids, labels=ids).loss)


def test_label_smoothing_does_not_teach_a_causal_model_to_copy_its_input(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=1e-6, use_cpu=True, report_to="none", dataloader_pin_memory=False
    )
    ids = ids_of(2, 9)
    loss = Trainer(causal, arguments).compute_loss(causal, {"input_ids": ids, "labels": ids.clone()})
    torch.testing.assert_close(loss, causal(ids, labels=ids).loss, atol=1e-4, rtol=1e-4)
    assert type(AutoModelForCausalLM.from_config(causal.config)) is LineartimeForCausalLM


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


EMBEDDING = "model.backbone.embedding.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_an_output_layer_of_its_own_without_bias_is_not_dropped(tied: bool, same: bool, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    change_weights(
        folder, lambda w: w.update({"lm_head.weight": w[EMBEDDING] + (0.0 if same else torch.randn_like(w[EMBEDDING]))})
    )
    change_config(folder, tie_word_embeddings=tied)
    output = load_file(folder / "model.safetensors")["lm_head.weight"]
    own = lineartime.load(convert(folder, tmp_path / "back"))
    assert own.config.tie_word_embeddings == (tied and same)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(own(ids), AutoModelForCausalLM.from_pretrained(folder)(ids).logits)
    expected = LineartimeModel.from_pretrained(folder)(ids).last_hidden_state @ output.T
    torch.testing.assert_close(own(ids), expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_an_adapter_for_questions_trains_and_saves_the_head(tiny: Tiny, awake: Awake, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = awake(LineartimeForQuestionAnswering(tiny(task="mlm")))
    settings = peft.LoraConfig(r=2, target_modules=["to_output"], task_type="QUESTION_ANS")
    adapted = peft.get_peft_model(model, settings)
    heads = [p for name, p in adapted.named_parameters() if "qa_outputs" in name and p.requires_grad]
    assert len(heads) == 2
    adapted.save_pretrained(tmp_path)
    assert any("qa_outputs" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_a_question_model_of_an_earlier_version_keeps_its_head(tiny: Tiny, awake: Awake, tmp_path: Path) -> None:
    model = awake(LineartimeForQuestionAnswering(tiny(task="mlm")))
    old, new = tmp_path / "old", tmp_path / "new"
    model.save_pretrained(old)
    change_weights(old, lambda w: w.update({name.replace("qa_outputs", "score"): w.pop(name) for name in list(w)}))
    assert "score.weight" in load_file(old / "model.safetensors")
    loaded = AutoModelForQuestionAnswering.from_pretrained(old)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    loaded.save_pretrained(new)
    torch.testing.assert_close(AutoModelForQuestionAnswering.from_pretrained(new).state_dict(), model.state_dict())


def test_a_given_cache_is_continued_right_or_refused(causal: LineartimeForCausalLM) -> None:
    ids, options = ids_of(1, 9), {**GREEDY, "repetition_penalty": 2.0}  # other tokens at each step
    whole = causal.generate(ids, **options)[:, 9:].tolist()
    assert len(set(whole[0])) == 4
    with torch.no_grad():
        cache = causal(ids[:, :6], use_cache=True).past_key_values

    def rest(tokens: Tensor, width: int | None = None, **more: Any) -> list[list[int]]:
        mask = None if width is None else torch.ones(1, width, dtype=torch.long)
        given = {"cache": copy.deepcopy(cache), "attention_mask": mask, **options, **more}
        return causal.generate(tokens, **given)[:, -4:].tolist()  # type: ignore[no-any-return]

    assert rest(ids) == rest(ids, 9) == rest(ids[:, 6:], 9) == rest(ids, prefill_chunk_size=2) == whole
    for tokens, width in ((ids[:, :6], None), (ids[:, :4], None), (ids[:, 6:], 3), (ids[:, 6:], None)):
        for more in ({}, {"prefill_chunk_size": 2}):
            with pytest.raises(ValueError, match=rf"{CACHE} has read 6 tokens, but the prompt .* covers only"):
                rest(tokens, width, **more)
    with pytest.raises(ValueError, match=f"use_cache is False, but {CACHE} has read 6 tokens"):
        rest(ids, use_cache=False)
    with pytest.raises(ValueError, match=rf"{CACHE} has read 6 tokens, but assisted .* prompt_lookup_num_tokens, or"):
        rest(ids, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match=rf"{CACHE} has read 6 tokens, but assisted .* leave out assistant_model, or"):
        rest(ids, assistant_model=causal)


def test_an_end_of_text_that_lineartime_does_not_use_is_not_lost_silently(folder: Path, tmp_path: Path) -> None:
    change_config(folder, eos_token_id=10)
    with pytest.raises(LineartimeError, match=r"config.json ends texts with eos_token_id 10, but .* with token 256"):
        convert(folder, tmp_path / "back")
    change_config(folder, eos_token_id=[256])
    generation = folder / "generation_config.json"
    before = generation.read_text() if generation.exists() else "{}"
    generation.write_text(json.dumps({**json.loads(before), "eos_token_id": [256, 10]}))
    with pytest.raises(LineartimeError, match=r"generation_config.json ends texts with eos_token_id .*256, 10"):
        convert(folder, tmp_path / "other")
    generation.write_text(before)
    convert(folder, tmp_path / "back")


def test_a_mask_of_fractions_is_refused_before_it_is_rounded(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(1, 3)
    for mask in (torch.tensor([[0.5, 1.0, 1.0]]), torch.tensor([[1.5, 1.0, 1.0]])):
        with pytest.raises(ValueError, match="attention_mask has values other than 0 and 1"):
            causal(ids, attention_mask=mask)
    real = torch.tensor([[0, 1, 1]])
    torch.testing.assert_close(causal(ids, attention_mask=real.float()).logits, causal(ids, attention_mask=real).logits)


def test_a_chat_of_parts_is_their_text_and_what_it_cannot_show_is_refused() -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yo"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: ab\nassistant: yo[END]\n"
    for messages, tools, message in (
        (chat, [{"type": "function", "function": {"name": "f"}}], "cannot show tools"),
        ([{"content": "a"}], None, "has no role"),
        ([{"role": "assistant", "content": None}], None, "has no content"),
        ([{"role": "user"}], None, "has no content"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "a part that is no text"),
    ):
        with pytest.raises(TemplateError, match=message):
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


def test_the_mask_of_a_chat_covers_the_answers_and_their_ends() -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    chat = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "yo"}] * 2
    found = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    kept = [token for token, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own]
    assert kept == [*b" yo", 256] * 2


def test_documents_told_apart_by_their_numbers_alone_do_not_read_each_other(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny()))
    documents = [{"input_ids": ids_of(1, length)[0].tolist()} for length in (7, 1, 5)]
    packed = DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True)(documents)
    assert "seq_idx" in packed
    alone = torch.cat([model(torch.tensor([document["input_ids"]])).logits for document in documents], 1)
    torch.testing.assert_close(model(**packed).logits, alone, atol=1e-5, rtol=0)
    ids, numbers = ids_of(2, 4), torch.tensor([[0, 0, 1, 1]] * 2)
    with pytest.raises(ValueError, match="seq_idx has several documents in a row"):
        model(ids, seq_idx=numbers)
    with pytest.raises(ValueError, match=r"seq_idx has shape \[2, 4\], but must be \[B, T\] = \[1, 4\]"):
        model(ids[:1], seq_idx=numbers)
    with pytest.raises(ValueError, match="use_cache is True, but the row holds several documents"):
        model(ids[:1], seq_idx=numbers[:1], use_cache=True)
    one = torch.zeros_like(numbers)
    torch.testing.assert_close(model(ids, seq_idx=one).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning", "ignore:Model has .tie_word:UserWarning")
@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["to_output"], "trainable_token_indices": [3]}, {"target_modules": ["embedding", "to_output"]}],
)
def test_an_adapter_on_the_embedding_runs_and_generates(settings: dict[str, Any], causal: LineartimeForCausalLM) -> None:
    peft = pytest.importorskip("peft")
    ids = ids_of(1, 5)
    before, text = causal(ids).logits, causal.generate(ids, **GREEDY)
    adapted = peft.get_peft_model(causal, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)).eval()
    torch.testing.assert_close(adapted(ids).logits, before)
    assert adapted.generate(input_ids=ids, **GREEDY).tolist() == text.tolist()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_warns_of_merging_an_adapter_on_a_tied_embedding(causal: LineartimeForCausalLM) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["embedding"])
    with pytest.warns(UserWarning, match="a tied layer is part of the adapter, but `ensure_weight_tying` is not"):
        adapted = peft.get_peft_model(causal, settings)
    with pytest.warns(UserWarning, match=r"tied_target_modules=\['model.backbone.embedding'\] are part of the adapter"):
        adapted.merge_and_unload()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_learned_prompt_is_read_once(causal: LineartimeForCausalLM) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_attention_heads=1)
    tuned, ids = peft.get_peft_model(causal, settings).eval(), ids_of(1, 5)
    found = tuned.generate(input_ids=ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    expected = tuned(input_ids=found.sequences[:, :-1]).logits[0, -4:]
    torch.testing.assert_close(torch.cat(found.logits), expected, atol=1e-5, rtol=0)


def test_continuous_batching_is_refused_in_one_sentence(causal: LineartimeForCausalLM) -> None:
    with pytest.raises(LineartimeError, match=r"^Continuous batching of transformers needs a cache of keys and values"):
        causal.generate_batch([[1, 2, 3]])


def test_a_tokenizer_knows_the_longest_text_of_its_model(tmp_path: Path) -> None:
    model = lineartime.build("transformer-tiny", n_blocks=1, d_model=16, n_heads=2, max_positions=32)
    lineartime.save(model, ByteTokenizer(), tmp_path / "own")
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "own", tmp_path / "hf"))
    assert tokenizer.model_max_length == AutoConfig.from_pretrained(tmp_path / "hf").n_positions == 32
    assert len(tokenizer("a" * 99, truncation=True).input_ids) == 32


def test_a_model_is_loaded_by_the_name_of_the_argument_in_transformers(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    causal.save_pretrained(tmp_path)
    loaded: PreTrainedModel = LineartimeForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path)
    torch.testing.assert_close(loaded.state_dict(), causal.state_dict())


def test_attentions_asked_for_in_the_configuration_are_refused_as_in_a_call(causal: LineartimeForCausalLM) -> None:
    causal.config._output_attentions = True
    with pytest.raises(ValueError, match="output_attentions is True, but these models do not compute"):
        causal(ids_of(1, 4))
    causal(ids_of(1, 4), output_attentions=False)


def test_folders_without_a_whole_model_are_named_for_what_they_lack(folder: Path, tmp_path: Path) -> None:
    change_weights(folder, lambda w: w.update({EMBEDDING: w[EMBEDDING].to(torch.int8)}))
    with pytest.raises(LineartimeError, match=r"holds backbone.embedding.weight as torch.int8, but weights must be floats"):
        convert(folder, tmp_path / "back")
    (folder / "model.safetensors").rename(folder / "away")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(LineartimeError, match=r"Cannot read .*a.safetensors"):
        convert(folder, tmp_path / "back")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(LineartimeError, match="adapter holds only an adapter: merge it into its model"):
        convert(adapter, tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "own"),
    [("n_layers", "n_blocks"), ("num_layers", "n_blocks"), ("n_embd", "d_model"), ("num_attention_heads", "n_heads in mixer")],
)
def test_a_size_under_the_name_of_another_model_does_not_give_the_default(name: str, own: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 3, but no field of this model has that name: give {own}"):
        LineartimeConfig(**{name: 3})
    assert LineartimeConfig(num_hidden_layers=3, hidden_size=64, num_labels=5).n_blocks == 3
