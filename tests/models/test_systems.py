from dataclasses import replace
from typing import get_args

import pytest

import lineartime
from lineartime import presets
from lineartime.choices import BYTE_VOCABULARY
from lineartime.data import ByteTokenizer
from lineartime.models.config import LayerConfig, Task
from lineartime.models.cost import count_parameters
from lineartime.models.systems import PRESETS, SYSTEMS, resolve

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
    with pytest.raises(ValueError, match=r"^task is 'clm', but a model of linformer cannot be causal: .*; use `task='mlm'`"):
        lineartime.build("linformer-tiny")
    with pytest.raises(ValueError, match=r"^task is 'mlm', but a model of gla must be causal: .*; use `task='clm'`"):
        lineartime.build("gla-tiny", "mlm")
    assert lineartime.build("linformer-tiny", mixer="flash", n_blocks=1).config.mixer.kind == "flash"


def test_system_is_what_its_name_says() -> None:
    plain, plus, plus_plus = (presets()[f"transformer{suffix}-tiny"] for suffix in ("", "+", "++"))
    assert (plain.absolute_position, plain.norm, plain.mixer) == (
        "learned",
        "layernorm",
        LayerConfig("attention", n_heads=4, rope=False),
    )
    assert presets("mlm")["transformer-tiny"].norm == "layernorm"
    assert (plus.absolute_position, plus.feed_forward) == ("scaled_sin", LayerConfig("mlp"))
    assert plus_plus == replace(plus, feed_forward=LayerConfig("glu"))
    for name in ("performer-chunked", "combiner", "cosformer", "reformer"):
        assert replace(presets()[f"{name}-tiny"], mixer=plus.mixer) == plus
    for name in ("mc-tfm++", "mhsa-relu2"):
        assert replace(presets()[f"{name}-tiny"], mixer=plus_plus.mixer) == plus_plus
    assert [presets(task)["flash-base"].norm for task in ("clm", "mlm")] == ["layernorm", "scalenorm"]
    # fine-tuning: s = 512 and chunks of 128 (section 4.3 of the paper)
    assert presets("mlm")["flash-first-to-all-base"].mixer == LayerConfig("flash-first-to-all", d_qk=512, chunk_size=128)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"preset is 'flash-huge', which is not a preset .*large.*: use a name listed by `presets\(\)`\.$"
    ):
        lineartime.build("flash-huge")
    with pytest.raises(ValueError, match="task is 'qa', but must be one of 'clm', 'mlm'"):
        lineartime.build("flash-tiny", task="qa")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"preset_or_config is None, but must be the name of a preset or a ModelConfig"):
        lineartime.build(None)  # type: ignore[call-overload]
