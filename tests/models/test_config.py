import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from lineartime.layers.options import constructor_options
from lineartime.models import LayerConfig, ModelConfig, presets
from lineartime.models.layer_config import KINDS
from lineartime.models.presets import resolve
from lineartime.models.systems import SYSTEMS


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_config_survives_json_exactly(task: Any) -> None:
    for config in presets(task).values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_override_reaches_the_model_and_its_parts() -> None:
    config = resolve("flash-tiny", vocab_size=100, chunk_size=32, dropout=0.1)
    assert (config.vocab_size, config.dropout) == (100, 0.1)
    assert (config.mixer.kind, config.mixer.options["chunk_size"]) == ("flash", 32)
    assert resolve("flash-tiny", mixer={"kind": "gau", "d_qk": 32}).mixer == LayerConfig("gau", d_qk=32)
    assert resolve("flash-tiny", mixer=LayerConfig("gau"), feed_forward=LayerConfig("glu")).feed_forward == LayerConfig("glu")
    assert resolve(config, "mlm").task == "mlm"
    assert resolve(config).task == "clm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chunk": 32}, r"chunk is not an option of this model, which has task, vocab_size, .*chunk_size"),
        ({"vocab_size": 0}, "vocab_size is 0, but must be at least 1"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm', but must be one of 'layernorm', 'scalenorm', 'rmsnorm'"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0, but must be above 0"),
        ({"activation": "gelu"}, "^activation is 'gelu', but must be one of 'relu2'"),
        (
            {"mixer": {"kind": "rnn"}},
            "mixer.kind is 'rnn', which is not known here: import .* or use one of flash, gau, attention",
        ),
        ({"mixer": {"kind": "gau", "chunk_size": 3}}, "mixer.chunk_size is not an option of gau, which has .*d_qk"),
        ({"mixer": {"kind": "gau", "d_qk": 2.5}}, "mixer.d_qk is 2.5, but must be an integer"),
        ({"mixer": 3}, "mixer is 3, but must be a LayerConfig, or the name, of one of these kinds: flash, gau, attention"),
        ({"mixer": LayerConfig("mlp")}, r"mixer is LayerConfig\('mlp', .* must be a LayerConfig, or the name, .*: flash"),
        ({"task": "span"}, "task is 'span', but must be one of 'clm', 'mlm'"),
    ],
)
def test_unknown_and_contradictory_values_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve("flash-tiny", **overrides)


def test_a_name_in_two_parts_is_ambiguous() -> None:
    with pytest.raises(ValueError, match="expansion is an option of both mixer and feed_forward"):
        resolve("flash-tiny", feed_forward=LayerConfig("glu"), expansion=3)


def test_a_layer_may_be_given_by_its_name_alone() -> None:
    config = ModelConfig(task="clm", vocab_size=8, d_model=16, n_blocks=1, mixer="flash", feed_forward="mlp")  # type: ignore[arg-type]
    assert config.mixer == LayerConfig("flash")
    assert config.feed_forward == LayerConfig("mlp")
    with pytest.raises(ValueError, match=r"mixer.kind is \['flash'\], which is not known here"):
        ModelConfig.from_dict({**config.to_dict(), "mixer": {"kind": ["flash"]}})


def test_missing_and_unknown_fields_in_a_dictionary_are_named() -> None:
    data = presets()["flash-tiny"].to_dict()
    with pytest.raises(ValueError, match="layers is not a field here"):
        ModelConfig.from_dict({**data, "layers": 3})
    del data["d_model"]
    with pytest.raises(ValueError, match="d_model is missing"):
        ModelConfig.from_dict(data)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets()["flash-tiny"].d_model = 3  # type: ignore[misc]


def test_options_that_are_left_out_take_their_defaults() -> None:
    config = presets()["flash-tiny"]
    data = config.to_dict()
    data["mixer"] = {"kind": "flash", "chunk_size": 128}
    assert ModelConfig.from_dict(data).mixer == LayerConfig("flash", chunk_size=128, d_qk=128, rope=True)
    assert repr(LayerConfig("mlp")) == "LayerConfig('mlp', expansion=4)"


def test_a_layer_is_described_by_a_value_that_can_be_compared_hashed_copied_and_sent() -> None:
    config = LayerConfig("flash", chunk_size=64)
    assert len({config, LayerConfig("flash", chunk_size=64), LayerConfig("flash")}) == 2
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    config.options["chunk_size"] = 3
    assert config.options["chunk_size"] == 64
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "gau"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("rnn", {}, "kind is 'rnn', but must be one of 'flash'"),
        ("flash", {"chunks": 3}, "chunks is not an option of flash .did you mean chunk_size.*, which has .*d_qk, .*chunk_size"),
        ("flash", {"causal": True}, "causal is not an option of flash"),
        ("flash-global", {"activation": "softmax"}, "activation is not an option of flash-global"),
        ("gau-multi-head", {"max_length": 3}, "max_length is not an option of gau-multi-head"),
        ("gau", {"max_length": 2.0}, "max_length is 2.0, but must be an integer"),
    ],
)
def test_options_that_a_layer_does_not_have_are_named(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerConfig(kind, **options)
    if kind != "rnn" and "causal" not in options:
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            LayerConfig(kind).layer(16, **options)


def test_options_defaults_and_types_are_those_of_constructors() -> None:
    options = constructor_options(LayerConfig("combiner").layer)  # all of them belong to its bases
    assert {name: option.default for name, option in options.items()} == {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "dropout": 0.0,
        "device": None,
        "dtype": None,
        "causal": False,
        "token_shift": False,
        "n_heads": 12,
        "rope": True,
        "chunk_size": 256,
    }
    assert options["chunk_size"].type is int
    assert constructor_options(LayerConfig("flash-global").layer)["chunk_size"].default == 64  # that of the nearest class


def test_a_mechanism_has_one_name() -> None:
    for kind in {system.mixer.name for system in SYSTEMS.values()}:
        mixer = KINDS["mixer"][kind]
        assert mixer.name == kind
        assert mixer.__module__.rpartition(".")[2] == kind.replace("-", "_")
        assert mixer.__name__.lower() == kind.replace("-", "")


def test_every_system_says_what_it_is_in_a_line() -> None:
    for name, system in SYSTEMS.items():
        assert 10 <= len(system.describe()) <= 80, name


def test_learned_positions_need_a_number_of_them_and_no_others_have_one() -> None:
    message = "max_positions is .* with absolute_position = .*, but learned positions need a number of them"
    with pytest.raises(ValueError, match=message):
        resolve("flash-tiny", absolute_position="learned")
    with pytest.raises(ValueError, match=message):
        resolve("flash-tiny", max_positions=100)
    with pytest.raises(ValueError, match="max_positions is 0, but must be at least 1"):
        resolve("transformer-tiny", max_positions=0)
