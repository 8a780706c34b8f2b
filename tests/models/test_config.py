import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from lineartime.models import LayerConfig, ModelConfig, presets
from lineartime.models.config import KINDS
from lineartime.models.systems import SYSTEMS, resolve

SIZES = {"n_heads": 4, "d_qk": 64, "chunk_size": 128}


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
    ],
)
def test_values_that_no_model_has_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
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


def test_options_that_are_left_out_take_their_defaults() -> None:
    config = presets()["flash-tiny"]
    data = config.to_dict()
    data["mixer"] = {"kind": "flash", "chunk_size": 128}
    assert ModelConfig.from_dict(data).mixer == LayerConfig("flash", chunk_size=128, d_qk=128, rope=True)
    assert repr(LayerConfig("mlp")) == "LayerConfig('mlp', expansion=4)"


def test_layer_is_described_by_a_value_that_can_be_compared_hashed_copied_and_sent() -> None:
    config = LayerConfig("flash", chunk_size=64)
    assert len({config, LayerConfig("flash", chunk_size=64), LayerConfig("flash")}) == 2
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    config.options["chunk_size"] = 3
    assert config.options["chunk_size"] == 64
    for frozen, field in ((config, "kind"), (presets()["flash-tiny"], "d_model")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, 3)


def test_mechanism_has_one_name() -> None:
    for kind in {system.mixer.name for system in SYSTEMS.values()}:
        mixer = KINDS["mixer"][kind]
        assert mixer.name == kind
        assert mixer.__module__.rpartition(".")[2] == ("flash" if kind == "gau" else kind.replace("-", "_"))
        assert mixer.__name__.lower() == kind.replace("-", "")
