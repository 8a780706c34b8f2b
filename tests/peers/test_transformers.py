"""The Transformer, and the perplexity of a text, against GPT-2 of transformers with the same weights.

How they differ, and what is done about it here:
- GPT-2 has a tanh approximation of GELU, and dropout: neither here.
- The loop that its documentation shows for perplexity does not predict the first token: an end of document stands before it
  here, as our evaluation has it. It weights each window by one token less than it predicts after the first: not here.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tests.peers.packages import peer, randomized
from torch import Tensor

import lineartime
from lineartime.data import ByteTokenizer, TokenStream
from lineartime.evaluation import evaluate_windowed
from lineartime.models import CausalLM

D_MODEL, HEADS, BLOCKS, VOCABULARY = 16, 2, 2, 258
SIZES: dict[str, Any] = {"d_model": D_MODEL, "n_heads": HEADS, "n_blocks": BLOCKS, "vocab_size": VOCABULARY}


def renamed(block: Any, names: dict[str, str]) -> dict[str, Tensor]:
    """Weights and biases of modules of our block, by their names in another package."""
    modules = {name: block.get_submodule(ours) for name, ours in names.items()}
    return {f"{name}.{kind}": getattr(module, kind) for name, module in modules.items() for kind in ("weight", "bias")}


def gpt2(model: CausalLM) -> Any:
    """A GPT-2 with the weights of our `transformer`."""
    config = peer("transformers.models.gpt2.configuration_gpt2").GPT2Config(
        vocab_size=VOCABULARY, n_embd=D_MODEL, n_head=HEADS, n_layer=BLOCKS, activation_function="gelu"
    )
    theirs = peer("transformers.models.gpt2.modeling_gpt2").GPT2LMHeadModel(config)
    backbone: Any = model.backbone
    weights = {
        "transformer.wte.weight": backbone.embedding.weight,
        "transformer.wpe.weight": backbone.position.table,
        "lm_head.weight": backbone.embedding.weight,
        **renamed(backbone, {"transformer.ln_f": "norm"}),
    }
    for i, block in enumerate(backbone.blocks):
        layer = f"transformer.h.{i}"
        weights |= renamed(block, {f"{layer}.ln_1": "mixer.norm", f"{layer}.ln_2": "feed_forward.norm"})
        maps = {
            f"{layer}.attn.c_attn": "mixer.to_qkv",
            f"{layer}.attn.c_proj": "mixer.to_output",
            f"{layer}.mlp.c_fc": "feed_forward.to_hidden",
            f"{layer}.mlp.c_proj": "feed_forward.to_output",
        }
        weights |= {name: weight.mT if weight.dim() == 2 else weight for name, weight in renamed(block, maps).items()}
    theirs.to(backbone.embedding.weight.dtype).eval().load_state_dict(weights)
    return theirs


def test_transformer_is_gpt2_also_with_padding() -> None:
    model = randomized(lineartime.build("transformer-tiny", **SIZES))
    ids, mask = torch.randint(VOCABULARY, (3, 40)), torch.ones(3, 40, dtype=torch.bool)
    theirs = gpt2(model)
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-10, rtol=0)
    mask[0, :7] = mask[1, 15:] = False
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # it has to be told where the real tokens begin
    expected = theirs(ids, attention_mask=mask.long(), position_ids=positions).logits
    torch.testing.assert_close(model(ids, mask)[mask], expected[mask], atol=1e-10, rtol=0)


def sliding_nats(theirs: Any, ids: Tensor, max_length: int, stride: int) -> tuple[float, int]:
    """The mean nats of a token, and how many were predicted, by overlapping windows of a Hugging Face model: ids [1, T]."""
    nats, predicted, seen = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        window = ids[:, begin:end]
        labels = window.clone()
        labels[:, : seen - begin] = -100  # predicted before
        new = int((labels[:, 1:] != -100).sum())  # it shifts labels itself, and does not predict the first
        nats += theirs(window, labels=labels).loss.item() * new
        predicted, seen = predicted + new, end
        if end == ids.shape[1]:
            break
    return nats / predicted, predicted


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (200, 50)])
def test_perplexity_by_windows_is_that_of_gpt2(length: int, stride: int) -> None:
    tokenizer = ByteTokenizer()
    tokens = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint16)
    model = randomized(lineartime.build("transformer-tiny", **SIZES))
    stream = TokenStream("the test split of noise", tokens, 99)
    ours = evaluate_windowed(model, stream, tokenizer, context_length=length, stride=stride, batch_size=3, bf16=False)
    ids = torch.tensor([[tokenizer.end_of_document, *tokens.tolist()]])
    # A window of ours reads `length` tokens and predicts as many; theirs reads the last one too, which it predicts only.
    with torch.no_grad():
        loss, predicted = sliding_nats(gpt2(model), ids, length + 1, stride)
    assert ours.tokens == predicted == 100
    assert ours.loss == pytest.approx(loss, rel=1e-6)  # losses are float32
