"""Whole Transformers against x-transformers with the same weights, causal and bidirectional.

How it differs, and what is done about it here:
- Attention, gate and LayerNorm have no biases: ours are zero here. ScaleNorm has no epsilon under the root: neither here.
- With rotary positions it leaves out absolute ones, and rotates half of the features, unless it is configured as here.
- It divides tied logits by sqrt(d) and stores scales of norms minus 1, unless it is configured as here.
- It rotates neighbouring features instead of halves, and its angles are float32.
"""

from typing import Any

import pytest
import torch
from tests.peers.packages import interleaved, peer, randomized
from torch import Tensor, nn

import lineartime
from lineartime.layers.residual import ScaleNorm

D_MODEL, HEADS, BLOCKS, VOCABULARY, LENGTH = 24, 2, 2, 30, 40

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def norm_weights(name: str, norm: Any) -> dict[str, Tensor]:
    return {f"{name}.g": norm.g} if isinstance(norm, ScaleNorm) else {f"{name}.gamma": norm.weight}


@pytest.mark.parametrize("task", ["clm", "mlm"])
@pytest.mark.parametrize("system", ["transformer+", "transformer++", "mhsa-gated"])
def test_model_is_that_of_x_transformers(system: str, task: Any) -> None:
    sizes: dict[str, Any] = {"d_model": D_MODEL, "n_heads": HEADS, "n_blocks": BLOCKS, "vocab_size": VOCABULARY}
    model, glu, gated = lineartime.build(f"{system}-tiny", task, **sizes), system != "transformer+", system == "mhsa-gated"
    backbone: Any = randomized(model).backbone
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and "feed_forward.to" not in name:
            nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, ScaleNorm):
            module.eps = 0.0

    package = peer("x_transformers")
    layers = (package.Decoder if task == "clm" else package.Encoder)(
        dim=D_MODEL,
        depth=BLOCKS,
        heads=HEADS,
        attn_dim_head=D_MODEL // HEADS,
        rotary_pos_emb=True,
        rotary_emb_dim=D_MODEL // HEADS,
        disable_abs_pos_emb=False,
        use_scalenorm=task == "mlm",
        ff_glu=glu,
        ff_mult=8 / 3 if glu else 4,
        attn_gate_values=gated,
        attn_swiglu_values=gated,
        norm_add_unit_offset=False,
        verbose=False,
    )
    theirs = package.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        scaled_sinu_pos_emb=True,
        tie_embedding=True,
        tie_embedding_scale=1.0,
        attn_layers=layers,
    )
    weights = {
        "token_emb.emb.weight": backbone.embedding.weight,
        "pos_emb.scale": backbone.position.scale,
        "attn_layers.rotary_pos_emb.inv_freq": layers.rotary_pos_emb.inv_freq,
        **norm_weights("attn_layers.final_norm", backbone.norm),
    }
    for i, block in enumerate(backbone.blocks):
        attention, feed_forward = f"attn_layers.layers.{2 * i}", f"attn_layers.layers.{2 * i + 1}"
        q, k, v = block.mixer.to_qkv.weight.chunk(3)
        weights |= norm_weights(f"{attention}.0.0", block.mixer.norm)
        weights |= norm_weights(f"{feed_forward}.0.0", block.feed_forward.norm)
        weights |= {
            f"{attention}.1.to_q.weight": interleaved(q, HEADS),
            f"{attention}.1.to_k.weight": interleaved(k, HEADS),
            f"{attention}.1.to_v.weight": v,
            f"{attention}.1.to_out.weight": block.mixer.to_output.weight,
        }
        if gated:
            weights[f"{attention}.1.to_v_gate.weight"] = block.mixer.to_gate.weight
        for kind in ("weight", "bias"):
            weights[f"{feed_forward}.1.ff.2.{kind}"] = getattr(block.feed_forward.to_output, kind)
            if glu:
                gate, value = getattr(block.feed_forward.to_gate_value, kind).chunk(2)
                weights[f"{feed_forward}.1.ff.0.proj.{kind}"] = torch.cat([value, gate])
            else:
                weights[f"{feed_forward}.1.ff.0.0.{kind}"] = getattr(block.feed_forward.to_hidden, kind)
    theirs.double().eval().load_state_dict(weights)
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    torch.testing.assert_close(model(ids), theirs(ids), atol=1e-5, rtol=0)
