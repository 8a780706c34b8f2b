"""The encoder-decoder: one function however it is run, and what it learns."""

import dataclasses
import json
import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

import lineartime
from lineartime.data.tokenizers import ByteTokenizer
from lineartime.models.config import LayerConfig
from lineartime.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, beam_search, greedy
from lineartime.models.presets import PRESETS, build, encoder_decoder_config

TINY = EncoderDecoderConfig(
    vocab_size=20,
    d_model=16,
    n_encoder_blocks=2,
    n_decoder_blocks=2,
    mixer=LayerConfig("gau", d_qk=8),
    cross=LayerConfig("cross-gau", n_heads=2, d_qk=8),
)
CONFIGS = {
    "gau": TINY,
    "flash": dataclasses.replace(TINY, mixer=LayerConfig("flash", d_qk=8, chunk_size=4, token_shift=True), norm="scalenorm"),
    "attention": dataclasses.replace(TINY, mixer=LayerConfig("attention", n_heads=2), feed_forward=LayerConfig("glu")),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def make_model(name: str = "gau") -> EncoderDecoder:
    """A model whose parameters all matter."""
    model = EncoderDecoder(CONFIGS[name]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_ids(length: int) -> Tensor:
    return torch.randint(0, 20, (2, length))


@every_config
def test_extend_is_the_forward_pass(name: str) -> None:
    model, source, target = make_model(name), make_ids(9), make_ids(11)
    source_mask = torch.arange(9) < torch.tensor([[6], [9]])
    state, pieces = model.init_state(source, source_mask), []
    for start, stop in pairwise([0, 1, 4, 5, 11]):
        logits, state = model.extend(target[:, start:stop], state)
        pieces.append(logits)
    assert state.position.tolist() == [11, 11]
    torch.testing.assert_close(torch.cat(pieces, 1), model(source, target, source_mask), atol=1e-10, rtol=0)


@every_config
def test_padding_of_either_side_changes_no_logits(name: str) -> None:
    model, source, target = make_model(name), make_ids(9), make_ids(7)
    source_mask, target_mask = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.bool)
    source_mask[:, 3:8] = target_mask[:, 2:6] = True
    padded = model(source, target, source_mask, target_mask)[:, 2:6]
    assert padded.shape == (2, 4, 20)
    torch.testing.assert_close(padded, model(source[:, 3:8], target[:, 2:6]), atol=1e-10, rtol=0)


@every_config
def test_a_logit_reads_the_whole_source_and_no_later_target(name: str) -> None:
    model, source, target = make_model(name), make_ids(9), make_ids(7)
    logits = model(source, target)
    changed = target.clone()
    changed[:, 4:] = 19 - changed[:, 4:]
    torch.testing.assert_close(model(source, changed)[:, :4], logits[:, :4], atol=1e-10, rtol=0)
    for place in range(9):
        changed = source.clone()
        changed[:, place] = 19 - changed[:, place]
        assert not torch.allclose(model(changed, target)[:, 0], logits[:, 0])


@every_config
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = make_model(name)
    model(make_ids(9), make_ids(7)).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.any(), parameter_name


def test_one_embedding_serves_source_target_and_logits() -> None:
    tables = [name for name, parameter in EncoderDecoder(TINY).named_parameters() if 20 in parameter.shape]
    assert tables == ["encoder.embedding.weight"]


def test_a_batch_is_written_like_its_rows() -> None:
    model, source = make_model(), make_ids(9)
    source_mask = torch.arange(9) < torch.tensor([[6], [9]])
    arguments = {"start_token": 0, "max_tokens": 8}
    never = greedy(model, source, source_mask, stop_token=None, **arguments)
    assert [len(row) for row in never] == [8, 8]
    assert greedy(model, source[:1, :6], stop_token=None, **arguments) == never[:1]
    stop_token = never[0][0]
    for row, whole in zip(greedy(model, source, source_mask, stop_token=stop_token, **arguments), never, strict=True):
        assert row == (whole[: whole.index(stop_token)] if stop_token in whole else whole)


@every_config
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_of_all_targets(name: str, length_penalty: float) -> None:
    sources = torch.tensor([[0, 1, 2, 0], [1, 2, 2, 0], [2, 1, 0, 0]])
    mask = torch.arange(4) < torch.tensor([[2], [3], [4]])
    ended = [(*body, 2) for length in range(4) for body in product((0, 1), repeat=length)]
    targets = torch.tensor([each + (0,) * (4 - len(each)) for each in [*ended, *product((0, 1), repeat=4)]])
    lengths = torch.tensor([*map(len, ended), *[4] * 16])
    read = F.pad(targets[:, :-1], (1, 0), value=1)
    options: dict[str, Any] = {"start_token": 1, "stop_token": 2, "max_tokens": 4}
    different = 0
    for _ in range(6):
        model = EncoderDecoder(dataclasses.replace(CONFIGS[name], vocab_size=3)).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
            model.encoder.embedding.weight.mul_(0.2)  # so that no token is certain
        expected = []
        for source, real in zip(sources, mask, strict=True):
            logits = model(source[real].expand(len(targets), -1), read)
            likelihoods = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            sums = likelihoods.masked_fill(torch.arange(4) >= lengths[:, None], 0).sum(-1)
            best = int((sums / lengths**length_penalty).argmax())
            expected.append([token for token in targets[best, : lengths[best]].tolist() if token != 2])
        assert beam_search(model, sources, mask, beams=16, length_penalty=length_penalty, **options) == expected
        one = beam_search(model, sources[:1, mask[0]], beams=16, length_penalty=length_penalty, **options)
        assert one == expected[:1]
        different += greedy(model, sources, mask, **options) != expected
    assert different > 0, "the first choice was always the best"


@every_config
def test_one_beam_is_greedy(name: str) -> None:
    model, sources = make_model(name), torch.randint(0, 20, (8, 9))
    for stop_token in (None, *greedy(model, sources, start_token=0, stop_token=None, max_tokens=8)[0][:3]):
        arguments: dict[str, Any] = {"start_token": 0, "stop_token": stop_token, "max_tokens": 8}
        assert beam_search(model, sources, beams=1, **arguments) == greedy(model, sources, **arguments)
    with pytest.raises(ValueError, match="beams is 0, but must be at least 1"):
        beam_search(model, sources, beams=0, **arguments)


def test_presets_make_encoder_decoders() -> None:
    for preset in [name for name in PRESETS if name.endswith("-tiny")]:
        try:
            config = encoder_decoder_config(preset, d_model=32, n_encoder_blocks=1, n_decoder_blocks=1, vocab_size=20)
        except ValueError as error:
            allowed = "which sets (norm, absolute_position|pattern)|coder must be causal|coder is not causal"
            assert re.search(allowed, str(error)), preset  # noqa: PT017
        else:
            model = EncoderDecoder(config)
            model(make_ids(9), make_ids(7))
            assert model.config.cross.options["gated"] == (config.feed_forward is None)
    changed = encoder_decoder_config("flash-quad-tiny", **{"cross.n_heads": 4, "cross.gated": False})
    assert (changed.cross.options["n_heads"], changed.cross.options["gated"]) == (4, False)
    with pytest.raises(ValueError, match=r"d_qk is an option of both mixer and cross: set mixer.d_qk or cross.d_qk"):
        changed.override(d_qk=8)


def test_saved_encoder_decoder_loads_equal_and_readers_of_language_models_refuse_it(tmp_path: Path) -> None:
    model = EncoderDecoder(dataclasses.replace(TINY, vocab_size=258))
    lineartime.save(model, ByteTokenizer(), tmp_path / "model")
    again = lineartime.load(tmp_path / "model")
    assert isinstance(again, EncoderDecoder)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(lineartime.LineartimeError, match=r"model holds an encoder-decoder, no language model"):
        lineartime.evaluate(tmp_path / "model")


def test_a_config_survives_json_exactly() -> None:
    for config in CONFIGS.values():
        assert EncoderDecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_configs_that_make_no_model_are_named() -> None:
    for changes, message in (
        ({"cross": LayerConfig("gau")}, "cross is LayerConfig.*, but must be a LayerConfig, or the name, .*: cross-gau"),
        ({"mixer": LayerConfig("linformer")}, "mixer is linformer, but the decoder must be causal: "),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cross\.activation is 'gelu', but must be one of 'relu2'"):
        EncoderDecoderConfig.from_dict({**TINY.to_dict(), "cross": {"kind": "cross-gau", "activation": "gelu"}})
    with pytest.raises(ValueError, match="n_heads is 3, but must divide d_qk = 8"):
        EncoderDecoder(dataclasses.replace(TINY, cross=LayerConfig("cross-gau", n_heads=3, d_qk=8)))


def test_inputs_that_do_not_fit_are_named() -> None:
    model, source, target = EncoderDecoder(TINY), make_ids(9), make_ids(7)
    with pytest.raises(ValueError, match=r"target_ids has shape \[1, 7\], but must have 2 rows, like source_ids"):
        model(source, target[:1])
    with pytest.raises(ValueError, match=r"target_mask has shape \[2, 9\], but must be \[B, T\] = \[2, 7\]"):
        model(source, target, None, torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="state is of 2 streams, but there are tokens of 1"):
        model.extend(target[:1], model.init_state(source))
    short = EncoderDecoder(dataclasses.replace(TINY, mixer=LayerConfig("gau", d_qk=8, max_length=10))).eval()
    with pytest.raises(ValueError, match="max_tokens is 11, but the decoder of this model reads at most 10 tokens"):
        greedy(short, source, start_token=0, stop_token=1, max_tokens=11)
    for name in ("start_token", "stop_token"):
        arguments: dict[str, Any] = {"start_token": 0, "stop_token": 1, "max_tokens": 5, name: 20}
        with pytest.raises(ValueError, match=f"{name} is 20, but must be at least 0 and at most 19"):
            greedy(model, source, **arguments)
    with pytest.raises(ValueError, match="model is in training mode, in which dropout changes its logits"):
        greedy(EncoderDecoder(dataclasses.replace(TINY, dropout=0.1)), source, start_token=0, stop_token=1, max_tokens=5)
    assert len(greedy(short, source, start_token=0, stop_token=None, max_tokens=10)[0]) == 10
    with pytest.raises(ValueError, match="model is of type CausalLM, but must be an EncoderDecoder: for a language model"):
        greedy(build("flash-tiny", n_blocks=1, d_model=32), source, start_token=0, stop_token=None, max_tokens=1)  # type: ignore[arg-type]


# What it learns --------------------------------------------------------------------------------------------------------

PADDING, START, STOP, FIRST_SYMBOL, N_SYMBOLS = 0, 1, 2, 3, 10
LONGEST, STEPS, WARM_UP, STEADY = 8, 400, 20, 240


def random_strings(count: int, shortest: int, generator: torch.Generator) -> list[Tensor]:
    lengths = torch.randint(shortest, LONGEST + 1, (count,), generator=generator).tolist()
    return [torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + N_SYMBOLS, (length,), generator=generator) for length in lengths]


def padded(strings: list[Tensor], *, before: int | None = None, after: int | None = None) -> Tensor:
    rows = [F.pad(string, (1, 0), value=before) if before is not None else string for string in strings]
    rows = [F.pad(row, (0, 1), value=after) if after is not None else row for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=PADDING)


@pytest.mark.nightly
@pytest.mark.parametrize(("task", "n_heads"), [(torch.clone, 4), (lambda string: string.flip(0), 1)], ids=["copy", "reverse"])
def test_strings_never_seen_are_copied_and_reversed_exactly(task: Callable[[Tensor], Tensor], n_heads: int) -> None:
    mixer = LayerConfig("gau", d_qk=32, rope=False, max_length=16)
    cross = LayerConfig("cross-gau", n_heads=n_heads, d_qk=32)
    model = EncoderDecoder(EncoderDecoderConfig(FIRST_SYMBOL + N_SYMBOLS, 64, 1, 2, mixer, cross))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - STEADY), 1.0)
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        strings = random_strings(48, 1, generator)
        targets = [task(string) for string in strings]
        source, target = padded(strings, after=STOP), padded(targets, before=START)
        logits = model(source, target, source != PADDING, target != PADDING)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), padded(targets, after=STOP).flatten(), ignore_index=PADDING).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    strings = random_strings(400, 6, torch.Generator().manual_seed(2))  # of a million and more: hardly one of them was seen
    source = padded(strings, after=STOP)
    written = greedy(model.eval(), source, source != PADDING, start_token=START, stop_token=STOP, max_tokens=LONGEST + 2)
    exact = [row == task(string).tolist() for row, string in zip(written, strings, strict=True)]
    assert sum(exact) / len(exact) >= 0.99  # nearly all seeds get all of them right
