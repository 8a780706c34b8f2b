"""Another default device, which a program may set for tensors of its own, changes nothing that works on the CPU.

The meta device stands for any other: a tensor that is made there by mistake has no values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lineartime.data import ByteTokenizer, TokenStream
from lineartime.evaluation import evaluate_carried, evaluate_windowed
from lineartime.generation import Sampling, TextBatch, generate

PENALISED = Sampling(repetition_penalty=1.5, seed=3)


def test_default_device_changes_no_result(tiny: Callable[..., Any]) -> None:
    tokenizer = ByteTokenizer()
    model, masked = tiny().eval(), tiny(task="mlm").eval()
    text = TokenStream("noise", np.arange(50, dtype=np.uint16), 50)
    sizes: dict[str, Any] = {"context_length": 8, "batch_size": 3, "bf16": False}

    def batch() -> object:
        texts = TextBatch(model, Sampling(seed=3))
        numbers = [texts.add(tokenizer.encode("ab"), sampling=sampling) for sampling in (None, PENALISED)]
        return numbers, [texts.step() for _ in range(4)]

    uses: list[Callable[[], object]] = [
        lambda: list(generate(model, tokenizer.encode("a prompt"), 12, PENALISED)),
        batch,
        lambda: evaluate_windowed(model, text, tokenizer, stride=4, **sizes),
        lambda: evaluate_windowed(masked, text, tokenizer, stride=8, packed=True, **sizes),
        lambda: evaluate_carried(model, text, tokenizer, segment=7, bf16=False),
    ]
    expected = [compute() for compute in uses]
    with torch.device("meta"):
        assert [compute() for compute in uses] == expected
