"""Hybrids: models whose blocks take their mixers from a pattern."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.export import export_step
from lineartime.models import CausalLM, LayerConfig, ModelConfig
from lineartime.models.cost import cost, model_tensors
from lineartime.models.systems import nearest_preset, presets, resolve
from lineartime.ops.context import ContextGroup
from lineartime.seq2seq import encoder_decoder_config

PATTERNS = {
    "flash and gau": ("flash", "flash", "flash", "gau"),
    "flash and attention": ("flash", "attention"),
    "weighted and gau": ("flash-weighted", "gau"),  # which takes streams at one position, one group after another
}
SMALL = {"d_model": 16, "n_blocks": 5, "vocab_size": 40, "d_qk": 8, "chunk_size": 8}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def build(pattern: Any, task: Any = "clm", **overrides: Any) -> CausalLM:
    """A model in float64 whose mixers change the logits."""
    model = lineartime.build("flash-tiny", task, pattern=pattern, **{**SMALL, **overrides}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert isinstance(model, CausalLM)
    return model


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@every_pattern
@pytest.mark.parametrize("feed_forward", [None, "glu"])
def test_hybrid_is_the_composition_of_its_blocks(pattern: tuple[str, ...], feed_forward: str | None) -> None:
    model, ids = build(pattern, feed_forward=feed_forward), torch.randint(0, 40, (1, 50))
    backbone, boundaries = model.backbone, torch.tensor([0, 21, 50])
    x = backbone.embedding(ids) + backbone.position(torch.cat([torch.arange(21), torch.arange(29)]))
    kinds = []
    for block in backbone.blocks:
        x = block.feed_forward(block.mixer(x, cu_seqlens=boundaries))
        kinds.append(block.mixer.name)
        assert (type(block.feed_forward) is torch.nn.Identity) == (feed_forward is None)
    assert kinds == [pattern[place % len(pattern)] for place in range(5)]
    close(model(ids, cu_seqlens=boundaries), model.logits(backbone.norm(x)))


@every_pattern
@torch.no_grad()
def test_padding_packs_the_future_and_cuts_of_streams_change_nothing(pattern: tuple[str, ...]) -> None:
    model, lengths = build(pattern), (30, 9, 21)
    rows = [torch.randint(0, 40, (1, length)) for length in lengths]
    alone = [model(row) for row in rows]
    mask = torch.arange(30) >= 30 - torch.tensor(lengths)[:, None]
    padded = torch.zeros(3, 30, dtype=torch.long).masked_scatter(mask, torch.cat(rows, 1))
    close(model(padded, mask)[mask], torch.cat(alone, 1)[0])
    pack = torch.cat(rows, 1)
    close(model(pack, cu_seqlens=torch.tensor([0, 30, 39, 60])), torch.cat(alone, 1))
    other = rows[0].clone()
    other[:, 17:] = 39 - other[:, 17:]
    assert torch.equal(model(other)[:, :17], alone[0][:, :17])

    for cut in (1, 8, 13):  # streams at different positions go on together, by several tokens and by one
        state = model.init_state(3)
        _, state = model.extend(padded[:, :cut], state, mask[:, :cut])
        logits, state = model.extend(padded[:, cut:28], state, mask[:, cut:28])
        rest = [one[:, max(0, one.shape[1] - 30 + cut) : -2] for one in alone]
        close(logits[mask[:, cut:28]], torch.cat(rest, 1)[0])
        decoder = model.compile_for_decoding()
        assert decoder.native is None
        for token in (-2, -1):
            step, state = decoder.extend(padded[:, token], state)
            close(step, torch.cat([one[:, token] for one in alone]))
        assert state.position.tolist() == list(lengths)


def test_hybrid_reads_prefixes_where_all_of_its_mixers_do() -> None:
    model, ids = build(("flash", "gau", "attention"), "prefix-lm"), torch.randint(0, 40, (2, 30))
    whole = model(ids, prefix_lengths=torch.tensor([11, 11]))
    first, state = model.read_prefix(ids[:, :11])
    close(torch.cat([first, model.extend(ids[:, 11:], state)[0]], 1), whole)
    assert not torch.allclose(whole[:, :10], model(ids)[:, :10])


def test_limits_of_one_mixer_are_those_of_a_hybrid() -> None:
    model, ids = build(("flash", "gau")), torch.randint(0, 40, (1, 16))
    with pytest.raises(ArgumentError, match=r"^context is given, but GAU needs its whole sequence in one process: only FLASH"):
        model(ids, context=ContextGroup("none", 0, 2))
    with pytest.raises(ArgumentError, match=r"^model is made of GAU, which has no step with a state of constant size"):
        export_step(model)
    with pytest.raises(ArgumentError, match=r"^preset is 'hybrid-gau-tiny', which sets pattern, but encoder-decoders do not"):
        encoder_decoder_config("hybrid-gau-tiny")
    with pytest.raises(ArgumentError, match=r"^task is 'prefix-lm', but a model of flash-local cannot read a prefix in both"):
        resolve("flash-tiny", "prefix-lm", pattern=("flash", "flash-local"))


def test_every_block_of_a_hybrid_learns_and_what_it_costs_is_counted() -> None:
    config = resolve("hybrid-attention-tiny", n_blocks=6, d_model=32)
    model = lineartime.build(config)
    ids = torch.randint(0, 258, (2, 200))
    model.loss(ids, ids.roll(-1, 1)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    found = cost(config, 200)
    state = model.extend(ids[:1])[1]  # type: ignore[union-attr]
    assert (found.parameters, found.state_bytes) == (model.n_parameters, state.nbytes)
    alone = [cost(replace(config, pattern=(), mixer=mixer, n_blocks=1), 200).flops_per_token for mixer in config.mixers]
    without = cost(replace(config, pattern=(), n_blocks=2), 200).flops_per_token - alone[0]
    assert found.flops_per_token == pytest.approx(5 * alone[0] + alone[3] - 5 * (alone[0] - without))
    tensors = model.state_dict()
    assert {name: x.shape for name, x in model_tensors(config)} == {name: x.shape for name, x in tensors.items()}


def test_hybrid_is_saved_and_a_model_without_a_pattern_is_as_before(tmp_path: Any) -> None:
    model = lineartime.build("flash-tiny", pattern="flash, gau", **{**SMALL, "vocab_size": 258})
    lineartime.save(model, ByteTokenizer(), tmp_path / "hybrid")
    loaded, ids = lineartime.load(tmp_path / "hybrid"), torch.arange(20)[None]
    assert loaded.config == model.config
    assert torch.equal(loaded(ids), model(ids))
    data = resolve("flash-tiny").to_dict()
    assert "pattern" not in data  # digests of models, and what earlier versions can read, stay the same
    assert ModelConfig.from_dict(json.loads(json.dumps(data))) == resolve("flash-tiny")
    for name, kind in (("hybrid-gau-tiny", "gau"), ("hybrid-attention-base", "attention")):
        assert [mixer.kind for mixer in presets()[name].pattern] == ["flash", "flash", "flash", kind]


def test_name_in_a_pattern_is_the_mixer_of_the_model_or_has_its_size() -> None:
    config = resolve("flash-next-tiny", pattern="flash,attention,gau")
    assert config.pattern[0] == config.mixer == resolve("flash-next-tiny").mixer
    assert config.pattern[1:] == (LayerConfig("attention", n_heads=4), LayerConfig("gau", d_qk=64, initial_scores="unit"))
    again = config.override(pattern=("gau", "flash"))
    assert again.pattern == (config.pattern[2], config.pattern[0])
    assert again.mixer == config.pattern[2]
    assert resolve("linformer-tiny", pattern=("flash", "gau")).mixer.options["chunk_size"] == 128
    assert resolve(config, pattern=()) == resolve("flash-next-tiny")


def test_option_is_set_in_all_mixers_or_in_one() -> None:
    config = resolve("hybrid-gau-tiny", **{"pattern.3.d_qk": 16, "d_qk": 8, "chunk_size": 32})
    assert [mixer.options["d_qk"] for mixer in config.pattern] == [8, 8, 8, 16]
    assert [mixer.options.get("chunk_size") for mixer in config.pattern] == [32, 32, 32, None]
    assert config.mixer == config.pattern[0]
    assert [mixer.options["memory"] for mixer in resolve("flash-memory-tiny").mixers] == ["sum", "sum", "mesa", "sum"]
    assert {mixer.options["memory"] for mixer in resolve("flash-memory-tiny", memory="mesa").mixers} == {"mesa"}
    assert {mixer.options["memory"] for mixer in resolve("flash-memory-tiny", pattern="flash,flash").mixers} == {"sum"}
    both = resolve("hybrid-gau-tiny", feed_forward="glu", **{"mixer.expansion": 3, "pattern.0.expansion": 1})
    assert [layer.options["expansion"] for layer in both.layers.values()] == [1, 3, 3, 3, 4]


def test_every_hybrid_is_a_preset_with_overrides() -> None:
    """Runs are started and repeated with them."""
    mixed = (LayerConfig("gau", d_qk=16), LayerConfig("gau", d_qk=8), LayerConfig("flash", memory="mesa"))
    for preset in ("hybrid-gau-tiny", "flash-tiny", "transformer++-tiny"):
        for pattern in (mixed, ("flash",), ()):
            config = resolve(preset, pattern=pattern, vocab_size=100)
            assert resolve(nearest_preset(config), config.task, **config.values) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pattern": "flash,gao"}, r"^pattern\[1\].kind is 'gao', which is not known here: .*use one of flash, gau"),
        ({"pattern": ("flash", 3)}, r"^pattern\[1\] is 3, but must be a LayerConfig, or the name, of one of these"),
        ({"pattern": ({"kind": "gau", "chunk_size": 3},)}, r"^pattern\[0\].chunk_size is not an option of gau, which has"),
        ({"pattern": "flash,gau", "pattern.2.d_qk": 8}, r"^pattern\.2\.d_qk is not an option of this model, which has .*d_qk"),
        ({"pattern": "flash,gau", "mixer": "gau"}, "^mixer is gau, but must equal the first one of the pattern, flash, in all"),
        ({"pattern": "flash,mc-tfm", "feed_forward": "glu", "expansion": 2}, "^expansion is an option of both mixer and feed"),
    ],
)
def test_wrong_patterns_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve("flash-tiny", **overrides)
