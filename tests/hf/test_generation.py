"""`generate` of transformers, and the cache of streams that it continues."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hf.tiny import GREEDY, KINDS, causal_model, close, ids_of, left_padded, own, tiny
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import lineartime
from lineartime.generation.prompts import PREFILL
from lineartime.hf import LineartimeCache, LineartimeForCausalLM
from lineartime.hf.cache import CACHE


@pytest.mark.parametrize("system", KINDS)
def test_greedy_tokens_are_those_of_lineartime(system: str) -> None:
    model, prompt, streamed = causal_model(system), ids_of(1, 13), list[int]()
    streamer = SimpleNamespace(put=lambda tokens: streamed.extend(tokens.flatten().tolist()), end=lambda: streamed.append(-1))
    expected = list(lineartime.generate(own(model), prompt[0], 15, lineartime.Sampling(temperature=0)))
    options = {"max_new_tokens": 15, "do_sample": False}
    assert model.generate(prompt, streamer=streamer, **options)[0, 13:].tolist() == expected
    assert streamed[13:] == [*expected, -1]
    assert model.generate(prompt, use_cache=False, **options)[0, 13:].tolist() == expected
    embedded = model.get_input_embeddings()(prompt)
    assert model.generate(inputs_embeds=embedded, **options)[0].tolist() == expected


@pytest.mark.parametrize(
    ("system", "mode"), [("flash", {"num_beams": 4, "num_return_sequences": 2}), *((k, {}) for k in KINDS)]
)
def test_a_batch_padded_on_the_left_generates_what_its_rows_generate_and_goes_on(system: str, mode: dict[str, Any]) -> None:
    model, (ids, mask) = causal_model(system), left_padded()
    options = {"max_new_tokens": 12, "do_sample": False, **mode}
    together = model.generate(ids, attention_mask=mask, **options)
    alone = [model.generate(row[real == 1][None], **options)[:, -12:] for row, real in zip(ids, mask, strict=True)]
    assert together[:, -12:].tolist() == torch.cat(alone).tolist()
    if mode:
        return
    first = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache, more = first.past_key_values, torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1)
    assert cache.get_seq_length() == 16  # the last token was not read yet
    for use in (copy.deepcopy(cache), cache):
        rest = model.generate(first.sequences, attention_mask=more, cache=use, max_new_tokens=7, do_sample=False)
        assert rest.tolist() == together.tolist()


@pytest.mark.parametrize(
    ("system", "mode"),
    [
        ("flash", {"do_sample": True, "top_k": 10, "temperature": 0.9, "num_return_sequences": 3}),
        ("flash", {"num_beams": 3, "do_sample": True, "top_k": 8}),
        ("flash", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
        ("flash-quad", {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True}),
        ("transformer", {"min_new_tokens": 4, "eos_token_id": list(range(20)), "pad_token_id": 0}),
    ],
)
def test_modes_of_generation_run_alike_with_a_cache_and_without(system: str, mode: dict[str, Any]) -> None:
    model, texts = causal_model(system), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(model.generate(ids_of(2, 7), max_new_tokens=9, use_cache=use_cache, **mode))
    assert texts[0].tolist() == texts[1].tolist()


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


@pytest.mark.parametrize("helper", ["prompt_lookup_num_tokens", "assistant_model", "as assistant"])
def test_assisted_decoding_is_refused(helper: str, causal: LineartimeForCausalLM) -> None:
    options: dict[str, Any] = {helper: 3 if helper == "prompt_lookup_num_tokens" else causal}
    model: Any = causal
    if helper == "as assistant":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))
        options = {"assistant_model": causal}
    with pytest.raises((ValueError, lineartime.LineartimeError), match=r"stateful models|cannot forget its last tokens"):
        model.generate(ids_of(1, 9), max_new_tokens=5, **options)
    with pytest.raises(lineartime.LineartimeError, match="cannot forget its last tokens: keep a copy"):
        causal(ids_of(1, 9), use_cache=True).past_key_values.crop(0)


@pytest.mark.parametrize("by", ["generate", "the cache"])
def test_a_long_prompt_is_read_in_pieces(by: str, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    whole = causal.generate(ids, **options)
    if by == "generate":
        options |= {"prefill_chunk_size": 5, "cache": LineartimeCache()}
    monkeypatch.setitem(PREFILL, "cpu", 5)
    assert causal.generate(ids, **options).tolist() == whole.tolist()


def test_a_prefix_model_reads_its_prompt_in_both_directions() -> None:
    model, (ids, mask) = causal_model(task="prefix-lm"), left_padded()
    together = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, real, text in zip(ids, mask, together, strict=True):
        expected = list(lineartime.generate(own(model), row[real == 1], 8, lineartime.Sampling(temperature=0)))
        assert text[-8:].tolist() == expected
    unfit = {"guidance_scale": 2.0, "use_cache": False, "prefill_chunk_size": 4}
    for name, value in unfit.items():
        with pytest.raises(ValueError, match=f"{name} does not suit a model of task 'prefix-lm'"):
            model.generate(ids[:1], max_new_tokens=3, do_sample=False, **{name: value})


# The cache --------------------------------------------------------------------------------------------------------------


def test_flash_remembers_as_much_after_a_long_text_as_after_a_short_one(causal: LineartimeForCausalLM) -> None:
    cache = causal(ids_of(2, 8), use_cache=True).past_key_values
    before = cache.memory_bytes
    causal(ids_of(2, 800), past_key_values=cache)
    assert cache.memory_bytes == before > 0
    assert repr(cache) == f"LineartimeCache(streams=2, tokens=808, bytes={before})"
    assert (len(cache), cache.batch_size, cache.is_compileable) == (2, 2, False)


@pytest.mark.parametrize("native", ["1", "0"])
def test_gradient_of_tokens_whose_state_was_overwritten_is_that_of_these_tokens(
    native: str, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEARTIME_NATIVE", native)
    ids = ids_of(2, 9)  # a chunk, which is read with a gradient, and the first token of the next one
    begun = causal(ids[:, :8], use_cache=True)
    with torch.no_grad():
        causal(ids[:, 8:], past_key_values=begun.past_key_values)
    weight = causal.model.backbone.embedding.weight
    (found,) = torch.autograd.grad(begun.logits.sum(), weight)
    (expected,) = torch.autograd.grad(causal(ids[:, :8]).logits.sum(), weight)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PREFILL, "cpu", 2)
    model, ids = causal_model("transformer", max_positions=12), ids_of(2, 12)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="max_positions is 12"):
        model(ids[:, :5], past_key_values=cache)
    assert cache.get_seq_length() == 8
    close(model(ids[:, 8:], past_key_values=cache).logits, model(ids).logits[:, 8:])


@torch.no_grad()
def test_a_cache_is_copied_repeated_selected_and_reset(causal: LineartimeForCausalLM) -> None:
    (ids, mask), new, cache = left_padded(), ids_of(3, 2), LineartimeCache()
    assert (cache.batch_size, len(cache), cache.is_initialized) == (-1, 0, False)
    cache.batch_repeat_interleave(2)
    causal(ids, attention_mask=mask, past_key_values=cache)
    expected = causal(new, past_key_values=cache.copy()).logits
    kept = causal(new, past_key_values=cache, use_cache=False)
    assert kept.past_key_values is None
    torch.testing.assert_close(kept.logits, expected)
    cache.batch_repeat_interleave(2)
    doubled = causal(new.repeat_interleave(2, 0), past_key_values=cache).logits
    torch.testing.assert_close(doubled, expected.repeat_interleave(2, 0))
    assert cache.get_seq_length() == 14
    cache.batch_select_indices(torch.zeros(0, dtype=torch.long))
    for tokens in (1, 3):  # a token is read by another path than several
        assert causal(ids[:0, :tokens], past_key_values=cache).logits.shape == (0, tokens, 40)
    cache.reset()
    assert (cache.get_seq_length(), cache.memory_bytes) == (0, 0)


# Mistakes ---------------------------------------------------------------------------------------------------------------


def test_a_prefix_is_read_first_and_whole_into_a_cache() -> None:
    model, (ids, mask) = LineartimeForCausalLM(tiny(task="prefix-lm")), left_padded()
    for lengths, given in ((torch.full((3,), 11), None), (torch.tensor([12, 5, 8]), mask)):
        with pytest.raises(ValueError, match=r"prefix_lengths is .*, but a cache that has read 0 tokens takes a prefix first"):
            model(ids, attention_mask=given, use_cache=True, prefix_lengths=lengths)
    cache = model(ids, use_cache=True, prefix_lengths=torch.full((3,), 12)).past_key_values
    with pytest.raises(ValueError, match=r"prefix_lengths is .*, but a cache that has read 12 tokens takes a prefix first"):
        model(ids, past_key_values=cache, prefix_lengths=torch.full((3,), 12))


def test_prompts_and_caches_that_generate_cannot_use_are_named(causal: LineartimeForCausalLM) -> None:
    unfit: list[tuple[dict[str, Any], str]] = [
        (
            {"cache_implementation": "static"},
            "cache_implementation does not suit a model of task 'clm', which has a cache of its own",
        ),
        ({"cache": DynamicCache()}, f"{CACHE} is a DynamicCache, but must be a LineartimeCache"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])},
            r"attention_mask has padding at the end of a prompt.*pad on the left",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            r"attention_mask has padding at the end of a prompt.*begin an empty prompt with",
        ),
    ]
    for options, message in unfit:
        with pytest.raises(ValueError, match=message):
            causal.generate(ids_of(2, 3), **GREEDY, **options)
    cache = causal(ids_of(2, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"{CACHE} is the cache of 2 streams, but the batch has 3"):
        causal(ids_of(3, 4), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\], but must be"):
        causal(ids_of(2, 5), attention_mask=torch.ones(2, 3), past_key_values=cache)


def test_weights_that_are_not_finite_are_neither_loaded_nor_drawn_from(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        causal.model.backbone.norm.weight[3] = torch.nan
    for mode in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2}):
        with pytest.raises(lineartime.LineartimeError, match=r"^The logits are not finite"):
            causal.generate(ids_of(2, 3), max_new_tokens=4, **mode)
    causal.save_pretrained(tmp_path)
    with pytest.raises(lineartime.LineartimeError, match=r"holds numbers that are not finite in model.backbone.norm.weight"):
        LineartimeForCausalLM.from_pretrained(tmp_path)
