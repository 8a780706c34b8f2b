import pytest
import torch

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.models.presets import BYTE_VOCABULARY

MILLIONS = {"flash-base": 112, "flash-quad-base": 112, "transformer++-base": 110}


def count(name: str, **overrides: object) -> float:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in lineartime.build(name, **overrides).parameters()) / 1e6


@pytest.mark.parametrize("name", MILLIONS)
def test_base_models_are_as_large_as_in_the_paper(name: str) -> None:
    assert round(count(name)) == MILLIONS[name]


@pytest.mark.parametrize("name", [name for name in lineartime.presets() if name.endswith("-tiny")])
def test_tiny_models_are_tiny(name: str) -> None:
    assert 2 <= count(name) <= 4


def test_tiny_models_take_the_vocabulary_of_the_byte_tokenizer() -> None:
    assert ByteTokenizer.vocab_size == BYTE_VOCABULARY


def test_norms_follow_the_task() -> None:
    assert lineartime.presets("clm")["flash-base"].norm == "layernorm"
    assert lineartime.presets("mlm")["flash-base"].norm == "scalenorm"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="preset is 'flash-huge', but must be one of 'flash-tiny'"):
        lineartime.build("flash-huge")
    with pytest.raises(ValueError, match="task is 'qa', but must be one of 'clm', 'mlm'"):
        lineartime.build("flash-tiny", task="qa")  # type: ignore[call-overload]
