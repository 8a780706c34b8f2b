"""The decoder computes what the model does, token by token, and draws what `pick` draws."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.definitions import noisy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lineartime.errors import ArgumentError
from lineartime.generation.decoding import Sampling, pick
from lineartime.models import build
from lineartime.models.backbone import ModelState
from lineartime.models.decoder import NativeDecoder
from lineartime.models.language_model import CausalLM
from lineartime.native import native_functions, why_not_native

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason="there is no compiler")
CHUNK = 8
SIZES: dict[str, Any] = {"d_model": 24, "n_blocks": 2, "d_qk": 10, "chunk_size": CHUNK, "vocab_size": 37}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def model_of(dtype: torch.dtype = torch.float64, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    model: CausalLM = noisy(build("flash-tiny", **{**SIZES, **options}).eval().to(dtype), 0.2)
    return model


def decoder_of(model: CausalLM) -> NativeDecoder:
    decoder = model.compile_for_decoding().native
    assert decoder is not None
    return decoder


def state_of(model: CausalLM, streams: int) -> ModelState:
    """The state before the first token. What is never read is not zero."""
    return model.init_state(streams).map(lambda x: x.fill_(1e4) if x.dim() in (3, 4) and x.shape[-2] == CHUNK else x)


def check_equals_forward(model: CausalLM, streams: int, length: int = 21) -> None:
    ids = torch.randint(model.config.vocab_size, (streams, length), generator=torch.Generator().manual_seed(1))
    decoder, state = decoder_of(model), state_of(model, streams)
    found = torch.stack([decoder.logits(ids[:, token].contiguous(), state) for token in range(length)], 1)
    with torch.no_grad():
        wanted = model(ids)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[wanted.dtype] * scale)


@pytest.mark.parametrize("preset", ["flash-tiny", "transformer++-tiny"])
def test_weights_move_into_large_pages(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: set[tuple[int, int]] = set()
    for module in ("language_model", "decoder"):
        monkeypatch.setattr(f"lineartime.models.{module}.use_large_pages", blocks.update)
    model = build(preset, vocab_size=37, n_blocks=1)
    model.compile_for_decoding()
    assert {(x.data_ptr(), x.nbytes) for x in model.parameters() if x.dim() == 2} <= blocks


def test_weights_without_plain_memory_stay_where_they_are() -> None:
    """Those of tensors of other classes, as packages make that quantize, may have no address."""
    with FakeTensorMode():
        build("transformer++-tiny", vocab_size=37, n_blocks=1).compile_for_decoding()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_equal_forward(dtype: torch.dtype) -> None:
    for streams in (1, 3, 32):
        check_equals_forward(model_of(dtype), streams)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "scalenorm"},
        {"norm": "rmsnorm", "final_norm": "layernorm", "embedding_norm": True},
        {"final_norm": "none", "relative_bias": False},
        {"token_shift": True, "d_model": 26},
        {"memory": "mesa"},
        {"memory": "mesa", "token_shift": True},
        {"pattern": ("flash", "flash"), "pattern.1.memory": "mesa"},
        {"tie_word_embeddings": False, "token_types": 2},
        {"absolute_position": "none", "rope": False},
        {"absolute_position": "learned", "max_positions": 21},
        {"normalization": "paper"},
        {"normalization": "paper_sum"},
        {"chunk_size": 1},
        {"chunk_size": 520, "n_blocks": 1},  # a rotary bias
        {"d_model": 34, "d_qk": 2, "expansion": 1},
    ],
    ids=str,
)
def test_every_option_equals_forward(options: dict[str, Any]) -> None:
    for streams in (1, 3):
        check_equals_forward(model_of(**options), streams)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_int8_weights_equal_the_model_that_they_round(dtype: torch.dtype) -> None:
    for options in ({"d_model": 160}, {"tie_word_embeddings": False, "token_types": 2, "memory": "mesa"}):
        model, ids = model_of(dtype, **options), torch.arange(3)
        before, own = {name: weight.clone() for name, weight in model.named_parameters()}, decoder_of(model)
        copies = model.compile_for_decoding("int8").native
        assert copies is not None
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        model.quantize()
        state, of_copies = model.init_state(3), model.init_state(3)
        torch.testing.assert_close(copies.logits(ids, of_copies), decoder_of(model).logits(ids, state), rtol=0.02, atol=0.02)
        assert not torch.equal(own.logits(ids, model.init_state(3)), decoder_of(model).logits(ids, model.init_state(3)))
        for streams in (1, 2, 3, 32):
            check_equals_forward(model, streams)
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and name.endswith(("to_gate_value_base.weight", "to_output.weight", "embedding.weight")):
                step = before[name].float().abs().amax(1, keepdim=True) / 127
                assert ((weight - before[name]).float().abs() <= 0.51 * step + 0.004 * before[name].float().abs()).all(), name
                assert weight.float().div(step).round().unique().numel() > 100


def test_int8_weights_of_zero_and_nan_stay() -> None:
    model = model_of(torch.float32)
    model.backbone.embedding.weight.data[3:].zero_()
    model.backbone.embedding.weight.data[1, 2] = torch.nan
    model.quantize()
    logits = decoder_of(model).logits(torch.tensor([0]), model.init_state(1))[0]
    assert logits[3:].abs().max() == 0
    assert logits[0].isfinite()
    assert logits[1].isnan()


def test_int8_weights_decode_any_number_of_streams_and_give_way_to_hooks() -> None:
    model, ids = model_of(), torch.arange(70) % 37
    decoder = model.compile_for_decoding("int8")
    together, _ = decoder.extend(ids, model.init_state(70))
    parts = [decoder.extend(part, model.init_state(len(part)))[0] for part in ids.split(32)]
    torch.testing.assert_close(together, torch.cat(parts))
    model.quantize()
    model.backbone.blocks[0].mixer.to_output.register_forward_hook(lambda *_: None)
    by_pytorch = model.compile_for_decoding()
    assert by_pytorch.native is None
    torch.testing.assert_close(by_pytorch.extend(ids, model.init_state(70))[0], together)


def test_int8_weights_are_refused_where_nothing_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (build("transformer++-tiny", n_blocks=1), model_of(activation="softmax")):
        before = model.backbone.embedding.weight.clone()
        with pytest.raises(ArgumentError, match=r"weights is int8, .* but it decodes unmodified FLASH layers .* on a CPU"):
            model.quantize()
        assert torch.equal(model.backbone.embedding.weight, before)
    with pytest.raises(ArgumentError, match="weights is 'int4', but must be"):
        model.compile_for_decoding("int4")
    monkeypatch.setenv("LINEARTIME_NATIVE", "0")
    native_functions.cache_clear()
    with pytest.raises(ArgumentError, match="but LINEARTIME_NATIVE is 0: use 'own'"):
        model_of().compile_for_decoding("int8")
    native_functions.cache_clear()


TEAMS = """
import os, threading
import torch
from lineartime.models import build

