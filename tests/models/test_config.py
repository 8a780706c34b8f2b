"""Models as plain data: their options, the table of systems, hybrids, and what models cost."""

import copy
import dataclasses
import json
import pickle
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lineartime
from lineartime.choices import BYTE_VOCABULARY
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.export import export_step
from lineartime.models import LayerConfig, ModelConfig, presets
from lineartime.models import cost as costs
from lineartime.models.config import Task
from lineartime.models.cost import cost, count_parameters, stream_bytes
from lineartime.models.systems import PRESETS, SYSTEMS, nearest_preset, resolve
from lineartime.ops.context import ContextGroup
from lineartime.seq2seq import encoder_decoder_config

SIZES = {"n_heads": 4, "d_qk": 64, "chunk_size": 128}
SMALL: dict[str, Any] = {"d_model": 16, "n_blocks": 2, "d_qk": 8, "chunk_size": 8}
MILLIONS = {
    **dict.fromkeys(["flash-base", "flash-quad-base"], 112),
    **dict.fromkeys([f"{name}-base" for name in ("transformer", "transformer+", "transformer++", "performer")], 110),
    **dict.fromkeys(["mhsa-relu2-base", "mhsa-single-head-base"], 110),
    **dict.fromkeys(["flash-large", "flash-quad-large"], 496),
    **dict.fromkeys(["transformer+-large", "transformer++-large"], 486),
    **dict.fromkeys(["gau-ablation", "gau-softmax-ablation", "gau-multi-head-ablation"], 105),
    **{"combiner-base": 124, "combiner-large": 562, "gau-ungated-ablation": 131},
}
"""The parameter counts that the paper states, in millions."""


def millions(name: str, task: Task = "clm") -> float:
    return count_parameters(resolve(name, task)) / 1e6


# Configurations -------------------------------------------------------------------------------------------------------


def test_config_survives_json_exactly() -> None:
    for config in (*presets("clm").values(), *presets("mlm").values()):
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_override_reaches_the_model_and_its_parts() -> None:
    config = resolve("flash-tiny", vocab_size=100, chunk_size=32, dropout=0.1)
    assert (config.vocab_size, config.dropout) == (100, 0.1)
    assert (config.mixer.kind, config.mixer.options["chunk_size"]) == ("flash", 32)
    assert resolve("flash-tiny", mixer={"kind": "gau", "d_qk": 32}).mixer == LayerConfig("gau", d_qk=32)
    assert resolve("flash-tiny", mixer=LayerConfig("gau"), feed_forward=LayerConfig("glu")).feed_forward == LayerConfig("glu")
    assert resolve(config, "mlm").task == "mlm"
    assert [resolve("flash-base", task).norm for task in ("clm", "mlm")] == ["layernorm", "scalenorm"]
    assert resolve(config).task == "clm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chunk": 32}, r"^chunk is not an option of this model, which has task, vocab_size, .*chunk_size"),
        ({"vocab_size": 0}, "^vocab_size is 0, but must be at least 1"),
        ({"activation": "gelu"}, "^activation is 'gelu', but must be one of 'relu2'"),
        ({"mixer": "flash-locl"}, "^mixer.kind is 'flash-locl' .did you mean flash-local.*, which is not known here: import"),
        ({"mixer": {"kind": "gau", "chunk_size": 3}}, "^mixer.chunk_size is not an option of gau, which has .*d_qk"),
        ({"mixer": LayerConfig("mlp")}, r"^mixer is LayerConfig\('mlp', .* must be a LayerConfig, or the name, .*: flash"),
        ({"mixer": "linformer"}, "^task is 'clm', but a model of linformer cannot be causal: .*; use `task='mlm'`"),
        ({"feed_forward": "glu", "expansion": 3}, "^expansion is an option of both mixer and feed_forward"),
        ({"absolute_position": "learned"}, "^max_positions is None with absolute_position = 'learned', but learned positions"),
        ({"pattern": "flash,gao"}, r"^pattern\[1\].kind is 'gao', which is not known here: .*use one of flash, gau"),
        ({"pattern": ("flash", 3)}, r"^pattern\[1\] is 3, but must be a LayerConfig, or the name, of one of these"),
        ({"pattern": ({"kind": "gau", "chunk_size": 3},)}, r"^pattern\[0\].chunk_size is not an option of gau, which has"),
        ({"pattern": "flash,gau", "pattern.2.d_qk": 8}, r"^pattern\.2\.d_qk is not an option of this model, which has .*d_qk"),
        ({"pattern": "flash,gau", "mixer": "gau"}, "^mixer is gau, but must equal the first one of the pattern, flash, in all"),
        ({"pattern": "flash,mc-tfm", "feed_forward": "glu", "expansion": 2}, "^expansion is an option of both mixer and feed"),
    ],
)
def test_values_that_no_model_has_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve("flash-tiny", **overrides)


