import dataclasses
import inspect
import json
from typing import Any

import pytest

from lineartime.models import FLASHConfig, GAUConfig, GLUConfig, ModelConfig, presets
from lineartime.models.mixers import MIXER_KINDS, MixerConfig
from lineartime.models.presets import resolve


@pytest.mark.parametrize("task", ["clm", "mlm"])
@pytest.mark.parametrize("name", presets())
def test_a_config_survives_json_exactly(name: str, task: Any) -> None:
    config = presets(task)[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_override_reaches_the_model_and_its_parts() -> None:
    config = resolve("flash-tiny", vocab_size=100, chunk_size=32, dropout=0.1)
    assert (config.vocab_size, config.dropout) == (100, 0.1)
    assert isinstance(config.mixer, FLASHConfig)
    assert config.mixer.chunk_size == 32
    assert resolve("flash-tiny", mixer={"kind": "gau", "d_qk": 32}).mixer == GAUConfig(d_qk=32)
    assert resolve("flash-tiny", mixer=GAUConfig(), feed_forward=GLUConfig()).feed_forward == GLUConfig()
    assert resolve(config, "mlm").task == "mlm"
    assert resolve(config).task == "clm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chunk": 32}, r"'chunk' is not a field of this model; it has task, vocab_size, .*chunk_size"),
        ({"vocab_size": 0}, "vocab_size is 0, but must be at least 1"),
        ({"vocab_size": "many"}, "model.vocab_size is 'many', but must be a whole number"),
        ({"vocab_size": True}, "model.vocab_size is True"),
        ({"norm": "batchnorm"}, "model.norm is 'batchnorm', but must be one of 'layernorm', 'scalenorm', 'rmsnorm'"),
        ({"chunk_size": 2.5}, "mixer.chunk_size is 2.5, but must be a whole number"),
        ({"activation": "gelu"}, "mixer.activation is 'gelu', but must be one of 'relu2'"),
        ({"mixer": {"kind": "rnn"}}, "mixer.kind is 'rnn', but must be one of 'flash', 'gau', 'attention'"),
        ({"mixer": {"kind": "gau", "chunk_size": 3}}, "mixer has no field 'chunk_size'; it has d_qk"),
        ({"mixer": None}, "model.mixer is None"),
        ({"mixer": "flash"}, "model.mixer is 'flash', but must be a config of one of the kinds flash, gau, attention"),
        ({"mixer": MixerConfig()}, r"model.mixer is MixerConfig\(\), but must be a config of one of the kinds flash"),
        ({"feed_forward": "mlp"}, "model.feed_forward is 'mlp', but must be a config of one of the kinds mlp, glu"),
        ({"task": "span"}, "task is 'span', but must be one of 'clm', 'mlm'"),
    ],
)
def test_unknown_and_contradictory_values_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve("flash-tiny", **overrides)


def test_a_name_in_two_parts_is_ambiguous() -> None:
    with pytest.raises(ValueError, match="'expansion' is a field of both mixer and feed_forward"):
        resolve("flash-tiny", feed_forward=GLUConfig(), expansion=3)


def test_missing_and_unknown_fields_in_a_dictionary_are_named() -> None:
    data = presets()["flash-tiny"].to_dict()
    with pytest.raises(ValueError, match="model has no field 'layers'"):
        ModelConfig.from_dict({**data, "layers": 3})
    del data["d_model"]
    with pytest.raises(ValueError, match="model lacks the field 'd_model'"):
        ModelConfig.from_dict(data)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets()["flash-tiny"].d_model = 3  # type: ignore[misc]


@pytest.mark.parametrize("kind", MIXER_KINDS)
def test_a_mixer_is_described_by_all_its_arguments_with_their_defaults(kind: str) -> None:
    config = MIXER_KINDS[kind]
    arguments = {name: argument.default for name, argument in list(inspect.signature(config.layer).parameters.items())[1:]}
    of_the_model = {"causal", "norm", "dropout"}
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    assert fields == {name: default for name, default in arguments.items() if name not in of_the_model}


def test_learned_positions_need_a_number_of_them_and_no_others_have_one() -> None:
    message = "model.max_positions is .* with absolute_position = .*, but learned positions need a number of them"
    with pytest.raises(ValueError, match=message):
        resolve("flash-tiny", absolute_position="learned")
    with pytest.raises(ValueError, match=message):
        resolve("flash-tiny", max_positions=100)
    with pytest.raises(ValueError, match="max_positions is 0, but must be at least 1"):
        resolve("transformer-tiny", max_positions=0)
