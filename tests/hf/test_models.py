"""Every system as a model of transformers: outputs, padding, packing, losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import lineartime
from lineartime.hf import LineartimeConfig, LineartimeForCausalLM, LineartimeForMaskedLM, LineartimeModel
from lineartime.hf.cache import CACHE
from lineartime.hf.language import _predicted
from lineartime.machine import choose_device
from lineartime.models.systems import SYSTEMS

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

CAUSAL = [name for name, system in SYSTEMS.items() if system.mixer.why_not_causal is None]
every_system = pytest.mark.parametrize("system", list(SYSTEMS))
every_causal_system = pytest.mark.parametrize("system", CAUSAL)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(2))


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol * max(1.0, b.detach().abs().max().item()), rtol=0)


def padded(ids: Tensor, length: int, side: str) -> tuple[Tensor, Tensor]:
    """Ids [1, T] with padding on a side, [1, length], and the mask."""
    padding = (length - ids.shape[1], 0) if side == "left" else (0, length - ids.shape[1])
    mask = torch.nn.functional.pad(torch.ones_like(ids), padding)
    return torch.nn.functional.pad(ids, padding, value=7), mask


@every_system
def test_a_model_gives_the_logits_of_lineartime_and_returns_from_a_folder(
    system: str, tiny: Tiny, awake: Awake, tmp_path: Path
) -> None:
    config = tiny(system, "mlm")
    model = awake(LineartimeForMaskedLM(config))
    own = lineartime.build(config.to_model_config()).eval()
    own.backbone.load_state_dict(model.model.backbone.state_dict())
    ids = ids_of(2, 19)
    logits = model(ids).logits
    torch.testing.assert_close(logits, own(ids), atol=0, rtol=0)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is LineartimeForMaskedLM
    torch.testing.assert_close(loaded(ids).logits, logits, atol=0, rtol=0)
    assert loaded.lm_head.weight is loaded.model.backbone.embedding.weight


@every_causal_system
def test_cached_logits_are_the_uncached_ones(system: str, tiny: Tiny, awake: Awake) -> None:
    cached_logits_are_the_uncached_ones(awake(LineartimeForCausalLM(tiny(system))), 1e-5)


@pytest.mark.parametrize("system", ["flash", "flash-quad", "transformer", "performer"])
def test_cached_logits_in_bf16_are_the_uncached_ones(system: str, tiny: Tiny) -> None:
    cached_logits_are_the_uncached_ones(LineartimeForCausalLM(tiny(system)).bfloat16().eval(), 2e-3)


def cached_logits_are_the_uncached_ones(model: LineartimeForCausalLM, atol: float) -> None:
    ids = ids_of(2, 27)
    whole = model(ids).logits
    first = model(ids[:, :13], use_cache=True)
    cache, pieces = first.past_key_values, [first.logits]
    for piece in (ids[:, 13:14], ids[:, 14:15], ids[:, 15:22], ids[:, 22:]):
        pieces.append(model(piece, past_key_values=cache).logits)
    assert cache.get_seq_length() == 27
    close(torch.cat(pieces, 1).float(), whole.float(), atol)


@every_causal_system
def test_a_padded_row_equals_the_row_alone_with_a_cache_and_without(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    long, short = ids_of(1, 21), ids_of(1, 10)
    left, right = padded(short, 21, "left"), padded(short, 21, "right")
    ids, mask = torch.cat([long, left[0], right[0]]), torch.cat([torch.ones_like(long), left[1], right[1]])
    with torch.no_grad():
        alone = [model(row).logits[0] for row in (long, short, short)]
        for cached in (False, True):
            logits = model(ids, attention_mask=mask, use_cache=cached).logits
            for row in range(3):
                close(logits[row][mask[row] == 1], alone[row])


@every_causal_system
def test_streams_of_a_padded_batch_continue_as_each_would_alone(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system)))
    long, short, new = ids_of(1, 11), ids_of(1, 4), ids_of(2, 12)
    ids, mask = padded(short, 11, "left")
    ids, mask = torch.cat([long, ids]), torch.cat([torch.ones_like(long), mask])
    with torch.no_grad():
        alone = [model(torch.cat([text, rest[None]], 1)).logits[0, -12:] for text, rest in zip((long, short), new, strict=True)]
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        pieces = []
        for start, end in ((0, 1), (1, 2), (2, 10), (10, 12)):
            mask = torch.ones(3, 11 + end, dtype=torch.long)
            rows = new[[1, 0, 1], start:end]
            pieces.append(model(rows, attention_mask=mask, past_key_values=cache).logits)
    close(torch.cat(pieces, 1), torch.stack([alone[1], alone[0], alone[1]]))


@every_system
def test_packed_documents_do_not_read_each_other(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeModel(tiny(system, "mlm")))
    documents = [ids_of(1, length) for length in (9, 1, 14)]
    packed = torch.cat(documents, 1)
    alone = torch.cat([model(document).last_hidden_state for document in documents], 1)
    for pack in (
        {"position_ids": torch.cat([torch.arange(document.shape[1]) for document in documents])[None]},
        {"cu_seq_lens_q": torch.tensor([0, 9, 10, 24], dtype=torch.int32)},
    ):
        close(model(packed, **pack).last_hidden_state, alone)


def test_hidden_states_are_what_each_block_reads_and_the_last_ones(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    whole = causal(ids, output_hidden_states=True)
    assert len(whole.hidden_states) == causal.config.num_hidden_layers + 1
    torch.testing.assert_close(causal.lm_head(whole.hidden_states[-1]), whole.logits)
    blocks = list(causal.model.backbone.blocks)
    second = blocks[0](whole.hidden_states[0], blocks[0].mixer.describe(ids.shape, device=ids.device))
    torch.testing.assert_close(second, whole.hidden_states[1])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    first = causal(ids[:, :5], attention_mask=mask[:, :5], use_cache=True, output_hidden_states=True)
    rest = causal(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values, output_hidden_states=True)
    with torch.no_grad():
        uncached = causal(ids, attention_mask=mask, output_hidden_states=True)
    for a, b, c in zip(first.hidden_states[1:], rest.hidden_states[1:], uncached.hidden_states[1:], strict=True):
        close(torch.cat([a, b], 1) * mask[..., None], c * mask[..., None])


def test_embedded_tokens_can_be_given_instead_of_ids(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    embedded = causal.get_input_embeddings()(ids)
    torch.testing.assert_close(causal(inputs_embeds=embedded).logits, causal(ids).logits, atol=0, rtol=0)


def test_labels_are_the_tokens_themselves_and_give_the_loss_of_lineartime(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    labels = ids.clone()
    labels[0, 3] = -100
    own = lineartime.build(causal.config.to_model_config()).eval()
    own.backbone.load_state_dict(causal.model.backbone.state_dict())
    torch.testing.assert_close(causal(ids, labels=labels).loss, own.loss(ids[:, :-1], labels[:, 1:]))
    summed = causal(ids, labels=labels, num_items_in_batch=torch.tensor(30)).loss
    torch.testing.assert_close(summed, own.total_loss(ids[:, :-1], labels[:, 1:]) / 30)


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_of_a_prefix_are_no_targets_as_in_training(padded: bool, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(task="prefix-lm")))
    own = lineartime.build(model.config.to_model_config()).eval()
    own.backbone.load_state_dict(model.model.backbone.state_dict())
    ids, prefix = ids_of(2, 9), torch.tensor([4, 0])
    targets = ids[:, 1:].clone()
    targets[0, :3] = -100  # the last token of a prefix predicts the first one after it
    expected = own.loss(ids[:, :-1], targets, prefix_lengths=prefix)
    if padded:
        ids, mask = F.pad(ids, (2, 0)), F.pad(torch.ones_like(ids), (2, 0))
        labels = ids.masked_fill(mask.cumsum(1) < 2, -100)  # padding predicts no first token
        loss = model(ids, attention_mask=mask, labels=labels, prefix_lengths=prefix).loss
    else:
        loss = model(ids, labels=ids, prefix_lengths=prefix).loss
    torch.testing.assert_close(loss, expected)


def test_tokens_of_packed_prefixes_are_no_targets() -> None:
    labels = torch.arange(10)[None]
    prefix_lengths = torch.tensor([2, 0, 1])
    for packed in (
        {"cu_seq_lens_q": torch.tensor([0, 4, 6, 10])},
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]])},
    ):
        kept = _predicted(labels, None, prefix_lengths=prefix_lengths, **packed)
        assert kept.tolist() == [[-100, -100, 2, 3, 4, 5, -100, 7, 8, 9]]


def test_masked_labels_give_the_loss_at_their_own_places(tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForMaskedLM(tiny(task="mlm")))
    ids = ids_of(2, 9)
    labels = torch.where(torch.arange(9) % 3 == 0, ids, -100)
    own = lineartime.build(model.config.to_model_config()).eval()
    own.backbone.load_state_dict(model.model.backbone.state_dict())
    torch.testing.assert_close(model(ids, labels=labels).loss, own.loss(ids, labels))


def test_logits_of_the_last_tokens_alone_can_be_asked_for(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    torch.testing.assert_close(causal(ids, logits_to_keep=2).logits, causal(ids).logits[:, -2:])


def test_outputs_can_be_a_tuple(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 9)
    (logits,) = causal(ids, return_dict=False)
    torch.testing.assert_close(logits, causal(ids).logits)


def test_gradients_are_the_same_with_blocks_computed_again(causal: LineartimeForCausalLM, checkpointing: str) -> None:
    ids = ids_of(2, 9)
    causal.train()
    before = torch.autograd.grad(causal(ids, labels=ids).loss, list(causal.parameters()))
    calls = []
    for block in causal.model.backbone.blocks:
        block.mixer.norm.register_forward_hook(lambda *_: calls.append(1))
    getattr(causal, f"{checkpointing}_enable")()
    assert getattr(causal, f"is_{checkpointing}")
    after = torch.autograd.grad(causal(ids, labels=ids).loss, list(causal.parameters()))
    assert len(calls) == 2 * causal.config.n_blocks  # forward, and again for the backward pass
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b)
    getattr(causal, f"{checkpointing}_disable")()
    assert not getattr(causal, f"is_{checkpointing}")


def test_blocks_are_computed_again_all_or_none(causal: LineartimeForCausalLM) -> None:
    with pytest.raises(ValueError, match="every_n_layers is 2, but must be 1: all blocks are recomputed, or none"):
        causal._set_gradient_checkpointing(every_n_layers=2)
    assert not causal.model.gradient_checkpointing


def test_tokens_can_be_added_and_the_logits_follow(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    ids = ids_of(2, 9)
    before = causal(ids).logits
    causal.resize_token_embeddings(44, mean_resizing=False)
    assert causal.config.vocab_size == 44
    assert causal.lm_head.weight is causal.get_input_embeddings().weight
    logits = causal(ids + 4, labels=ids + 4).logits
    assert logits.shape[-1] == 44
    torch.testing.assert_close(causal(ids).logits[..., :40], before)
    causal.save_pretrained(tmp_path)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids + 4).logits, logits)


def test_a_model_is_loaded_in_bf16_and_on_a_device(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    causal.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.device.type == choose_device("auto").type
    ids = ids_of(2, 9)
    close(loaded(ids.to(loaded.device)).logits.float().cpu(), causal(ids).logits, 3e-2)
    loaded.save_pretrained(tmp_path / "bf16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16


def test_a_base_model_is_loaded_from_a_language_model_and_the_other_way(causal: LineartimeForCausalLM, tmp_path: Path) -> None:
    ids = ids_of(2, 9)
    causal.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    torch.testing.assert_close(causal.lm_head(base(ids).last_hidden_state), causal(ids).logits)
    base.save_pretrained(tmp_path / "base")
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits, causal(ids).logits)


@pytest.mark.parametrize("system", ["flash", "flash-quad", "transformer", "bigbird", "combiner"])
def test_weights_that_a_file_lacks_are_drawn_and_no_others(system: str, tiny: Tiny, awake: Awake, tmp_path: Path) -> None:
    model = awake(LineartimeForMaskedLM(tiny(system, "mlm")))
    state = model.state_dict()
    of_block = sorted(name for name in state if name.startswith("model.backbone.blocks.1.mixer."))
    missing = {*of_block[::2], *(name for name in of_block if name.endswith("to_output.weight"))}
    assert any(name.endswith("to_output.weight") for name in missing)
    model.save_pretrained(tmp_path, state_dict={name: tensor for name, tensor in state.items() if name not in missing})
    loaded = LineartimeForMaskedLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in state.items():
        assert torch.isfinite(loaded[name]).all()
        if name not in missing:
            torch.testing.assert_close(loaded[name], tensor, atol=0, rtol=0)
        elif name.endswith("to_output.weight"):
            assert 0.005 < loaded[name].std() < 0.05


def test_a_fresh_model_starts_as_lineartime_starts_it(tiny: Tiny) -> None:
    config = tiny("flash-quad", d_model=64, initial_scores="unit")
    fresh = LineartimeForCausalLM(config).model.backbone.state_dict()
    own = lineartime.build(config.to_model_config()).backbone.state_dict()
    for name, tensor in own.items():
        if (tensor == tensor.flatten()[0]).all():  # a constant
            assert torch.equal(fresh[name], tensor), name
            continue
        assert fresh[name].std(correction=0) > 0.2 * tensor.std(correction=0), name
        spread = 4 / tensor.numel() ** 0.5
        torch.testing.assert_close(fresh[name].std(correction=0), tensor.std(correction=0), rtol=spread, atol=1e-6)
        torch.testing.assert_close(fresh[name].mean(), tensor.mean(), rtol=0, atol=0.02)


def test_forward_is_compiled_as_one_graph(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 24)
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(ids).logits, causal(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "input_ids and inputs_embeds are both given or both missing"),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 4, 1)},
            r"inputs_embeds has shape \[2, 4, 1\], but must be \[B, T, d_model\]",
        ),
        ({"input_ids": torch.tensor([[41]])}, "input_ids holds 41, but must be from 0 to vocab_size - 1 = 39"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"attention_mask has shape \[2, 1, 4, 4\]"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \[2, 5\]"),
        ({"position_ids": torch.arange(3, 7)[None]}, "position_ids differs from the model's own positions, which"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids differs from .* packed into a single unpadded row"),
        ({"position_ids": torch.arange(3)[None]}, r"position_ids has shape \[1, 3\]"),
        ({"output_attentions": True}, "output_attentions is True"),
        ({"past_key_values": "cache"}, f"{CACHE} is a str, but must be a LineartimeCache"),
    ],
)
def test_arguments_that_do_not_fit_are_named(causal: LineartimeForCausalLM, arguments: dict[str, Any], message: str) -> None:
    given = {"input_ids": ids_of(2, 4), **arguments} if arguments else {}
    with pytest.raises(ValueError, match=message):
        causal(**given)


@pytest.mark.parametrize("cached", [True, False])
def test_types_of_tokens_are_not_dropped_silently_with_a_cache(cached: bool, tiny: Tiny, awake: Awake) -> None:
    model, ids = awake(LineartimeForCausalLM(tiny(token_types=2))), ids_of(2, 9)
    zeros = torch.zeros_like(ids)
    close(model(ids, token_type_ids=zeros, use_cache=cached).logits, model(ids).logits)
    if cached:
        with pytest.raises(
            ValueError, match="token_type_ids has types other than 0, but with a cache all tokens are of type 0"
        ):
            model(ids, token_type_ids=zeros + 1, use_cache=True)
    untyped = awake(LineartimeForCausalLM(tiny()))
    close(untyped(ids, token_type_ids=zeros + 1, use_cache=cached).logits, untyped(ids).logits)


def test_positions_that_the_model_counts_itself_may_be_given(causal: LineartimeForCausalLM) -> None:
    ids = ids_of(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(
        causal(ids, attention_mask=mask, position_ids=counted).logits, causal(ids, attention_mask=mask).logits
    )


def test_models_of_the_wrong_task_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="task is 'mlm', but must be 'clm' or 'prefix-lm' for a causal language model"):
        AutoModelForCausalLM.from_config(tiny(task="mlm"))
    with pytest.raises(ValueError, match="task is 'clm', but must be 'mlm' for a masked language model"):
        AutoModelForMaskedLM.from_config(tiny())
    with pytest.raises(ValueError, match="use_cache is given, but a masked language model is bidirectional"):
        LineartimeModel(tiny(task="mlm"))(ids_of(1, 4), use_cache=True)
