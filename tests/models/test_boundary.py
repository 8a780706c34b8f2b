"""What a model, and what generates from it, is given wrongly, as data: each case is one error that names the argument."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

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


DTYPES = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.float32, torch.complex64)
WRONG_TARGETS: list[Any] = [*(IDS.to(dtype) for dtype in DTYPES), None, IDS.tolist(), IDS.numpy(), -IDS - 1, IDS + V]
WRONG_TARGETS += [torch.randn(2, 9, 16)]
WRONG_IDS: list[Any] = [*WRONG_TARGETS, IDS[0], IDS[None], IDS.to("meta")]
OF_TWO_PARTS = PAIR.init_state(IDS)
WRONG_STATES: list[Any] = [
    *({}, (), (None, None), "state", OF_TWO_PARTS, FLASH.init_state(3), GAU.init_state(2)),
    ModelState(FLASH.init_state(2).blocks[:1]),
    FLASH.init_state(2).blocks[0],
    list(FLASH.init_state(2).blocks),
    lineartime.build("flash-tiny", **SIZES, chunk_size=4).init_state(2),
]
NUMBERS: list[Any] = [1.5, 64.0, "8", True, float("nan"), float("inf"), [1], torch.tensor(1.5)]
PROMPTS: list[Any] = [1.5, "8", None, True, 7, torch.tensor(1), [], [1.5], [True], [-1], [V], [[1]], IDS, IDS[0].float()]
DOCUMENTS = [torch.tensor([False, True]), torch.tensor([0, 9]).to(torch.uint8), torch.tensor([0, 18]).to("meta"), [0, 18]]
MASKS = [torch.ones(2, 9), torch.ones(2, 8).bool(), torch.ones(2, 9).bool().to("meta"), [1]]
PREFIXES = [torch.tensor([1.0, 2.0]), torch.tensor([1, 10]), [1, 2]]

# The argument that the message names, what is called with a value, and values that are not allowed.
WRONG: list[tuple[str, Callable[[Any], Any], Any]] = [
    *(("ids", read, WRONG_IDS) for read in (FLASH, MASKED, GAU.read_prefix)),
    ("ids", lambda ids: FLASH.loss(ids, IDS), WRONG_IDS),
    ("ids", lambda ids: FLASH.extend(ids, FLASH.init_state(2)), WRONG_IDS),
    ("source_ids", lambda ids: PAIR(ids, IDS), WRONG_IDS),
    ("source_ids", PAIR.init_state, WRONG_IDS),
    ("target_ids", lambda ids: PAIR(IDS, ids), WRONG_IDS),
    ("target_ids", lambda ids: PAIR.extend(ids, PAIR.init_state(IDS)), WRONG_IDS),
    ("targets", lambda targets: FLASH.loss(IDS, targets), WRONG_TARGETS),
    *(("mask", lambda mask, call=call: call(IDS, mask=mask), MASKS) for call in (GAU, partial(GAU.loss, targets=IDS))),
    ("cu_seqlens", lambda ends: GAU(IDS.view(1, -1), cu_seqlens=ends), DOCUMENTS),
    ("prefix_lengths", lambda lengths: GAU(IDS, prefix_lengths=lengths), PREFIXES),
    ("(state|x)", lambda state: FLASH.extend(IDS, state), WRONG_STATES),
    ("state", lambda state: PAIR.extend(IDS, state), [state for state in WRONG_STATES if state is not OF_TWO_PARTS]),
    ("max_tokens", lambda count: generate(FLASH, [1], count), [*NUMBERS, None, 0, -1]),
    ("max_tokens", lambda count: generate_batch(FLASH, [[1]], count), [*NUMBERS, None, 0, -1]),
    ("stop_token", lambda token: generate(FLASH, [1], 2, stop_token=token), [*NUMBERS, -1, V]),
    ("prompt", lambda prompt: generate(FLASH, prompt, 2), PROMPTS),
    (r"prompts\[0\]", lambda prompt: generate_batch(FLASH, [prompt], 2), PROMPTS),
    ("prompts", lambda prompts: generate_batch(FLASH, prompts, 2), PROMPTS[:6]),
    ("ended", lambda ended: generate_batch(FLASH, [[1]], 2, ended=ended), [1.5, "8", True, 7, [1]]),
    ("sampling", lambda sampling: generate(FLASH, [1], 2, sampling), [0.8, "greedy", {}, Sampling]),
    ("model", lambda model: generate(model, [1], 2), [None, "model", torch.nn.Linear(2, 2), PAIR, MASKED]),
    ("temperature", lambda value: Sampling(temperature=value), ["a", None, True, -0.1, float("nan"), [1.0]]),
    ("top_k", lambda value: Sampling(top_k=value), [1.5, 64.0, "8", None, True, -1, float("nan")]),
    ("top_p", lambda value: Sampling(top_p=value), ["a", None, True, 0, 1.1, -1.0, float("nan")]),
    ("seed", lambda value: Sampling(seed=value), [1.5, "8", True, -1, 2**63, float("nan")]),
    ("min_p", lambda value: Sampling(min_p=value), [-0.1, 1.1]),
    ("repetition_penalty", lambda value: Sampling(repetition_penalty=value), [0, -1.0]),
    *(
        (field, lambda value, field=field: lineartime.build("flash-tiny", **{field: value}), [*NUMBERS, None, 0, -1])
        for field in ("vocab_size", "d_model", "n_blocks", "chunk_size", "d_qk", "expansion")
    ),
]


@pytest.mark.parametrize(("argument", "call", "values"), WRONG, ids=[f"{row[0]}-{place}" for place, row in enumerate(WRONG)])
def test_wrong_argument_is_named_with_what_it_is(argument: str, call: Callable[[Any], Any], values: Any) -> None:
    for value in values:
        with pytest.raises(ArgumentError, match=rf"^{argument}(\.\w+)* (is|has|holds|belongs) ") as raised:
            call(value)
        assert "\n" not in str(raised.value)


def test_ids_of_int32_are_read() -> None:
    assert torch.equal(FLASH(IDS.int()), FLASH(IDS))
