"""What a model, and what generates from it, is given wrongly, as data: each case is one error that names the argument."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lineartime
from lineartime.errors import ArgumentError
from lineartime.generation import Sampling, generate, generate_batch
from lineartime.models.backbone import ModelState
from lineartime.models.config import LayerConfig
from lineartime.seq2seq import EncoderDecoder, EncoderDecoderConfig

V = 50
SIZES: dict[str, Any] = {"d_model": 16, "n_blocks": 2, "vocab_size": V, "d_qk": 8}
FLASH = lineartime.build("flash-tiny", **SIZES, chunk_size=8).eval()
GAU = lineartime.build("flash-quad-tiny", **SIZES).eval()
MASKED = lineartime.build("flash-tiny", **SIZES, task="mlm").eval()
PAIR = EncoderDecoder(
    EncoderDecoderConfig(V, 16, 1, 2, LayerConfig("flash", d_qk=8, chunk_size=8), LayerConfig("cross-gau", d_qk=8))
).eval()
IDS = torch.randint(0, V, (2, 9))


def refuses(call: Callable[[], Any], argument: str) -> None:
    """The message begins with the argument and says what it is."""
    with pytest.raises(ArgumentError, match=rf"^{re.escape(argument)}(\.\w+)* (is|has|holds|belongs) ") as raised:
        call()
    assert "\n" not in str(raised.value)


WRONG_IDS: dict[str, Any] = {
    "uint8": IDS.to(torch.uint8),
    "int8": IDS.to(torch.int8),
    "int16": IDS.short(),
    "uint16": IDS.to(torch.uint16),
    "bool": IDS > 3,
    "float32": IDS.float(),
    "complex64": IDS.to(torch.complex64),
    "None": None,
    "a list": IDS.tolist(),
    "numpy": IDS.numpy(),
    "one-dimensional": IDS[0],
    "three-dimensional": IDS[None],
    "negative": -IDS - 1,
    "beyond the vocabulary": IDS + V,
    "on the meta device": IDS.to("meta"),
    "vectors": torch.randn(2, 9, 16),
}
READERS: list[tuple[Callable[[Any], Any], str]] = [
    (FLASH, "ids"),
    (MASKED, "ids"),
    (lambda ids: FLASH.loss(ids, IDS), "ids"),
    (lambda ids: FLASH.extend(ids, FLASH.init_state(2)), "ids"),
    (GAU.read_prefix, "ids"),
    (lambda ids: PAIR(ids, IDS), "source_ids"),
    (lambda ids: PAIR(IDS, ids), "target_ids"),
    (PAIR.init_state, "source_ids"),
    (lambda ids: PAIR.extend(ids, PAIR.init_state(IDS)), "target_ids"),
]


def test_ids_that_a_model_cannot_read_are_named() -> None:
    for read, argument in READERS:
        for ids in WRONG_IDS.values():
            refuses(lambda: read(ids), argument)  # noqa: B023


def test_targets_that_are_no_ids_are_named() -> None:
    for case, targets in WRONG_IDS.items():
        if "dimensional" not in case and "meta" not in case:
            refuses(lambda: FLASH.loss(IDS, targets), "targets")  # noqa: B023


def test_ids_of_int32_are_read() -> None:
    assert torch.equal(FLASH(IDS.int()), FLASH(IDS))


WRONG_STATES: dict[str, Any] = {
    "a dictionary": {},
    "no state": (),
    "of another batch": FLASH.init_state(3),
    "of another model": GAU.init_state(2),
    "of fewer blocks": ModelState(FLASH.init_state(2).blocks[:1]),
    "of one block": FLASH.init_state(2).blocks[0],
    "of nothing": (None, None),
    "a list": list(FLASH.init_state(2).blocks),
    "a text": "state",
    "of another chunk size": lineartime.build("flash-tiny", **SIZES, chunk_size=4).init_state(2),
    "of an encoder and decoder": PAIR.init_state(IDS),
}


def test_states_of_anything_else_are_named() -> None:
    for case, state in WRONG_STATES.items():
        with pytest.raises(ArgumentError, match=r"^(state(\.\w+)*|x) (is|has|belongs) "):
            FLASH.extend(IDS, state)
        if case != "of an encoder and decoder":
            refuses(lambda: PAIR.extend(IDS, state), "state")  # noqa: B023


NUMBERS: list[Any] = [1.5, 64.0, "8", True, float("nan"), float("inf"), [1], torch.tensor(1.5)]


PROMPTS: list[Any] = [1.5, "8", None, True, 7, torch.tensor(1), [], [1.5], [True], [-1], [V], [[1]], IDS, IDS[0].float()]


def test_wrong_arguments_of_generation_are_named() -> None:
    for value in (*NUMBERS, None, 0, -1):
        refuses(lambda: generate(FLASH, [1], value), "max_tokens")  # noqa: B023
        refuses(lambda: generate_batch(FLASH, [[1]], value), "max_tokens")  # noqa: B023
    for value in (*NUMBERS, -1, V):
        refuses(lambda: generate(FLASH, [1], 2, stop_token=value), "stop_token")  # noqa: B023
    for value in PROMPTS:
        refuses(lambda: generate(FLASH, value, 2), "prompt")  # noqa: B023
        refuses(lambda: generate_batch(FLASH, [value], 2), "prompts[0]")  # noqa: B023
    for value in PROMPTS[:6]:
        refuses(lambda: generate_batch(FLASH, value, 2), "prompts")  # noqa: B023
    for value in (1.5, "8", True, 7, [1]):
        refuses(lambda: generate_batch(FLASH, [[1]], 2, ended=value), "ended")  # noqa: B023
    for value in (0.8, "greedy", {}, Sampling):
        refuses(lambda: generate(FLASH, [1], 2, value), "sampling")  # noqa: B023
    for value in (None, "model", torch.nn.Linear(2, 2), PAIR, MASKED):
        refuses(lambda: generate(value, [1], 2), "model")  # noqa: B023


def test_options_of_sampling_that_are_not_allowed_are_named() -> None:
    for argument, values in {
        "temperature": ["a", None, True, -0.1, float("nan"), [1.0]],
        "top_k": [1.5, 64.0, "8", None, True, -1, float("nan")],
        "top_p": ["a", None, True, 0, 1.1, -1.0, float("nan")],
        "seed": [1.5, "8", True, -1, 2**63, float("nan")],
        "min_p": [-0.1, 1.1],
        "repetition_penalty": [0, -1.0],
    }.items():
        for value in values:
            refuses(lambda: Sampling(**{argument: value}), argument)  # noqa: B023


def test_sizes_of_a_model_and_its_mixer_that_are_no_whole_numbers_are_named() -> None:
    for field in ("vocab_size", "d_model", "n_blocks", "chunk_size", "d_qk", "expansion"):
        for value in (*NUMBERS, None, 0, -1):
            refuses(lambda: lineartime.build("flash-tiny", **{field: value}), field)  # noqa: B023


ARGUMENTS: list[tuple[str, Tensor | Any]] = [
    ("mask", torch.ones(2, 9)),
    ("mask", torch.ones(2, 8, dtype=torch.bool)),
    ("mask", torch.ones(2, 9, dtype=torch.bool, device="meta")),
    ("mask", [1]),
    ("cu_seqlens", torch.tensor([False, True])),
    ("cu_seqlens", torch.tensor([0, 9], dtype=torch.uint8)),
    ("cu_seqlens", torch.tensor([0, 18], device="meta")),
    ("cu_seqlens", [0, 18]),
    ("prefix_lengths", torch.tensor([1.0, 2.0])),
    ("prefix_lengths", torch.tensor([1, 10])),
    ("prefix_lengths", [1, 2]),
]


def test_arguments_of_a_model_that_do_not_fit_are_named() -> None:
    for argument, value in ARGUMENTS:
        ids = IDS.view(1, -1) if argument == "cu_seqlens" else IDS
        refuses(lambda: GAU(ids, **{argument: value}), argument)  # noqa: B023
        refuses(lambda: GAU.loss(ids, ids, **{argument: value}), argument)  # noqa: B023
