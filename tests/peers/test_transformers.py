"""The Transformer against GPT-2 of transformers with the same weights.

How they differ, and what is done about it here: GPT-2 has a tanh approximation of GELU, and dropout, neither here.
"""

from typing import Any

import torch
from tests.peers.packages import peer, randomized
from torch import Tensor

import lineartime
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
