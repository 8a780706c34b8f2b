"""`generate` of transformers, from a cache of streams."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import lineartime
from lineartime.generation.prompts import PREFILL
from lineartime.hf import LineartimeCache, LineartimeConfig, LineartimeForCausalLM
from lineartime.hf import cache as cache_module
from lineartime.hf.cache import CACHE
from lineartime.ops.state import State

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

KINDS = ["flash", "flash-quad", "transformer++", "performer", "combiner"]  # one of each kind of state
every_kind = pytest.mark.parametrize("system", KINDS)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(2))


def left_padded() -> tuple[Tensor, Tensor]:
    """Ids of three prompts, 12, 5 and 9 long, and their mask."""
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :7] = mask[2, :3] = 0
    return ids_of(3, 12), mask


class Collector(BaseStreamer):  # type: ignore[misc]
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@every_kind
def test_greedy_tokens_are_those_of_lineartime(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    own = lineartime.build(model.config.to_model_config()).eval()
    own.backbone.load_state_dict(model.model.backbone.state_dict())
    prompt = ids_of(1, 13)
    greedy = lineartime.Sampling(temperature=0)
    expected = list(lineartime.generate(own, prompt[0], 15, greedy))
    assert model.generate(prompt, max_new_tokens=15, do_sample=False)[0, 13:].tolist() == expected
    assert model.generate(prompt, max_new_tokens=15, do_sample=False, use_cache=False)[0, 13:].tolist() == expected


@every_kind
@pytest.mark.parametrize("mode", [{"num_beams": 4, "num_return_sequences": 2}, {}])
def test_a_batch_padded_on_the_left_generates_what_its_rows_generate(
    system: str, mode: dict[str, Any], tiny: Tiny, awake: Awake
) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    ids, mask = left_padded()
    together = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **mode)
    alone = [
        model.generate(row[real == 1][None], max_new_tokens=12, do_sample=False, **mode)[:, -12:]
        for row, real in zip(ids, mask, strict=True)
    ]
    assert together[:, -12:].tolist() == torch.cat(alone).tolist()


@every_kind
def test_samples_of_a_seed_are_the_same_with_a_cache_and_without(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        options = {"do_sample": True, "top_k": 10, "temperature": 0.9, "num_return_sequences": 3}
        samples.append(model.generate(ids_of(2, 6), max_new_tokens=10, use_cache=use_cache, **options).tolist())
    assert samples[0] == samples[1]


@every_kind
def test_generation_goes_on_from_a_returned_cache(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    ids, mask = left_padded()
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    first = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    assert cache.get_seq_length() == 16  # the last token was not read yet
    for use in (copy.deepcopy(cache), cache):
        more = torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1)
        rest = model.generate(first.sequences, attention_mask=more, cache=use, max_new_tokens=7, do_sample=False)
        assert rest.tolist() == whole.tolist()


@pytest.mark.parametrize("prompts", ["of one length", "padded on the left"])
def test_tokens_update_the_state_of_flash_in_place(
    prompts: str, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = left_padded()
    mask = torch.ones_like(ids) if prompts == "of one length" else mask
    monkeypatch.setattr(State, "map", None)  # by which states are copied, selected and joined
    options = {"do_sample": False, "return_dict_in_generate": True}
    cache = causal.generate(ids, attention_mask=mask, max_new_tokens=9, **options).past_key_values
    before = [(block.summary.data_ptr(), block.keys.data_ptr()) for block in cache.state.blocks]
    with torch.no_grad():
        causal(ids[:, :1], past_key_values=cache)
    assert [(block.summary.data_ptr(), block.keys.data_ptr()) for block in cache.state.blocks] == before


@torch.no_grad()
def test_a_cache_reads_a_batch_of_padding_alone(causal: LineartimeForCausalLM) -> None:
    ids, nothing = ids_of(2, 7), torch.zeros(2, 7, dtype=torch.long)
    begun = causal(ids, attention_mask=nothing, use_cache=True, output_hidden_states=True)
    assert {tuple(hidden.shape) for hidden in begun.hidden_states} == {(2, 7, causal.config.d_model)}
    assert not any(hidden.any() for hidden in begun.hidden_states)
    found = causal(ids, past_key_values=begun.past_key_values).logits
    torch.testing.assert_close(found, causal(ids).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_many_tokens_after_steps_in_place_are_read_at_once(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 60)
    expected = causal(ids).logits
    cache = causal(ids[:, :9], use_cache=True).past_key_values
    for at in range(9, 14):
        found = causal(ids[:, at, None], past_key_values=cache).logits[:, 0]
        torch.testing.assert_close(found, expected[:, at], atol=1e-5, rtol=0)
    copied = cache.copy()
    torch.testing.assert_close(causal(ids[:, 14:50], past_key_values=cache).logits, expected[:, 14:50], atol=1e-5, rtol=0)
    copied.activate_past_recording()
    causal(torch.full((2, 1), 3), past_key_values=copied)
    copied.crop(-1)
    torch.testing.assert_close(causal(ids[:, 14:50], past_key_values=copied).logits, expected[:, 14:50], atol=1e-5, rtol=0)


@pytest.mark.parametrize("system", ["flash", "flash-next"])  # the second has a token shift here
@pytest.mark.parametrize("masked", [False, True])
def test_a_cache_that_generate_filled_continues_with_gradients(system: str, masked: bool, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    ids, mask = left_padded()
    generated = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    read = generated.sequences[:, :-1]
    with torch.no_grad():
        at_once = model(read, attention_mask=torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1), use_cache=True)
    new, real = ids_of(3, 10), torch.ones(3, 10, dtype=torch.long)
    if masked:
        real[0, 7:] = real[2, :2] = 0
    results = []
    for cache in (generated.past_key_values, at_once.past_key_values):
        model.zero_grad()
        logits = model(new, attention_mask=real, past_key_values=cache).logits[real == 1]
        logits.square().mean().backward()
        results.append([logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("system", ["flash", "flash-quad", "combiner"])
@pytest.mark.parametrize("assistant", ["another model", "the prompt", "the prompt, to draw from the best token alone"])
def test_assisted_decoding_gives_the_greedy_tokens(system: str, assistant: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    prompt = ids_of(1, 9)
    expected = model.generate(prompt, max_new_tokens=25, do_sample=False)
    if assistant != "another model":
        draws = assistant != "the prompt"
        helped = model.generate(
            prompt, max_new_tokens=25, do_sample=draws, top_k=1 if draws else None, prompt_lookup_num_tokens=4
        )
    else:
        other = LineartimeForCausalLM(tiny(system))
        other.load_state_dict(model.state_dict())
        with torch.no_grad():  # so that it is right now and then
            other.model.backbone.embedding.weight.add_(0.05 * torch.randn(40, 16))
        helped = model.generate(prompt, max_new_tokens=25, do_sample=False, assistant_model=other.eval())
    assert helped.tolist() == expected.tolist()


def test_flash_remembers_as_much_after_a_long_text_as_after_a_short_one(causal: LineartimeForCausalLM) -> None:
    cache = causal(ids_of(2, 8), use_cache=True).past_key_values
    before = cache.memory_bytes
    causal(ids_of(2, 800), past_key_values=cache)
    assert cache.memory_bytes == before > 0
    assert repr(cache) == f"LineartimeCache(streams=2, tokens=808, bytes={before})"
    assert (len(cache), cache.batch_size, cache.is_compileable) == (2, 2, False)


def test_a_streamer_gets_every_token(causal: LineartimeForCausalLM) -> None:
    streamer = Collector()
    prompt = ids_of(1, 6)
    text = causal.generate(prompt, max_new_tokens=8, do_sample=False, streamer=streamer)
    assert streamer.tokens == text[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("by", ["generate", "the cache"])
def test_a_long_prompt_is_read_in_pieces(by: str, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    whole = causal.generate(ids, **options)
    if by == "generate":
        options |= {"prefill_chunk_size": 5, "cache": LineartimeCache()}
    monkeypatch.setitem(PREFILL, "cpu", 5)
    assert causal.generate(ids, **options).tolist() == whole.tolist()


@pytest.mark.parametrize("at_once", [64, 0])
def test_a_cache_takes_back_what_it_read_since_the_last_crop(
    at_once: int, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "REREAD", at_once)
    ids = ids_of(1, 20)
    expected = causal(ids).logits
    cache = causal(ids[:, :6], use_cache=True).past_key_values
    cache.activate_past_recording()
    causal(ids[:, 6:9], past_key_values=cache)
    causal(torch.full((1, 4), 3), past_key_values=cache)
    cache.crop(-6)  # the four wrong ones, and two that are right
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(causal(ids[:, 7:11], past_key_values=cache).logits, expected[:, 7:11], atol=1e-5, rtol=0)
    cache.crop(0)
    torch.testing.assert_close(causal(ids[:, 11:], past_key_values=cache).logits, expected[:, 11:], atol=1e-5, rtol=0)
    with pytest.raises(lineartime.LineartimeError, match="cannot forget 10 tokens: it can only take back"):
        cache.crop(-10)


def test_a_cache_forgets_no_part_of_a_prefix_whose_tokens_have_read_each_other(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(task="prefix-lm")))
    ids, cache = ids_of(1, 20), LineartimeCache()
    cache.activate_past_recording()
    model(ids[:, :12], past_key_values=cache, prefix_lengths=torch.tensor([12]))
    after = model(ids[:, 12:], past_key_values=cache).logits
    with pytest.raises(lineartime.LineartimeError, match="cannot forget 10 tokens"):
        cache.crop(-10)
    cache.crop(-8)
    torch.testing.assert_close(model(ids[:, 12:], past_key_values=cache).logits, after, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="tokens_to_remove is 5, but must be negative, or 0: -5 forgets five tokens"):
        cache.crop(5)


@pytest.mark.parametrize("change", ["copied", "selected"])
def test_a_cache_that_was_changed_in_inference_mode_is_continued_outside(
    change: str, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEARTIME_NATIVE", "0")  # PyTorch's own operations check what they update
    ids = ids_of(3, 12)
    with torch.inference_mode():
        cache = causal(ids[:, :9], use_cache=True).past_key_values
        causal(ids[:, 9:10], past_key_values=cache)
        if change == "copied":
            cache = cache.copy()
        else:
            cache.batch_select_indices(torch.arange(3))
    with torch.no_grad():
        found = causal(ids[:, 10:11], past_key_values=cache).logits
        torch.testing.assert_close(found, causal(ids[:, :11]).logits[:, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_gradient_of_what_a_token_overwrote_is_refused(
    native: str, causal: LineartimeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEARTIME_NATIVE", native)
    ids = ids_of(2, 9)  # a chunk, which is read with a gradient, and the first token of the next one
    begun = causal(ids[:, :8], use_cache=True)
    with torch.no_grad():
        causal(ids[:, 8:], past_key_values=begun.past_key_values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        begun.logits.sum().backward()


@torch.no_grad()
def test_embedded_tokens_may_be_slices(causal: LineartimeForCausalLM) -> None:
    embedded = causal.get_input_embeddings()(ids_of(2, 9))
    cache = causal(inputs_embeds=embedded[:, :7], use_cache=True).past_key_values
    found = [causal(inputs_embeds=embedded[:, at, None], past_key_values=cache).logits for at in (7, 8)]
    torch.testing.assert_close(torch.cat(found, 1), causal(inputs_embeds=embedded).logits[:, 7:], atol=1e-5, rtol=0)


def test_a_cache_without_streams_is_continued(causal: LineartimeForCausalLM) -> None:
    ids, mask = left_padded()
    with torch.no_grad():
        cache = causal(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.batch_select_indices(torch.zeros(0, dtype=torch.long))
        assert causal(ids[:0, :1], past_key_values=cache).logits.shape == (0, 1, 40)
        assert causal(ids[:0, :3], past_key_values=cache).logits.shape == (0, 3, 40)


def test_a_cache_that_an_assisted_text_returned_grows_no_more(causal: LineartimeForCausalLM) -> None:
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = causal.generate(ids_of(1, 9), max_new_tokens=9, prompt_lookup_num_tokens=3, **options)
    rest = causal.generate(first.sequences, max_new_tokens=20, cache=first.past_key_values, **options)
    assert rest.sequences.tolist() == causal.generate(ids_of(1, 9), max_new_tokens=29, do_sample=False).tolist()
    with pytest.raises(lineartime.LineartimeError, match="cannot forget 1 tokens"):
        rest.past_key_values.crop(-1)


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(tiny: Tiny, awake: Awake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PREFILL, "cpu", 2)
    model = awake(LineartimeForCausalLM(tiny("transformer", max_positions=12)))
    ids = ids_of(2, 12)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="max_positions is 12"):
        model(ids[:, :5], past_key_values=cache)
    assert cache.get_seq_length() == 8
    torch.testing.assert_close(model(ids[:, 8:], past_key_values=cache).logits, model(ids).logits[:, 8:], atol=1e-5, rtol=0)


def test_a_cache_is_copied_repeated_selected_and_reset(causal: LineartimeForCausalLM) -> None:
    ids, mask = left_padded()
    cache = LineartimeCache()
    assert (cache.batch_size, len(cache), cache.is_initialized) == (-1, 0, False)
    cache.batch_repeat_interleave(2)
    with torch.no_grad():
        causal(ids, attention_mask=mask, past_key_values=cache)
        new = ids_of(3, 2)
        expected = causal(new, past_key_values=cache.copy()).logits
        kept = causal(new, past_key_values=cache, use_cache=False)
        assert kept.past_key_values is None
        torch.testing.assert_close(kept.logits, expected)
        cache.batch_repeat_interleave(2)
        doubled = causal(new.repeat_interleave(2, 0), past_key_values=cache).logits
    torch.testing.assert_close(doubled, expected.repeat_interleave(2, 0))
    assert cache.get_seq_length() == 14
    cache.reset()
    assert (cache.get_seq_length(), cache.memory_bytes) == (0, 0)


def test_a_prefix_after_other_tokens_is_refused(tiny: Tiny) -> None:
    model = LineartimeForCausalLM(tiny(task="prefix-lm"))
    ids = left_padded()[0]
    cache = model(ids, use_cache=True, prefix_lengths=torch.full((len(ids),), ids.shape[1])).past_key_values
    with pytest.raises(ValueError, match="prefix_lengths is given, but the cache has read tokens"):
        model(ids, past_key_values=cache, prefix_lengths=torch.full((len(ids),), ids.shape[1]))


def test_a_prefix_shorter_than_what_is_read_with_it_into_a_cache_is_refused(tiny: Tiny) -> None:
    model = LineartimeForCausalLM(tiny(task="prefix-lm"))
    ids, mask = left_padded()
    for lengths, given in ((torch.full((3,), 11), None), (torch.tensor([12, 5, 8]), mask)):
        with pytest.raises(ValueError, match=r"but must be the number of tokens of each row, .*: read the prefixes first"):
            model(ids, attention_mask=given, use_cache=True, prefix_lengths=lengths)


def test_a_prefix_model_reads_its_prompt_in_both_directions(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(task="prefix-lm")))
    own = lineartime.build(model.config.to_model_config()).eval()
    own.backbone.load_state_dict(model.model.backbone.state_dict())
    ids, mask = left_padded()
    together = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, real, text in zip(ids, mask, together, strict=True):
        expected = list(lineartime.generate(own, row[real == 1], 8, lineartime.Sampling(temperature=0)))
        assert text[-8:].tolist() == expected
    unfit: list[tuple[str, dict[str, Any]]] = [
        ("guidance_scale", {"guidance_scale": 2.0}),
        ("use_cache", {"use_cache": False}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 2}),
        ("prefill_chunk_size", {"prefill_chunk_size": 4}),
    ]
    for name, options in unfit:
        with pytest.raises(ValueError, match=f"{name} does not suit a model of task 'prefix-lm'"):
            model.generate(ids[:1], max_new_tokens=3, do_sample=False, **options)


@every_kind
def test_loglikelihoods_of_texts_of_any_lengths_in_a_batch_are_exact(system: str, tiny: Tiny, awake: Awake) -> None:
    """Padded on the right without a mask, as lm-eval does it, or on the left with one."""
    model = awake(LineartimeForCausalLM(tiny(system)))
    texts = [ids_of(1, length)[0] for length in (17, 3, 9, 1)]
    alone = [model(text[None]).logits[0].log_softmax(-1) for text in texts]
    right = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    left = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side="left")
    on_right, on_left = model(right).logits.log_softmax(-1), model(left, attention_mask=mask).logits.log_softmax(-1)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(on_right[row, : len(expected)], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(on_left[row, -len(expected) :], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation is 'static', but these models have a cache of their own"),
        ({"cache": DynamicCache()}, f"{CACHE} is a DynamicCache, but must be a LineartimeCache"),
    ],
)
def test_other_caches_are_refused(causal: LineartimeForCausalLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal.generate(ids_of(1, 4), max_new_tokens=2, do_sample=False, **options)


def test_a_prompt_padded_where_it_is_continued_is_refused(causal: LineartimeForCausalLM) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match=r"attention_mask has padding at the end of a prompt.*pad on the left"):
        causal.generate(ids_of(2, 3), attention_mask=mask, max_new_tokens=2, do_sample=False)


def test_an_empty_prompt_is_named(causal: LineartimeForCausalLM) -> None:
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"attention_mask has no token in row 1: begin an empty prompt with"):
        causal.generate(ids_of(2, 3), attention_mask=mask, max_new_tokens=2, do_sample=False)


def test_a_cache_of_other_streams_is_refused(causal: LineartimeForCausalLM) -> None:
    cache = causal(ids_of(2, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"{CACHE} is the cache of 2 streams, but the batch has 3"):
        causal(ids_of(3, 4), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\], but must be .*with the 4 tokens of the cache"):
        causal(ids_of(2, 5), attention_mask=torch.ones(2, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache is True, but the row holds several documents"):
        causal(ids_of(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=True)
