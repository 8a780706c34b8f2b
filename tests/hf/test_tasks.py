"""Models for fine-tuning, and pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.tiny import awake, causal_model, close, ids_of, masked_model, tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.hf import (
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
    fast_tokenizer,
)


def batch() -> tuple[Tensor, Tensor]:
    """Ids and mask of a long and a short text, the short one padded on the right."""
    ids = ids_of(2, 14)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids, mask


@pytest.mark.parametrize(
    ("auto", "kind", "trained"),
    [
        (AutoModelForQuestionAnswering, LineartimeForQuestionAnswering, masked_model),
        (AutoModelForSequenceClassification, LineartimeForSequenceClassification, causal_model),
        (AutoModelForTokenClassification, LineartimeForTokenClassification, masked_model),
    ],
)
def test_a_head_is_put_on_a_trained_model_and_saved_with_it(auto: Any, kind: Any, trained: Any, tmp_path: Path) -> None:
    language = trained()
    language.save_pretrained(tmp_path / "trained")
    model = auto.from_pretrained(tmp_path / "trained")
    assert type(model) is kind
    torch.testing.assert_close(model.model.state_dict(), language.model.state_dict())
    assert 0 < getattr(model, model.head).weight.std() < 0.05
    model.save_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(auto.from_pretrained(tmp_path / "tuned").state_dict(), model.state_dict())
    if kind is LineartimeForSequenceClassification:  # a head of another size is drawn anew, if that is allowed
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            auto.from_pretrained(tmp_path / "tuned", num_labels=5)
        other = auto.from_pretrained(tmp_path / "tuned", num_labels=5, ignore_mismatched_sizes=True)
        assert other(ids_of(2, 5)).logits.shape == (2, 5)


def classifier(task: str = "mlm", **fields: Any) -> LineartimeForSequenceClassification:
    config = tiny(task=task)
    for name, value in fields.items():
        setattr(config, name, value)
    return awake(LineartimeForSequenceClassification(config))


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_sequence_has_the_label_of_its_real_tokens(task: str) -> None:
    model, (ids, mask) = classifier(task, num_labels=3), batch()
    output = model(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    alone = torch.cat([model(ids[:1]).logits, model(ids[1:, :6]).logits])
    close(output.logits, alone)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([2, 0])))
    left = model(ids[1:, :6].repeat(1, 2), attention_mask=torch.tensor([[0] * 6 + [1] * 6])).logits
    close(left, alone[1:])


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_row_that_has_no_single_label_is_refused(task: str) -> None:
    model, row = classifier(task), torch.zeros(1, 7, dtype=torch.long)
    for packed in (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 7])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]])},
    ):
        with pytest.raises(ArgumentError, match="input_ids is a row of 2 documents, but a row has one label"):
            model(row, **packed)
    assert torch.equal(model(row, position_ids=torch.arange(7)[None]).logits, model(row).logits)
    for length, mask, name in ((0, None, "input_ids"), (7, torch.tensor([[1] * 7, [0] * 7]), "attention_mask")):
        with pytest.raises(ArgumentError, match=f"{name} has a row without tokens, but a label needs at least one"):
            model(torch.zeros(2, length, dtype=torch.long), attention_mask=mask)


@pytest.mark.parametrize("kind", [LineartimeForSequenceClassification, LineartimeForTokenClassification])
def test_bf16_does_not_round_the_mean_of_numbers_away(kind: Any) -> None:
    model, ids = awake(kind(tiny(task="mlm"))), ids_of(2, 14)
    with torch.no_grad():
        model.score.bias += 10_007.0
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(ids).logits, exact, rtol=0, atol=0.2)


def test_labels_of_padding_do_not_count() -> None:
    model, (ids, mask) = awake(LineartimeForTokenClassification(tiny(task="mlm"))), batch()
    labels = (ids % 2).masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[labels >= 0], labels[labels >= 0]))


def test_an_answer_has_a_beginning_and_an_end() -> None:
    model, (ids, mask) = awake(LineartimeForQuestionAnswering(tiny(task="mlm"))), batch()
    start, end = torch.tensor([3, 1]), torch.tensor([5, 2])
    output = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    found = [(output.start_logits, start), (output.end_logits, end)]
    losses = [F.cross_entropy(logits[i, :n], place[i]) for logits, place in found for i, n in ((0, 14), (1, 6))]
    torch.testing.assert_close(output.loss, torch.stack(losses).mean())


def test_pipelines_continue_fill_and_classify_texts() -> None:
    tokenizer = fast_tokenizer(ByteTokenizer())
    sizes: dict[str, Any] = {"vocab_size": 258, "n_blocks": 1}
    write = pipeline("text-generation", model=causal_model(**sizes), tokenizer=tokenizer)
    prompts, options = ["the square", "a"], {"max_new_tokens": 6, "do_sample": False}
    together = write(prompts, batch_size=2, **options)
    assert together == [write(text, **options) for text in prompts]
    assert together[0][0]["generated_text"].startswith("the square")

    masked = masked_model(**sizes)
    found = pipeline("fill-mask", model=masked, tokenizer=tokenizer)("the squ[MASK]re", top_k=3)
    best = masked(tokenizer("the squ[MASK]re", return_tensors="pt").input_ids).logits[0, 7].softmax(-1).topk(3)
    assert [candidate["token"] for candidate in found] == best.indices.tolist()
    assert [candidate["score"] for candidate in found] == pytest.approx(best.values.tolist())

    labelling = awake(LineartimeForSequenceClassification(tiny(task="mlm", **sizes)))
    classify = pipeline("text-classification", model=labelling, tokenizer=tokenizer)
    for found, text in zip(classify(prompts, batch_size=2), prompts, strict=True):
        score, best = labelling(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).max(-1)
        assert found == {"label": f"LABEL_{int(best)}", "score": pytest.approx(score.item())}
