"""Another default device, which a program may set for tensors of its own, changes nothing that works on the CPU.

The meta device stands for any other: a tensor that is made there by mistake has no values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lineartime
from lineartime.data import ByteTokenizer, TokenStream
from lineartime.data.batches import Batch
from lineartime.evaluation import evaluate_carried, evaluate_windowed
from lineartime.generation import Sampling, TextBatch, generate

TOKENIZER = ByteTokenizer()
SIZES: dict[str, Any] = {"n_blocks": 1, "d_model": 16, "d_qk": 8, "chunk_size": 8, "vocab_size": TOKENIZER.vocab_size}
MODEL = lineartime.build("flash-tiny", **SIZES).eval()
MASKED = lineartime.build("flash-tiny", task="mlm", **SIZES).eval()
ROWS = Batch(torch.arange(12).view(2, 6), torch.arange(12).view(2, 6))
PENALISED = Sampling(repetition_penalty=1.5, seed=3)


def one_text() -> object:
    return list(generate(MODEL, TOKENIZER.encode("a prompt"), 12, PENALISED))


def texts_in_a_batch() -> object:
    texts = TextBatch(MODEL, Sampling(seed=3))
    numbers = [texts.add(TOKENIZER.encode("ab"), sampling=sampling) for sampling in (None, PENALISED)]
    return numbers, [texts.step() for _ in range(4)]


def evaluations() -> object:
    text = TokenStream("noise", np.arange(50, dtype=np.uint16), 50)
    windows = evaluate_windowed(MODEL, text, TOKENIZER, context_length=8, stride=4, batch_size=3, bf16=False)
    packed = evaluate_windowed(MASKED, text, TOKENIZER, context_length=8, stride=8, batch_size=3, bf16=False, packed=True)
    return windows, packed, evaluate_carried(MODEL, text, TOKENIZER, segment=7, bf16=False)


@pytest.mark.parametrize("compute", [one_text, texts_in_a_batch, evaluations])
def test_results_are_the_same(compute: Callable[[], object]) -> None:
    expected = compute()
    with torch.device("meta"):
        assert compute() == expected