def test_mixer_by_name_has_the_sizes_of_the_preset() -> None:
    for mixer in ("attention", "gau", "combiner", "flash-local"):
        options = resolve("flash-tiny", mixer=mixer).mixer.options
        assert [options.get(name, size) for name, size in SIZES.items()] == list(SIZES.values())
    options = resolve("flash-tiny", mixer={"kind": "flash-local", "chunk_size": 32}, d_qk=16).mixer.options
    assert (options["chunk_size"], options["d_qk"]) == (32, 16)


def test_longest_sequence_is_asked_of_mixers_as_the_model_has_them() -> None:
    assert resolve("flash-tiny", pattern="flash,gau", max_length=300).longest_sequence == 300
    assert resolve("linformer-tiny", "mlm", max_length=70).longest_sequence == 70


def test_layer_is_described_by_a_value_that_can_be_compared_hashed_copied_and_sent() -> None:
    config = LayerConfig("flash", chunk_size=64)
    assert len({config, LayerConfig("flash", chunk_size=64), LayerConfig("flash")}) == 2
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    config.options["chunk_size"] = 3
    assert config.options["chunk_size"] == 64
    for frozen, field in ((config, "kind"), (presets()["flash-tiny"], "d_model")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, 3)


# Systems --------------------------------------------------------------------------------------------------------------


def test_models_are_as_large_as_in_the_paper() -> None:
    for name, expected in MILLIONS.items():
        assert round(millions(name, "clm")) == round(millions(name, "mlm")) == expected, name


def test_every_system_has_a_base_and_a_tiny_preset_of_bytes() -> None:
    assert ByteTokenizer.vocab_size == BYTE_VOCABULARY == 258
    for system in SYSTEMS:
        assert f"{system}-base" in PRESETS
        task: Task = "mlm" if SYSTEMS[system].mixer.why_only_causal is None else "clm"
        assert 2 <= millions(f"{system}-tiny", task) <= 4.5, system


def test_presets_of_a_task_are_of_systems_that_can_learn_it() -> None:
    known = {task: presets(task) for task in get_args(Task)}
    able = {task: {system for system in SYSTEMS if f"{system}-base" in known[task]} for task in known}
    assert set(SYSTEMS) - able["mlm"] == {"retnet", "gla", "mamba2", "deltanet", "gated-deltanet", "rwkv7", "lact"}
    assert able["mlm"] - able["clm"] == {"linformer", "nystromformer", "flash-first-to-all", "flash-cls"}
    assert {"flash", "flash-quad", "transformer", "transformer++"} <= able["prefix-lm"] < able["clm"]
    with pytest.raises(ValueError, match=r"^task is 'mlm', but a model of gla must be causal: .*; use `task='clm'`"):
        lineartime.build("gla-tiny", "mlm")
    assert lineartime.build("linformer-tiny", mixer="flash", n_blocks=1).config.mixer.kind == "flash"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"preset is 'flash-huge', which is not a preset .*large.*: use a name that `lineartime presets` lists\.$",
    ):
        lineartime.build("flash-huge")
    with pytest.raises(ValueError, match="task is 'qa', but must be one of 'clm', 'mlm'"):
        lineartime.build("flash-tiny", task="qa")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"preset_or_config is None, but must be the name of a preset or a ModelConfig"):
        lineartime.build(None)  # type: ignore[call-overload]


# Hybrids --------------------------------------------------------------------------------------------------------------


