"""Training by `Trainer`, and adapters of PEFT."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.hf.tiny import GREEDY, awake, causal_model, close, ids_of, tiny
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainingArguments

from lineartime import hf

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it

QUIET: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
QUIET["dataloader_pin_memory"] = False
"""Arguments of a `Trainer` that writes and shows nothing by itself."""


PROBLEMS = ("regression", "multi_label_classification", "single_label_classification")
LANGUAGE = ("clm", "prefix-lm", "mlm")


def _learner(kind: str) -> tuple[Any, list[dict[str, Any]]]:
    """A model for a task, and seven examples of different lengths."""
    config = tiny(task=kind if kind in LANGUAGE else "mlm")
    config.num_labels, draw = (1 if kind == "regression" else 3), torch.Generator().manual_seed(1)
    ids = [torch.randint(40, (n,), generator=draw) for n in (6, 12, 5, 9, 4, 2, 7)]
    rows = [{"input_ids": x} for x in ids]
    if kind == "answers":  # some of them are outside of the text
        places = [(x[0] % 4, x[1] % 4) for x in ids]
        given = [{"start_positions": torch.where(s < 2, s, 99), "end_positions": torch.where(e < 2, e, 99)} for s, e in places]
        return hf.LineartimeForQuestionAnswering(config), [{**x, **places} for x, places in zip(rows, given, strict=True)]
    if kind in LANGUAGE:
        labels = [x.masked_fill(x < (20 if kind == "mlm" else 0), -100) for x in ids]
        rows = [{**x, "prefix_lengths": torch.tensor(len(x["input_ids"]) // 2)} for x in rows] if kind == "prefix-lm" else rows
        model: Any = (hf.LineartimeForMaskedLM if kind == "mlm" else hf.LineartimeForCausalLM)(config)
    elif kind == "tokens":
        labels = [(x % 3).masked_fill(x > 20, -100) for x in ids]
        model = hf.LineartimeForTokenClassification(config)
    else:
        config.problem_type = kind
        numbers = [((x[:1] - torch.arange(config.num_labels)) % 2).float() for x in ids]
        labels = [x[0] % 3 for x in ids] if kind == "single_label_classification" else numbers
        labels[1] = -100 * labels[1] if kind == "regression" else labels[1]
        model = hf.LineartimeForSequenceClassification(config)
    return model, [{**x, "labels": label} for x, label in zip(rows, labels, strict=True)]


def _padded(rows: list[dict[str, Tensor]], side: str) -> dict[str, Tensor]:
    """A batch with its mask, padded to the longest row."""
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    batch = {}
    for name, first in rows[0].items():
        values, fill = [row[name] for row in rows], -100 if name == "labels" else 0
        of_tokens = first.shape == rows[0]["input_ids"].shape
        batch[name] = pad_sequence(values, True, fill, side) if of_tokens else torch.stack(values)
    return batch


RIGHT = ("multi_label_classification", "mlm", "answers")


@pytest.mark.parametrize("kind", ["single_label_classification", "clm", "mlm", "tokens", "answers"])
def test_gradients_are_the_same_with_blocks_computed_again(kind: str) -> None:
    names = ("activation_checkpointing", "gradient_checkpointing")  # its name since transformers 5.23, and before
    checkpointing = next(name for name in names if hasattr(PreTrainedModel, f"{name}_enable"))
    (model, rows), calls = _learner(kind), []
    inputs = _padded(rows, "right")
    for block in awake(model).train().model.backbone.blocks:
        block.mixer.norm.register_forward_hook(lambda *_: calls.append(1))
    parameters = list(model.parameters())  # each has a gradient, or autograd raises an error
    before = torch.autograd.grad(model(**inputs).loss, parameters)
    assert len(calls) == 2
    getattr(model, f"{checkpointing}_enable")()
    assert getattr(model, f"is_{checkpointing}")
    after = torch.autograd.grad(model(**inputs).loss, parameters)
    assert len(calls) == 6  # forward, and again for the backward pass
    torch.testing.assert_close(after, before)
    getattr(model, f"{checkpointing}_disable")()
    assert not getattr(model, f"is_{checkpointing}")


@pytest.mark.parametrize("kind", [*PROBLEMS, *LANGUAGE, "tokens", "answers"])
def test_accumulated_batches_have_the_gradient_of_one_batch(kind: str, tmp_path: Path) -> None:
    losses, norms, side = [], [], "right" if kind in RIGHT else "left"
    for size, steps in ((7, 1), (2, 4)):  # the last of four has one row
        torch.manual_seed(0)
        model, data = _learner(kind)
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


def test_a_trainer_with_batches_of_its_own_counts_as_it_does(tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]  # transformers has no types here
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            ids = torch.stack([row["input_ids"] for row in inputs])
            return model(ids, labels=ids).loss

    data = [{"input_ids": torch.arange(1, 9)}] * 4
    arguments = TrainingArguments(str(tmp_path), max_steps=1, remove_unused_columns=False, **QUIET)
    Own(hf.LineartimeForCausalLM(tiny()), arguments, train_dataset=data, data_collator=lambda rows: rows).train()


def test_label_smoothing_does_not_teach_a_causal_model_to_copy_its_input(
    causal: hf.LineartimeForCausalLM, tmp_path: Path
) -> None:
    arguments, ids = TrainingArguments(str(tmp_path), label_smoothing_factor=1e-6, **QUIET), ids_of(2, 9)
    loss = Trainer(causal, arguments).compute_loss(causal, {"input_ids": ids, "labels": ids.clone()})
    torch.testing.assert_close(loss, causal(ids, labels=ids).loss, atol=1e-4, rtol=1e-4)
    assert type(AutoModelForCausalLM.from_config(causal.config)) is hf.LineartimeForCausalLM


def test_a_packed_batch_has_the_loss_of_its_documents(tmp_path: Path) -> None:
    model, texts = causal_model(vocab_size=258), [f"the square of {10**i} is {100**i}" for i in range(4)]
    documents = [{"input_ids": list(text.encode())} for text in texts]
    pack = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    losses, counts = [], []
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        losses.append(model(ids, labels=ids).loss * (ids.shape[1] - 1))
        counts.append(ids.shape[1] - 1)
    expected: Any = sum(losses) / sum(counts)
    torch.testing.assert_close(model(**pack(documents)).loss, expected)
    steps: dict[str, Any] = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 4}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **steps, **QUIET), data_collator=pack, train_dataset=documents)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert model(**pack(documents)).loss < expected


# Adapters of PEFT ------------------------------------------------------------------------------------------------------


def test_an_adapter_of_peft_learns_on_the_projections(causal: hf.LineartimeForCausalLM) -> None:
    ids, targets = ids_of(2, 14), ["to_gate_value_base", "to_output"]
    before = causal(ids).logits
    maps = [name for name, _ in causal.named_modules() if name.rpartition(".")[2] in targets]
    adapted = peft.get_peft_model(causal, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(learned) == 2 * len(maps) == 8
    torch.testing.assert_close(adapted(ids).logits, before)
    optimizer, losses = torch.optim.SGD(learned, lr=1.0), []
    for _ in range(3):
        loss = adapted(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    after, continued = adapted(ids).logits, adapted.generate(input_ids=ids, **GREEDY)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, after, atol=1e-5, rtol=1e-4)
    assert merged.generate(ids, **GREEDY).tolist() == continued.tolist()


@pytest.mark.filterwarnings("ignore:Model has .tie_word:UserWarning")
@pytest.mark.parametrize("settings", [{"trainable_token_indices": [3]}, {"target_modules": ["embedding", "to_output"]}])
def test_adapter_on_the_embedding_begins_with_the_same_text(settings: dict[str, Any], causal: hf.LineartimeForCausalLM) -> None:
    ids = ids_of(1, 5)
    before, text = causal(ids).logits, causal.generate(ids, **GREEDY)
    options = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["to_output"], **settings}
    adapted = peft.get_peft_model(causal, peft.LoraConfig(**options)).eval()
    torch.testing.assert_close(adapted(ids).logits, before)
    assert adapted.generate(input_ids=ids, **GREEDY).tolist() == text.tolist()


def test_a_learned_prompt_is_read_once(causal: hf.LineartimeForCausalLM) -> None:
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_attention_heads=1)
    tuned, ids = peft.get_peft_model(causal, settings).eval(), ids_of(1, 5)
    found = tuned.generate(input_ids=ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    expected = tuned(input_ids=found.sequences[:, :-1]).logits[0, -4:]
    close(torch.cat(found.logits), expected)


def test_an_adapter_for_questions_trains_and_saves_the_head(tmp_path: Path) -> None:
    model = awake(hf.LineartimeForQuestionAnswering(tiny(task="mlm")))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["to_output"], task_type="QUESTION_ANS"))
    assert sum("qa_outputs" in name and weight.requires_grad for name, weight in adapted.named_parameters()) == 2
    adapted.save_pretrained(tmp_path)
    assert any("qa_outputs" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