torch.manual_seed(0)
model = build("flash-tiny", d_model=160, n_blocks=2, d_qk=10, chunk_size=8, vocab_size=37).eval()

def begin(streams=3):
    return model.compile_for_decoding().native, model.init_state(streams), streams

def read(decoder, state, streams, first=0, last=40):
    return torch.stack([decoder.logits(torch.full((streams,), token % 37), state) for token in range(first, last)])

torch.set_num_threads(1)
wanted, one = read(*begin()), read(*begin(1))
for n_threads in (3, 2, 5, 3):
    torch.set_num_threads(n_threads)
    assert torch.equal(read(*begin()), wanted), f"{n_threads} threads"
    assert torch.equal(read(*begin(1)), one), f"{n_threads} threads for one stream"
busy = [threading.Thread(target=lambda: sum(range(3 * 10**6))) for _ in range(2)]
found = []
callers = [threading.Thread(target=lambda own=begin(): found.append(read(*own))) for _ in range(3)]
own = begin()
read(*own, last=1)  # which takes PyTorch's threads, and they do not survive a fork
for thread in (*busy, *callers):
    thread.start()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(read(*own, first=1), wanted[1:]) else 1)
for thread in (*busy, *callers):
    thread.join()
assert len(found) == 3 and all(torch.equal(each, wanted) for each in found), "several callers at once"
assert os.waitpid(child, 0)[1] == 0, "a forked process"
"""


def test_tokens_have_the_same_bits_by_any_team_beside_others_and_after_a_fork() -> None:
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", TEAMS], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("memory", ["sum", "mesa"])
def test_prompt_that_was_read_in_inference_mode_goes_on_outside(memory: str) -> None:
    model, ids = model_of(memory=memory, token_shift=True), torch.arange(24).view(2, 12)
    with torch.inference_mode():
        _, state = model.extend(ids[:, :5])
        expected = model(ids)[:, 5:]
    decoder = decoder_of(model)
    found = torch.stack([decoder.logits(ids[:, token].contiguous(), state) for token in range(5, 12)], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float64] * float(expected.abs().max()))


def test_sinusoids_of_far_positions_are_exact() -> None:
    model, position = model_of(n_blocks=1), 100_003 * 64 + 63
    layer: Any = model.backbone.blocks[0].mixer  # type: ignore[index]
    layer.to_output.weight.data.zero_(), layer.to_output.bias.data.zero_()  # which leaves embeddings and positions
    decoder, state, embedded = decoder_of(model), state_of(model, 1), torch.randn(1, 1, 24, dtype=torch.float64)
    state.blocks[0].position.fill_(position)
    assert model.backbone.position is not None
    for where in (position, position + 1):
        with torch.no_grad():
            wanted = model.backbone.norm(embedded + model.backbone.position(torch.tensor([[where]])))
        torch.testing.assert_close(decoder.hidden(embedded, state), wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=1, top_p=1),
        Sampling(temperature=0.3, top_p=0.7),
        Sampling(temperature=2, top_k=5, top_p=0.8),
        Sampling(temperature=1, top_k=1000, top_p=1),
        Sampling(temperature=1, min_p=0.2),
        Sampling(temperature=1, top_p=1, min_p=0.5),
        Sampling(temperature=1e-30, top_p=1e-6),
    ],
    ids=str,
)
def test_draws_what_pick_draws(sampling: Sampling, dtype: torch.dtype) -> None:
    model = model_of(dtype, vocab_size=700)
    decoder, read, drawn = decoder_of(model), state_of(model, 8), state_of(model, 8)
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(8)
    for _ in range(20):
        uniform = torch.rand(8, dtype=torch.float64, generator=generator)
        logits = decoder.logits(tokens, read).float()
        wanted = pick(logits, sampling, uniform)
        options = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        tokens = decoder.draw(tokens, uniform, *options, drawn)
        assert torch.equal(tokens, wanted)  # in bfloat16, several tokens have the same logit


def test_wrong_arguments_are_refused() -> None:
    model = model_of(absolute_position="learned", max_positions=2)
    decoder, state = decoder_of(model), state_of(model, 1)
    with pytest.raises(ArgumentError, match="holds 37"):
        decoder.logits(torch.tensor([37]), state)
    with pytest.raises(ArgumentError, match="shape"):
        decoder.logits(torch.tensor([1, 2]), state)
    with pytest.raises(ArgumentError, match="summary"):
        decoder.logits(torch.tensor([1]), state_of(model_of(d_qk=8), 1))
    for _ in range(2):
        decoder.logits(torch.tensor([1]), state)
    with pytest.raises(ArgumentError, match="max_positions"):
        decoder.logits(torch.tensor([1]), state)
    assert int(state.blocks[0].position) == 2


# What is done to the first block, or to the norm of the model.
CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "hooked": lambda block, _: block.register_forward_hook(lambda *_: None),
    "replaced": lambda block, _: setattr(block.mixer, "queries_and_keys", block.mixer.queries_and_keys),
    "adapted": lambda block, _: setattr(block.mixer, "to_output", nn.Sequential(block.mixer.to_output)),
    "of two dtypes": lambda _, norm: norm.to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_and_other_layers_have_no_decoder(change: str) -> None:
    model = model_of()
    CHANGES[change](next(iter(model.backbone.blocks)), model.backbone.norm)
    others = model_of(activation="softmax"), model_of(mixer="flash-foreign"), build("flash-quad-tiny", n_blocks=1)
    for each in (model, *others, build("flash-tiny", n_blocks=1, dropout=0.1).train()):
        assert each.compile_for_decoding().native is None
