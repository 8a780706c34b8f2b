"""The encoder-decoder: one function however it is run, and what it learns."""

import dataclasses
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import noisy
from torch import Tensor

import lineartime
from lineartime.data.tokenizers import ByteTokenizer
from lineartime.models.config import LayerConfig
from lineartime.models.systems import PRESETS, build
from lineartime.seq2seq import EncoderDecoder, EncoderDecoderConfig, beam_search, encoder_decoder_config

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
    model: EncoderDecoder = noisy(EncoderDecoder(CONFIGS[name]).double().eval(), 0.1)
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
def test_logit_reads_the_whole_source_and_no_later_target(name: str) -> None:
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
        model = noisy(EncoderDecoder(dataclasses.replace(CONFIGS[name], vocab_size=3)).double().eval(), 1.0)
        with torch.no_grad():
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
        different += beam_search(model, sources, mask, **options) != expected
    assert different > 0, "the first choice was always the best"


@every_config
def test_greedy_writes_the_most_likely_token_after_what_it_has_written(name: str) -> None:
    model, sources = make_model(name), torch.randint(0, 20, (8, 9))
    written = torch.tensor(beam_search(model, sources, start_token=0, stop_token=None, max_tokens=8))
    assert torch.equal(model(sources, F.pad(written[:, :-1], (1, 0))).argmax(-1), written)
    with pytest.raises(ValueError, match="beams is 0, but must be at least 1"):
        beam_search(model, sources, beams=0, start_token=0, stop_token=None, max_tokens=8)


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


def test_inputs_that_do_not_fit_are_named() -> None:
    source = make_ids(9)
    short = EncoderDecoder(dataclasses.replace(TINY, mixer=LayerConfig("gau", d_qk=8, max_length=10))).eval()
    with pytest.raises(ValueError, match="max_tokens is 11, but the decoder of this model reads at most 10 tokens"):
        beam_search(short, source, start_token=0, stop_token=1, max_tokens=11)
    with pytest.raises(ValueError, match="model is in training mode, in which dropout changes its logits"):
        beam_search(EncoderDecoder(dataclasses.replace(TINY, dropout=0.1)), source, start_token=0, stop_token=1, max_tokens=5)
    assert len(beam_search(short, source, start_token=0, stop_token=None, max_tokens=10)[0]) == 10
    with pytest.raises(ValueError, match="model is of type CausalLM, but must be an EncoderDecoder: for a language model"):
        beam_search(build("flash-tiny", n_blocks=1, d_model=32), source, start_token=0, stop_token=None, max_tokens=1)  # type: ignore[arg-type]