def test_limits_of_one_mixer_are_those_of_a_hybrid() -> None:
    model, ids = lineartime.build("flash-tiny", pattern=("flash", "gau"), **SMALL), torch.zeros(1, 16, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"^context is given, but GAU needs its whole sequence in one process: only FLASH"):
        model(ids, context=ContextGroup("none", 0, 2))
    prefixed = lineartime.build("flash-tiny", "prefix-lm", **SMALL)
    with pytest.raises(ArgumentError, match="prefix_lengths is given, but sequences that are split over processes can have"):
        prefixed(ids, prefix_lengths=torch.tensor([1]), context=ContextGroup("none", 0, 2))
    with pytest.raises(ArgumentError, match=r"^model is made of GAU, which has no step with a state of constant size"):
        export_step(model)
    with pytest.raises(ArgumentError, match=r"^preset is 'hybrid-gau-tiny', which sets pattern, but encoder-decoders do not"):
        encoder_decoder_config("hybrid-gau-tiny")
    with pytest.raises(ArgumentError, match=r"^task is 'prefix-lm', but a model of flash-local cannot read a prefix in both"):
        resolve("flash-tiny", "prefix-lm", pattern=("flash", "flash-local"))


def test_hybrid_is_saved_and_a_model_without_a_pattern_is_as_before(tmp_path: Any) -> None:
    model = lineartime.build("flash-tiny", pattern="flash, gau", **SMALL)
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


# Costs ----------------------------------------------------------------------------------------------------------------


def test_operations_of_flash_are_those_inside_chunks_and_of_their_sums() -> None:
    config, length = resolve("flash-tiny"), 1024
    (d, n_blocks), (s, c) = (config.d_model, config.n_blocks), (config.mixer.options[name] for name in ("d_qk", "chunk_size"))
    maps, inside = 2 * d * (2 * 2 * d + s) + 2 * 2 * d * d, 2 * c * (s + 2 * d)
    across = 2 * 2 * s * 2 * d * (1 - c / length)  # the first chunk reads no sum, and the last is in none
    assert cost(config, length).flops_per_token == pytest.approx(n_blocks * (maps + inside + across) + 2 * d * 258)


@pytest.mark.parametrize("name", ["flash-tiny", "transformer-tiny", "hybrid-gau-tiny", "hybrid-attention-tiny", "gla-tiny"])
def test_costs_found_on_the_first_blocks_are_those_of_the_whole_model(name: str) -> None:
    config = resolve(name, n_blocks=6)
    found, model, ids = cost(config, 300), lineartime.build(config), torch.zeros(1, 300, dtype=torch.long)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        lineartime.build(config)(ids.to("meta"))
    assert found.flops_per_token * 300 == pytest.approx(counter.get_total_flops())
    assert (found.parameters, found.state_bytes) == (model.n_parameters, model.extend(ids)[1].nbytes)  # type: ignore[union-attr]
    assert {name: x.shape for name, x in costs.model_tensors(config)} == {
        name: x.shape for name, x in model.state_dict().items()
    }


def test_linear_systems_stream_with_constant_memory() -> None:
    linear = ["flash", "flash-local", "flash-overlapping", "mc-tfm++", "performer", "linear-elu", "efficient", "linear-taylor"]
    growing = ["combiner", "flash-weighted", "flash-quad", "transformer++", "sparse", "reformer"]
    for system in (*linear, *growing):
        short, long = (stream_bytes(resolve(f"{system}-tiny"), length) for length in (256, 1024))
        assert short is not None
        assert long is not None
        assert long > short if system in growing else long == short, system


def test_the_option_that_needs_too_much_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "memory_bytes", lambda device: 4 * 10**9)
    with pytest.raises(ArgumentError, match=r"^n_blocks is 5,000, with which the model has"):
        costs.check_memory(resolve("flash-base", n_blocks=5000))
    with pytest.raises(ArgumentError, match=r"^vocab_size is 100,000,000, with which the model has"):
        costs.check_memory(resolve("flash-base", vocab_size=10**8))
    tokens: list[tuple[dict[str, int], str]] = [
        ({"sequences": 4, "tokens": 4 * 2**20}, r"^context_length puts 1,048,576 tokens in memory .* least 5.7\d* GB"),
        ({"sequences": 4, "tokens": 4 * 2**18}, r"^batch_size puts 1,048,576 tokens in memory .* least 5.7\d* GB"),
        ({"sequences": 1, "tokens": 2**10, "step_tokens": 2**28}, r"^tokens_per_batch puts 268,435,456 tokens .* 4.35 GB"),
    ]
    for of_a_step, message in tokens:
        with pytest.raises(ArgumentError, match=message):
            costs.check_memory(resolve("flash-tiny"), copies=4, **of_a_step)
