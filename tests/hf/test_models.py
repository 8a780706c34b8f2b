"""Every system as a model of transformers: outputs, padding, packing, losses, saving.

It holds what the tests that all models of transformers share ask of a model, for those are not part of the installed package.
Left out, because they do not apply: attention outputs and implementations (no matrix of attention is formed), static and
quantised caches (the cache is of a kind of its own), models on several devices (refused).
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.definitions import assert_drawn_alike
from tests.hf.tiny import KINDS, awake, causal_model, close, ids_of, masked_model, own, tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, pipeline

import lineartime
from lineartime import hf
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.hf.cache import CACHE
from lineartime.models.systems import SYSTEMS

every_kind = pytest.mark.parametrize("system", KINDS)


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_a_model_gives_the_logits_of_lineartime_and_is_loaded(system: str, tmp_path: Path) -> None:
    only_causal = SYSTEMS[system].mixer.why_only_causal is not None
    model, ids = causal_model(system) if only_causal else masked_model(system), ids_of(2, 19)
    logits = model(ids).logits
    torch.testing.assert_close(logits, own(model)(ids), atol=0, rtol=0)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = (AutoModelForCausalLM if only_causal else AutoModelForMaskedLM).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded(ids).logits, logits, atol=0, rtol=0)
    assert loaded.lm_head.weight is loaded.model.backbone.embedding.weight


def model_of(kind: Any, task: str = "mlm") -> Any:
    return awake(kind(tiny(task="clm" if kind is hf.LineartimeForCausalLM else task)))


@pytest.mark.parametrize("kind", hf.MODELS.values())
def test_outputs_are_the_same_each_time_as_a_tuple_and_after_loading(kind: Any, tmp_path: Path) -> None:
    model, ids = model_of(kind), ids_of(2, 9)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    first, again, values = model(**inputs), model(**inputs), model(**inputs, return_dict=False)
    assert len(first.to_tuple()) == len(values)
    model.save_pretrained(tmp_path)
    loaded, report = kind.from_pretrained(pretrained_model_name_or_path=tmp_path, output_loading_info=True)
    assert not any(report.values())
    for a, b, c, d in zip(first.to_tuple(), again.to_tuple(), values, loaded(**inputs).to_tuple(), strict=True):
        for other in (b, c, d):
            torch.testing.assert_close(a, other, atol=0, rtol=0)
    assert list(inspect.signature(kind.forward).parameters)[:2] == ["self", model.main_input_name]


@every_kind
@torch.no_grad()
def test_rows_of_a_batch_have_the_logits_of_each_alone(system: str) -> None:
    """Padded on the left with a mask, or on the right with one or without, as lm-eval does it."""
    model = causal_model(system)
    texts = [ids_of(1, length)[0] for length in (21, 10, 1)]
    alone = [model(text[None]).logits[0] for text in texts]
    for side in ("left", "right"):
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=7, padding_side=side)
        real = [torch.ones_like(text) for text in texts]
        mask = torch.nn.utils.rnn.pad_sequence(real, batch_first=True, padding_side=side)
        calls = [{"attention_mask": mask, "use_cache": cached} for cached in (False, True)]
        for options in [*calls, {}] if side == "right" else calls:
            for row, own_mask, expected in zip(model(ids, **options).logits, mask, alone, strict=True):
                close(row[own_mask == 1], expected)


@every_kind
def test_packed_documents_do_not_read_each_other(system: str) -> None:
    model = awake(hf.LineartimeModel(tiny(system, "mlm")))
    documents = [ids_of(1, length) for length in (9, 1, 14)]
    packed = torch.cat(documents, 1)
    alone = torch.cat([model(document).last_hidden_state for document in documents], 1)
    for pack in (
        {"position_ids": torch.cat([torch.arange(document.shape[1]) for document in documents])[None]},
        {"cu_seq_lens_q": torch.tensor([0, 9, 10, 24], dtype=torch.int32)},
        {"seq_idx": torch.tensor([[0] * 9 + [1] + [2] * 14])},
    ):
        close(model(packed, **pack).last_hidden_state, alone)


def test_hidden_states_are_what_each_block_reads_and_the_last_ones(causal: hf.LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    whole = causal(ids, output_hidden_states=True)
    assert len(whole.hidden_states) == causal.config.num_hidden_layers + 1
    torch.testing.assert_close(causal.lm_head(whole.hidden_states[-1]), whole.logits)
    blocks = list(causal.model.backbone.blocks)
    packing = blocks[0].mixer.describe(ids.shape, device=ids.device)
    second = blocks[0](packing.pack(whole.hidden_states[0]), packing)
    torch.testing.assert_close(packing.unpack(second), whole.hidden_states[1])
    whole.hidden_states[0].retain_grad()
    whole.logits.sum().backward()
    assert whole.hidden_states[0].grad is not None
    causal.config.output_hidden_states = True  # as if it were asked for in each call
    assert len(causal(ids).hidden_states) == 3
    prefix, options = causal_model(task="prefix-lm"), {"prefix_lengths": torch.tensor([9, 9]), "output_hidden_states": True}
    for cached, plain in zip(*(prefix(ids, use_cache=use, **options).hidden_states for use in (True, False)), strict=True):
        close(cached, plain)


def test_embedded_tokens_positions_and_the_last_logits_can_be_asked_for(causal: hf.LineartimeForCausalLM) -> None:
    ids, mask = ids_of(2, 6), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    expected = causal(ids, attention_mask=mask).logits
    embedded = causal.get_input_embeddings()(ids)
    torch.testing.assert_close(causal(inputs_embeds=embedded, attention_mask=mask).logits, expected, atol=0, rtol=0)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(causal(ids, attention_mask=mask, position_ids=counted).logits, expected, atol=0, rtol=0)
    torch.testing.assert_close(causal(ids, attention_mask=mask.float(), logits_to_keep=2).logits, expected[:, -2:])


# Losses -----------------------------------------------------------------------------------------------------------------


def test_labels_are_the_tokens_themselves_and_give_the_loss_of_lineartime(causal: hf.LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    labels = ids.clone()
    labels[0, 3] = -100
    ours = own(causal)
    torch.testing.assert_close(causal(ids, labels=labels).loss, ours.loss(ids[:, :-1], labels[:, 1:]))
    summed = causal(ids, labels=labels, num_items_in_batch=torch.tensor(30)).loss
    torch.testing.assert_close(summed, ours.total_loss(ids[:, :-1], labels[:, 1:]) / 30)
    masked, at = masked_model(), torch.where(torch.arange(9) % 3 == 0, ids, -100)
    torch.testing.assert_close(masked(ids, labels=at).loss, own(masked).loss(ids, at))


@pytest.mark.parametrize("given", ["rows", "padded rows", "positions", "boundaries"])
def test_tokens_of_a_prefix_are_no_targets_as_in_training(given: str) -> None:
    model = causal_model(task="prefix-lm")
    ids, prefix = ids_of(2, 9), torch.tensor([4, 0])
    targets = ids[:, 1:].clone()
    targets[0, :3] = -100  # the last token of a prefix predicts the first one after it
    expected = own(model).loss(ids[:, :-1], targets, prefix_lengths=prefix)
    options: dict[str, Tensor] = {}
    labels = ids
    if given == "padded rows":
        ids, options["attention_mask"] = F.pad(ids, (2, 0)), F.pad(torch.ones_like(ids), (2, 0))
        labels = ids.masked_fill(options["attention_mask"] == 0, -100)  # padding predicts no first token
    elif given != "rows":
        ids = ids.view(1, 18)
        labels = ids.masked_fill(torch.arange(18) % 9 == 0, -100)  # nor does the document before
        pack = {"positions": ("position_ids", torch.arange(9).repeat(2)[None]), "boundaries": ("cu_seq_lens_q", [0, 9, 18])}
        options[pack[given][0]] = torch.as_tensor(pack[given][1])
    torch.testing.assert_close(model(ids, labels=labels, prefix_lengths=prefix, **options).loss, expected)


@pytest.mark.parametrize("kind", [hf.LineartimeForCausalLM, hf.LineartimeForMaskedLM, hf.LineartimeForTokenClassification])
def test_labels_are_not_compared_with_other_tokens(kind: Any) -> None:
    model, ids = model_of(kind), ids_of(2, 9)
    with pytest.raises(ValueError, match=r"labels has shape \[9, 2\], but must be \[B, T\] = \[2, 9\]"):
        model(ids, labels=ids.T)
    if kind is hf.LineartimeForCausalLM:
        with pytest.raises(ValueError, match="logits_to_keep leaves out tokens, but labels need the logits of all"):
            model(ids, labels=ids, logits_to_keep=1)
        torch.testing.assert_close(model(ids, labels=ids, logits_to_keep=9).loss, model(ids, labels=ids).loss)


# Weights ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_can_be_added_and_the_logits_follow(tied: bool, tmp_path: Path) -> None:
    model, ids = causal_model(tie_word_embeddings=tied), ids_of(2, 9)
    before = model(ids).logits
    model.resize_token_embeddings(44, mean_resizing=False)
    assert model.config.vocab_size == 44
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    logits = model(ids + 4, labels=ids + 4).logits
    assert logits.shape[-1] == 44
    torch.testing.assert_close(model(ids).logits[..., :40], before)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids + 4).logits, logits)
    new = torch.nn.Embedding(44, 16)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new


def test_a_model_on_several_devices_is_refused(causal: hf.LineartimeForCausalLM, tmp_path: Path) -> None:
    causal.save_pretrained(tmp_path / "model")
    places = {"model.backbone.blocks.1": "disk", "": "cpu"}
    with pytest.raises(ValueError, match="device_map puts parts of the model on cpu and disk, but it must be on one device"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "offload"))


@pytest.mark.parametrize("system", ["flash", "transformer", "bigbird"])
def test_weights_that_a_file_lacks_are_drawn_and_no_others(system: str, tmp_path: Path) -> None:
    model = masked_model(system)
    state = model.state_dict()
    of_block = sorted(name for name in state if name.startswith("model.backbone.blocks.1.mixer."))
    missing = {*of_block[::2], *(name for name in of_block if name.endswith("to_output.weight"))}
    assert any(name.endswith("to_output.weight") for name in missing)
    model.save_pretrained(tmp_path, state_dict={name: tensor for name, tensor in state.items() if name not in missing})
    loaded = hf.LineartimeForMaskedLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in state.items():
        assert torch.isfinite(loaded[name]).all()
        if name not in missing:
            torch.testing.assert_close(loaded[name], tensor, atol=0, rtol=0)
        elif name.endswith("to_output.weight"):
            assert 0.005 < loaded[name].std() < 0.05


def test_a_fresh_model_starts_as_lineartime_starts_it() -> None:
    config = tiny("flash-quad", d_model=64, initial_scores="unit")
    fresh = hf.LineartimeForCausalLM(config).model.backbone.state_dict()
    assert_drawn_alike(fresh, lineartime.build(config.to_model_config()).backbone.state_dict())


@pytest.mark.nightly
def test_the_whole_model_is_compiled_as_one_graph_and_trains_with_padding() -> None:
    model, ids = causal_model(n_blocks=1), ids_of(2, 24)
    mask = F.pad(torch.ones_like(ids[:, 3:]), (0, 3))
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True, backend="eager")(ids).logits, model(ids).logits)
    compiled, parameters = torch.compile(model, backend="eager"), list(model.parameters())
    found = torch.autograd.grad(compiled(ids, attention_mask=mask, labels=ids).loss, parameters)
    expected = torch.autograd.grad(model(ids, attention_mask=mask, labels=ids).loss, parameters)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


# Mistakes ---------------------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_named(causal: hf.LineartimeForCausalLM) -> None:
    ids = ids_of(2, 4)
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": None}, "input_ids and inputs_embeds are both given or both missing"),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 4, 1)},
            r"inputs_embeds has shape \[2, 4, 1\], but must be \[B, T, d_model\]",
        ),
        ({"input_ids": torch.tensor([[41]])}, "input_ids holds 41, but must be from 0 to vocab_size - 1 = 39"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \[2, 5\]"),
        ({"attention_mask": torch.full((2, 4), 0.5)}, "attention_mask has values other than 0 and 1"),
        (
            {"position_ids": torch.arange(3, 7)[None]},
            "position_ids is not that of one document in each row, or of several packed into",
        ),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids is not that of .* packed into a single unpadded row"),
        ({"position_ids": torch.arange(3)[None]}, r"position_ids has shape \[1, 3\]"),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1]] * 2)}, "seq_idx is not that of one document in each row"),
        ({"input_ids": ids[:1], "seq_idx": torch.tensor([[0, 0, 1, 1]]), "use_cache": True}, "the row holds several documents"),
        ({"output_attentions": True}, "output_attentions is True, but these models do not compute"),
        ({"past_key_values": "cache"}, f"{CACHE} is a str, but must be a LineartimeCache"),
    ]
    for arguments, message in unfit:
        with pytest.raises(ValueError, match=message):
            causal(**{"input_ids": ids, **arguments})
    causal.config._output_attentions = True
    with pytest.raises(ValueError, match="output_attentions is True"):
        causal(ids)
    causal(ids, output_attentions=False)


def test_types_of_tokens_are_not_dropped_silently_with_a_cache() -> None:
    model, ids = causal_model(token_types=2), ids_of(2, 9)
    zeros = torch.zeros_like(ids)
    untyped = causal_model()
    for cached in (True, False):
        close(model(ids, token_type_ids=zeros, use_cache=cached).logits, model(ids).logits)
        close(untyped(ids, token_type_ids=zeros + 1, use_cache=cached).logits, untyped(ids).logits)
    with pytest.raises(ValueError, match="token_type_ids has types other than 0, but with a cache all tokens are of type 0"):
        model(ids, token_type_ids=zeros + 1, use_cache=True)


def test_models_of_the_wrong_task_are_refused() -> None:
    with pytest.raises(ValueError, match="task is 'mlm', but must be 'clm' or 'prefix-lm' for a causal language model"):
        AutoModelForCausalLM.from_config(tiny(task="mlm"))
    with pytest.raises(ValueError, match="task is 'clm', but must be 'mlm' for a masked language model"):
        AutoModelForMaskedLM.from_config(tiny())
    with pytest.raises(ValueError, match="use_cache is given, but a masked language model is bidirectional"):
        hf.LineartimeModel(tiny(task="mlm"))(ids_of(1, 4), use_cache=True)


@pytest.mark.parametrize("given", [{"n_layers": 3}, {"num_attention_heads": 3}, {"d_qk": 2}])
def test_a_size_that_is_no_field_of_the_model_is_not_ignored(given: dict[str, Any]) -> None:
    [(name, value)] = given.items()
    with pytest.raises(lineartime.ArgumentError, match=f"{name} is {value}, but no field of this model has .* n_blocks, mixer"):
        hf.LineartimeConfig(**given)
    with pytest.raises(lineartime.ArgumentError, match="dropout is 'a', but must be a number"):
        hf.LineartimeConfig(dropout="a")
    assert hf.LineartimeConfig(num_hidden_layers=3, hidden_size=64, num_labels=5).n_blocks == 3


# Heads for tasks, and pipelines -------------------------------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor]:
    """Ids and mask of a long and a short text, the short one padded on the right."""
    ids = ids_of(2, 14)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids, mask


@pytest.mark.parametrize(("auto", "kind"), list(hf.MODELS.items())[3:])
def test_a_head_is_put_on_a_trained_model_and_saved_with_it(auto: Any, kind: Any, tmp_path: Path) -> None:
    language: Any = causal_model() if kind is hf.LineartimeForSequenceClassification else masked_model()
    language.save_pretrained(tmp_path / "trained")
    model = auto.from_pretrained(tmp_path / "trained")
    assert type(model) is kind
    torch.testing.assert_close(model.model.state_dict(), language.model.state_dict())
    assert 0 < getattr(model, model.head).weight.std() < 0.05
    model.save_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(auto.from_pretrained(tmp_path / "tuned").state_dict(), model.state_dict())
    if kind is hf.LineartimeForSequenceClassification:  # a head of another size is drawn anew, if that is allowed
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            auto.from_pretrained(tmp_path / "tuned", num_labels=5)
        other = auto.from_pretrained(tmp_path / "tuned", num_labels=5, ignore_mismatched_sizes=True)
        assert other(ids_of(2, 5)).logits.shape == (2, 5)


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_sequence_has_the_label_of_its_real_tokens(task: str) -> None:
    model, (ids, mask) = model_of(hf.LineartimeForSequenceClassification, task), batch()
    output = model(ids, attention_mask=mask, labels=torch.tensor([1, 0]))
    alone = torch.cat([model(ids[:1]).logits, model(ids[1:, :6]).logits])
    close(output.logits, alone)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([1, 0])))
    left = model(ids[1:, :6].repeat(1, 2), attention_mask=torch.tensor([[0] * 6 + [1] * 6])).logits
    close(left, alone[1:])


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_row_that_has_no_single_label_is_refused(task: str) -> None:
    model, row = model_of(hf.LineartimeForSequenceClassification, task), torch.zeros(1, 7, dtype=torch.long)
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


@pytest.mark.parametrize("kind", [hf.LineartimeForSequenceClassification, hf.LineartimeForTokenClassification])
def test_bf16_does_not_round_the_mean_of_numbers_away(kind: Any) -> None:
    model, ids = model_of(kind), ids_of(2, 14)
    with torch.no_grad():
        model.score.bias += 10_007.0
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(ids).logits, exact, rtol=0, atol=0.2)


def test_labels_and_ends_of_answers_in_padding_do_not_count() -> None:
    ids, mask = batch()
    model, labels = model_of(hf.LineartimeForTokenClassification), (ids % 2).masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[labels >= 0], labels[labels >= 0]))
    answering, start, end = model_of(hf.LineartimeForQuestionAnswering), torch.tensor([3, 1]), torch.tensor([5, 2])
    output = answering(ids, attention_mask=mask, start_positions=start, end_positions=end)
    found = [(output.start_logits, start), (output.end_logits, end)]
    losses = [F.cross_entropy(logits[i, :n], place[i]) for logits, place in found for i, n in ((0, 14), (1, 6))]
    torch.testing.assert_close(output.loss, torch.stack(losses).mean())


def test_pipelines_continue_fill_and_classify_texts() -> None:
    tokenizer = hf.fast_tokenizer(ByteTokenizer())
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

    labelling = awake(hf.LineartimeForSequenceClassification(tiny(task="mlm", **sizes)))
    classify = pipeline("text-classification", model=labelling, tokenizer=tokenizer)
    for found, text in zip(classify(prompts, batch_size=2), prompts, strict=True):
        score, best = labelling(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).max(-1)
        assert found == {"label": f"LABEL_{int(best)}", "score": pytest.approx(score.item())}
