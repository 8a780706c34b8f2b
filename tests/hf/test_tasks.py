"""Models for fine-tuning, training by `Trainer`, pipelines, and adapters of PEFT."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    pipeline,
)

from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.hf import (
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForMultipleChoice,
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
    fast_tokenizer,
)

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

AUTO = {
    AutoModelForMultipleChoice: LineartimeForMultipleChoice,
    AutoModelForQuestionAnswering: LineartimeForQuestionAnswering,
    AutoModelForSequenceClassification: LineartimeForSequenceClassification,
    AutoModelForTokenClassification: LineartimeForTokenClassification,
}
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
"""Arguments of a `Trainer` that writes and shows nothing by itself."""
TEXTS = [f"the square of {i} is {i * i}" for i in range(24)]


def batch() -> tuple[Tensor, Tensor]:
    """Ids and mask of a long and a short text, the short one padded on the right."""
    ids = torch.randint(40, (2, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids, mask


@every_pair(auto=list(AUTO), task=["clm", "mlm"], system=["flash", "transformer++"])
def test_a_head_is_put_on_a_trained_model_and_saved_with_it(
    auto: Any, task: str, system: str, tiny: Tiny, awake: Awake, tmp_path: Path
) -> None:
    language = LineartimeForMaskedLM if task == "mlm" else LineartimeForCausalLM
    trained = awake(language(tiny(system, task)))
    trained.save_pretrained(tmp_path / "trained")
    model = auto.from_pretrained(tmp_path / "trained")
    assert type(model) is AUTO[auto]
    torch.testing.assert_close(model.model.state_dict(), trained.model.state_dict())
    assert 0 < getattr(model, model.head).weight.std() < 0.05
    model.save_pretrained(tmp_path / "tuned")
    loaded = auto.from_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_sequence_has_the_label_of_its_real_tokens(task: str, tiny: Tiny, awake: Awake) -> None:
    config = tiny(task=task)
    config.num_labels = 3
    model = awake(LineartimeForSequenceClassification(config))
    ids, mask = batch()
    output = model(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    alone = torch.cat([model(ids[:1]).logits, model(ids[1:, :6]).logits])
    torch.testing.assert_close(output.logits, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([2, 0])))
    left = model(ids[1:, :6].repeat(1, 2), attention_mask=torch.tensor([[0] * 6 + [1] * 6])).logits
    torch.testing.assert_close(left, alone[1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_row_that_has_no_single_label_is_refused(task: str, tiny: Tiny) -> None:
    model = LineartimeForSequenceClassification(tiny(task=task))
    row, several = (
        torch.zeros(1, 7, dtype=torch.long),
        "input_ids is a row of 2 documents, but a row has one label",
    )
    for packed in (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 7])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]])},
    ):
        with pytest.raises(ArgumentError, match=several):
            model(row, **packed)
    assert torch.equal(model(row, position_ids=torch.arange(7)[None]).logits, model(row).logits)
    for length, mask, name in ((0, None, "input_ids"), (7, torch.tensor([[1] * 7, [0] * 7]), "attention_mask")):
        with pytest.raises(ArgumentError, match=f"{name} has a row without tokens, but a label needs at least one"):
            model(torch.zeros(2, length, dtype=torch.long), attention_mask=mask)
    for name in ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q"):
        with pytest.raises(ArgumentError, match=f"{name} is a list, but must be a tensor: convert it"):
            model(row, **{name: [[1] * 7]})


def test_a_number_can_be_learned_instead_of_a_label(tiny: Tiny, awake: Awake) -> None:
    config = tiny(task="mlm")
    config.num_labels = 1
    model = awake(LineartimeForSequenceClassification(config))
    ids, mask = batch()
    output = model(ids, attention_mask=mask, labels=torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(output.loss, F.mse_loss(output.logits[:, 0], torch.tensor([0.5, 2.0])))


def test_labels_of_padding_do_not_count(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForTokenClassification(tiny(task="mlm")))
    ids, mask = batch()
    labels = (ids % 2).masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[labels >= 0], labels[labels >= 0]))


def test_an_answer_has_a_beginning_and_an_end(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForQuestionAnswering(tiny(task="mlm")))
    ids, mask = batch()
    start, end = torch.tensor([3, 1]), torch.tensor([5, 2])
    output = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    found = [(output.start_logits, start), (output.end_logits, end)]
    losses = [F.cross_entropy(logits[i, :n], place[i]) for logits, place in found for i, n in ((0, 14), (1, 6))]
    torch.testing.assert_close(output.loss, torch.stack(losses).mean())


def test_one_of_several_texts_is_chosen(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForMultipleChoice(tiny(task="mlm")))
    ids, mask = (x[:, None].repeat(1, 3, 1) for x in batch())
    ids[:, 1] += 1
    output = model(ids % 40, attention_mask=mask, labels=torch.tensor([0, 2]))
    assert output.logits.shape == (2, 3)
    torch.testing.assert_close(output.logits[:, 0], output.logits[:, 2])
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([0, 2])))
    typed = awake(LineartimeForMultipleChoice(tiny(task="mlm", token_types=2)))
    types = (ids > 10).long()
    alone = typed.run_backbone(ids[0] % 40, mask[0], token_type_ids=types[0]).last_hidden_state
    together = typed(ids % 40, attention_mask=mask, token_type_ids=types)
    torch.testing.assert_close(together.logits[0], typed.score(typed.pooled(alone, mask[0]))[:, 0])
    with pytest.raises(ValueError, match=r"input_ids must be \[B, C, T\]"):
        model(ids[0])


def examples() -> list[dict[str, list[int]]]:
    return [{"input_ids": fast_tokenizer(ByteTokenizer())(text)["input_ids"]} for text in TEXTS]


@pytest.mark.parametrize("kind", ["causal", "masked", "packed", "checkpointed"])
def test_a_trainer_teaches_a_model(kind: str, tiny: Tiny, checkpointing: str, tmp_path: Path) -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    masked = kind == "masked"
    config = tiny(task="mlm" if masked else "clm", vocab_size=258, d_model=32)
    model = (LineartimeForMaskedLM if masked else LineartimeForCausalLM)(config)
    collator = DataCollatorWithFlattening() if kind == "packed" else DataCollatorForLanguageModeling(tokenizer, mlm=masked)
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=30,
        per_device_train_batch_size=6,
        learning_rate=1e-2,
        **{checkpointing: kind == "checkpointed"},
        gradient_accumulation_steps=2 if kind == "checkpointed" else 1,
        logging_steps=10,
        **QUIET,
    )
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=examples(), processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] < 6
    assert losses[-1] < losses[0] - 0.4
    trainer.save_model()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "run").iterdir()}


PROBLEMS = ("regression", "multi_label_classification", "single_label_classification")
LANGUAGE = ("clm", "prefix-lm", "mlm")


def _learner(kind: str, tiny: Tiny) -> tuple[Any, list[dict[str, Any]]]:
    """A model for a task, and seven examples of different lengths."""
    config = tiny(task=kind if kind in LANGUAGE else "mlm")
    config.num_labels, draw = (1 if kind == "regression" else 3), torch.Generator().manual_seed(1)
    shapes = [(3, n) if kind == "choices" else (n,) for n in (6, 12, 5, 9, 4, 2, 7)]
    ids = [torch.randint(40, shape, generator=draw) for shape in shapes]
    rows = [{"input_ids": x} for x in ids]
    if kind == "answers":  # some of them are outside of the text
        places = [(x[0] % 4, x[1] % 4) for x in ids]
        given = [{"start_positions": torch.where(s < 2, s, 99), "end_positions": torch.where(e < 2, e, 99)} for s, e in places]
        return LineartimeForQuestionAnswering(config), [{**x, **places} for x, places in zip(rows, given, strict=True)]
    if kind in LANGUAGE:
        labels = [x.masked_fill(x < (20 if kind == "mlm" else 0), -100) for x in ids]
        rows = [{**x, "prefix_lengths": torch.tensor(len(x["input_ids"]) // 2)} for x in rows] if kind == "prefix-lm" else rows
        model: Any = (LineartimeForMaskedLM if kind == "mlm" else LineartimeForCausalLM)(config)
    elif kind == "tokens":
        labels = [(x % 3).masked_fill(x > 20, -100) for x in ids]
        model = LineartimeForTokenClassification(config)
    elif kind == "choices":
        labels, model = [x[0, 0] % 3 for x in ids], LineartimeForMultipleChoice(config)
    else:
        config.problem_type = kind
        numbers = [((x[:1] - torch.arange(config.num_labels)) % 2).float() for x in ids]
        labels = [x[0] % 3 for x in ids] if kind == "single_label_classification" else numbers
        labels[1] = -100 * labels[1] if kind == "regression" else labels[1]
        model = LineartimeForSequenceClassification(config)
    return model, [{**x, "labels": label} for x, label in zip(rows, labels, strict=True)]


def _padded(rows: list[dict[str, Tensor]], side: str) -> dict[str, Tensor]:
    """A batch with its mask, padded to the longest row; positions of answers are those in the padded rows."""
    longest = max(row["input_ids"].shape[-1] for row in rows)
    batch: dict[str, list[Tensor]] = {}
    for row in rows:
        tokens = row["input_ids"]
        empty = longest - tokens.shape[-1]
        padding = (empty, 0) if side == "left" else (0, empty)
        for name, value in {**row, "attention_mask": torch.ones_like(tokens)}.items():
            if name.endswith("positions"):
                value = value + padding[0]
            elif value.shape == tokens.shape:
                value = F.pad(value, padding, value=-100 if name == "labels" else 0)
            batch.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in batch.items()}


@pytest.mark.parametrize(
    ("kind", "side"),
    list(zip([*PROBLEMS, *LANGUAGE, "tokens", "answers", "choices"], cycle(["left", "right"]), strict=False)),
)
def test_accumulated_batches_have_the_gradient_of_one_batch(kind: str, side: str, tiny: Tiny, tmp_path: Path) -> None:
    losses, norms = [], []
    for size, steps in ((7, 1), (2, 4)):  # the last of four has one row
        torch.manual_seed(0)
        model, data = _learner(kind, tiny)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=size,
            per_device_eval_batch_size=7,
            gradient_accumulation_steps=steps,
            learning_rate=0.0,
            max_grad_norm=1e9,
            logging_steps=1,
            remove_unused_columns=False,
            label_names=["start_positions", "end_positions"] if kind == "answers" else None,
            **QUIET,
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=lambda x: _padded(x, side))
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        losses += [logged["loss"], trainer.evaluate()["eval_loss"]]
        norms.append(logged["grad_norm"])
    model.zero_grad()
    loss = model(**_padded(data, side)).loss
    loss.backward()
    norms.append(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item())
    assert losses == pytest.approx([loss.item()] * 4, rel=1e-4)
    assert norms == pytest.approx(norms[-1:] * 3, rel=1e-4)


def test_a_trainer_with_batches_of_its_own_counts_as_it_does(tiny: Tiny, tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]  # transformers has no types here
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            ids = torch.stack([row["input_ids"] for row in inputs])
            return model(ids, labels=ids).loss

    data = [{"input_ids": torch.arange(1, 9)}] * 4
    arguments = TrainingArguments(str(tmp_path), max_steps=1, remove_unused_columns=False, **QUIET)
    Own(LineartimeForCausalLM(tiny()), arguments, train_dataset=data, data_collator=lambda rows: rows).train()


@pytest.mark.parametrize("task", ["clm", "prefix-lm"])
def test_a_token_after_padding_is_not_predicted(task: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(task=task)))
    prefix = {"prefix_lengths": torch.tensor([1])} if task == "prefix-lm" else {}
    ids = torch.tensor([[3, 4, 5, 6]])
    logits = model(ids, **prefix).logits[0].log_softmax(-1)
    losses = [-logits[0, 4], -logits[1, 5], -logits[2, 6]]
    for places, predicted in (([0, 1, 2, 3], [0, 1, 2]), ([3, 4, 5, 6], [0, 1, 2]), ([0, 1, 4, 5], [0, 2])):
        row, mask = torch.zeros(1, 7, dtype=torch.long), torch.zeros(1, 7, dtype=torch.long)
        row[:, places], mask[:, places] = ids, 1
        labels = row.masked_fill(mask == 0, -100)
        found = model(row, attention_mask=mask, labels=labels, **prefix).loss
        torch.testing.assert_close(found, torch.stack([losses[i] for i in predicted]).mean(), atol=1e-5, rtol=0)


def test_a_collator_of_packed_rows_keeps_the_label_at_which_an_answer_ends() -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    chats = [{"input_ids": tokenizer.apply_chat_template(turns)["input_ids"]}] * 2
    assert (DataCollatorWithFlattening()(chats)["labels"] == tokenizer.eos_token_id).sum() == 2
    assert not (DataCollatorForLanguageModeling(tokenizer, mlm=False)(chats)["labels"] == tokenizer.eos_token_id).any()


def test_a_packed_batch_has_the_loss_of_its_documents(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(vocab_size=258)))
    documents = examples()[:4]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents)
    losses, counts = [], []
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        losses.append(model(ids, labels=ids).loss * (ids.shape[1] - 1))
        counts.append(ids.shape[1] - 1)
    torch.testing.assert_close(model(**packed).loss, sum(losses) / sum(counts))


def test_texts_are_continued_by_a_pipeline(tiny: Tiny, awake: Awake) -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    model = awake(LineartimeForCausalLM(tiny(vocab_size=258, n_blocks=1)))
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["the square", "a"]
    together = write(texts, max_new_tokens=6, do_sample=False, batch_size=2)
    alone = [write(text, max_new_tokens=6, do_sample=False) for text in texts]
    assert together == alone
    assert together[0][0]["generated_text"].startswith("the square")


def test_masks_are_filled_by_a_pipeline(tiny: Tiny, awake: Awake) -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    model = awake(LineartimeForMaskedLM(tiny(task="mlm", vocab_size=258)))
    found = pipeline("fill-mask", model=model, tokenizer=tokenizer)("the squ[MASK]re", top_k=3)
    ids = tokenizer("the squ[MASK]re", return_tensors="pt").input_ids
    best = model(ids).logits[0, 7].softmax(-1).topk(3)
    assert [candidate["token"] for candidate in found] == best.indices.tolist()
    assert [candidate["score"] for candidate in found] == pytest.approx(best.values.tolist())


def test_texts_are_classified_by_a_pipeline(tiny: Tiny, awake: Awake) -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    model = awake(LineartimeForSequenceClassification(tiny(task="mlm", vocab_size=258)))
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    together, alone = classify(TEXTS[:3], batch_size=3), [classify(text)[0] for text in TEXTS[:3]]
    assert [found["label"] for found in together] == [found["label"] for found in alone]
    assert [found["score"] for found in together] == pytest.approx([found["score"] for found in alone])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    ("system", "targets"),
    [("flash", ["to_gate_value_base", "to_output"]), ("transformer++", ["to_qkv", "to_output"])],
)
def test_an_adapter_of_peft_learns_on_the_projections(
    system: str, targets: list[str], tiny: Tiny, awake: Awake, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = awake(LineartimeForCausalLM(tiny(system)))
    ids, _ = batch()
    before = model(ids).logits
    names = dict(model.named_modules())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    maps = [name for name in names if name.rpartition(".")[2] in targets]
    assert len(learned) == 2 * len(maps) >= 8
    torch.testing.assert_close(adapted(ids).logits, before)
    optimizer = torch.optim.SGD(learned, lr=1.0)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    after = adapted(ids).logits
    continued = adapted.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, after, atol=1e-5, rtol=1e-4)
    assert merged.generate(ids, max_new_tokens=4, do_sample=False).tolist() == continued.tolist()


def test_a_compiled_model_trains(causal: LineartimeForCausalLM) -> None:
    ids, mask = batch()
    compiled = torch.compile(causal, backend="eager")
    expected = torch.autograd.grad(causal(ids, attention_mask=mask, labels=ids).loss, list(causal.parameters()))
    found = torch.autograd.grad(compiled(ids, attention_mask=mask, labels=ids).loss, list(causal.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_model_on_several_devices_is_refused(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    causal.save_pretrained(tmp_path / "model")
    places = {"model.backbone.blocks.1": "disk", "": "cpu"}
    with pytest.raises(ValueError, match="device_map puts parts of the model on cpu and disk, but it must be on one device"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "offload"))
