"""What the tests that all models of transformers share ask of a model, as far as other files here do not.

Those tests are not part of the installed package. Left out, because they do not apply: attention outputs and implementations
(no matrix of attention is formed), static and quantised caches (the cache is of a kind of its own), models on several devices
(refused).
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from lineartime.hf import (
    LineartimeConfig,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForMultipleChoice,
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
    LineartimeModel,
)

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

ALL = [
    LineartimeModel,
    LineartimeForCausalLM,
    LineartimeForMaskedLM,
    LineartimeForMultipleChoice,
    LineartimeForQuestionAnswering,
    LineartimeForSequenceClassification,
    LineartimeForTokenClassification,
]
KINDS = ["flash", "flash-quad", "transformer", "performer"]
every_class = pytest.mark.parametrize("kind", ALL)
every_system = pytest.mark.parametrize("system", KINDS)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(2))


def inputs_of(kind: Any, labels: bool = False) -> dict[str, Tensor]:
    """A batch for a class, with a target if that is asked for."""
    ids = ids_of(2, 3, 9) if kind is LineartimeForMultipleChoice else ids_of(2, 9)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not labels:
        return inputs
    if kind is LineartimeForQuestionAnswering:
        return {**inputs, "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])}
    per_token = kind in (LineartimeForCausalLM, LineartimeForMaskedLM)
    target = ids if per_token else ids % 2 if kind is LineartimeForTokenClassification else torch.tensor([1, 0])
    return {**inputs, "labels": target}


def task_of(kind: Any) -> str:
    return "clm" if kind is LineartimeForCausalLM else "mlm"


@every_class
def test_outputs_are_the_same_each_time_as_a_tuple_and_after_loading(
    kind: Any, tiny: Tiny, awake: Awake, tmp_path: Path
) -> None:
    model = awake(kind(tiny(task=task_of(kind))))
    inputs = inputs_of(kind)
    first, again, values = model(**inputs), model(**inputs), model(**inputs, return_dict=False)
    assert len(first.to_tuple()) == len(values)
    model.save_pretrained(tmp_path)
    loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for a, b, c, d in zip(first.to_tuple(), again.to_tuple(), values, loaded(**inputs).to_tuple(), strict=True):
        for other in (b, c, d):
            torch.testing.assert_close(a, other, atol=0, rtol=0)
    assert next(iter(inspect.signature(kind.forward).parameters.values())).name == "self"
    assert list(inspect.signature(kind.forward).parameters)[1] == model.main_input_name == "input_ids"


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not LineartimeModel])  # which has no loss
def test_every_parameter_learns_with_blocks_computed_again_and_without(
    kind: Any, tiny: Tiny, awake: Awake, checkpointing: str
) -> None:
    model = awake(kind(tiny("flash", task_of(kind)))).train()
    for recompute in (False, True):
        if recompute:
            getattr(model, f"{checkpointing}_enable")()
        model.zero_grad()
        model(**inputs_of(kind, labels=True)).loss.backward()
        still = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert still == []


@every_class
def test_hidden_states_keep_their_gradients_if_asked_to(kind: Any, tiny: Tiny, awake: Awake) -> None:
    model = awake(kind(tiny(task=task_of(kind))))
    output = model(**inputs_of(kind), output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    output.hidden_states[0].retain_grad()
    output[0].sum().backward()
    assert output.hidden_states[0].grad is not None
    model.config.output_hidden_states = True
    assert model(**inputs_of(kind)).hidden_states is not None


@every_class
def test_embeddings_can_be_replaced_and_resized(kind: Any, tiny: Tiny, awake: Awake) -> None:
    model = awake(kind(tiny(task=task_of(kind))))
    new = torch.nn.Embedding(40, 16)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    model.resize_token_embeddings(30)
    assert model.get_input_embeddings().weight.shape == (30, 16)
    assert model.config.vocab_size == 30
    inputs = inputs_of(kind)
    model(**{**inputs, "input_ids": inputs["input_ids"] % 30})


def test_logits_can_have_weights_of_their_own(tiny: Tiny, awake: Awake, tmp_path: Path) -> None:
    config = tiny()
    config.tie_word_embeddings = False
    model = awake(LineartimeForCausalLM(config))
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    model.resize_token_embeddings(44)
    assert model.lm_head.weight.shape == model.get_input_embeddings().weight.shape == (44, 16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = ids_of(1, 9)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_a_head_of_another_size_is_drawn_anew_if_that_is_allowed(tiny: Tiny, tmp_path: Path) -> None:
    LineartimeForSequenceClassification(tiny(task="mlm")).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model(ids_of(2, 5)).logits.shape == (2, 5)


def test_several_labels_at_once_can_be_learned(tiny: Tiny, awake: Awake) -> None:
    config = tiny(task="mlm")
    config.num_labels, config.problem_type = 3, "multi_label_classification"
    model = awake(LineartimeForSequenceClassification(config))
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    output = model(ids_of(2, 9), labels=labels)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, labels)
    torch.testing.assert_close(output.loss, expected)


def test_auto_classes_know_the_configuration(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("transformer")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LineartimeConfig
    assert loaded.to_model_config() == config.to_model_config()
    assert AutoConfig.for_model("lineartime", n_blocks=3).n_blocks == 3
    model = AutoModel.from_config(loaded, dtype=torch.bfloat16)
    assert (type(model), model.dtype) == (LineartimeModel, torch.bfloat16)


@every_system
def test_generation_begins_with_embedded_tokens(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    ids = ids_of(2, 9)
    embedded = model.get_input_embeddings()(ids)
    expected = model.generate(ids, max_new_tokens=7, do_sample=False)[:, 9:]
    found = model.generate(inputs_embeds=embedded, max_new_tokens=7, do_sample=False)
    assert found.tolist() == expected.tolist()


@every_system
def test_generation_returns_what_it_is_asked_for(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    ids = ids_of(2, 9)
    options = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True}
    output = model.generate(ids, max_new_tokens=5, do_sample=False, **options)
    assert [len(output.scores), len(output.logits), len(output.hidden_states)] == [5, 5, 5]
    assert [hidden[-1].shape[1] for hidden in output.hidden_states] == [9, 1, 1, 1, 1]
    whole = model(output.sequences, output_hidden_states=True)
    for step, logits in enumerate(output.logits):
        torch.testing.assert_close(logits, whole.logits[:, 8 + step], atol=1e-5, rtol=1e-4)
    for layer, hidden in enumerate(whole.hidden_states):
        pieces = torch.cat([step[layer] for step in output.hidden_states], 1)
        torch.testing.assert_close(pieces, hidden[:, :-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("system", "mode"),
    [
        ("flash", {"num_beams": 3, "do_sample": True, "top_k": 8}),
        ("flash", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
        ("flash-quad", {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True}),
        ("transformer", {"min_new_tokens": 4, "eos_token_id": list(range(20)), "pad_token_id": 0}),
        ("performer", {"num_beams": 3, "do_sample": True, "top_k": 8}),
    ],
)
def test_modes_of_generation_run_alike_with_a_cache_and_without(
    system: str, mode: dict[str, Any], tiny: Tiny, awake: Awake
) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(model.generate(ids_of(2, 7), max_new_tokens=9, use_cache=use_cache, **mode))
    assert texts[0].tolist() == texts[1].tolist()
