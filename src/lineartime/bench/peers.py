"""Other implementations, built at the sizes of one of our models. Each is imported only when it is used."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lineartime.bench.config import Peer
from lineartime.errors import ArgumentError, is_installed, missing_extra
from lineartime.models.config import ModelConfig


def check_peer(peer: Peer, device: torch.device) -> None:
    """Raise LineartimeError if the peer is not installed, or cannot run on the device."""
    if peer == "flash-pytorch" and not is_installed("flash_pytorch"):
        raise missing_extra("FLASH-pytorch", "peers", "The peer flash-pytorch")
    if peer == "fla" and device.type != "cuda":
        raise ArgumentError("peers", "has fla, which needs a GPU: leave it out.")
    if peer == "fla" and not is_installed("fla"):
        raise ArgumentError(
            "peers", "has fla, but flash-linear-attention is not installed: pip install flash-linear-attention."
        )


def build_peer(peer: str, config: ModelConfig) -> nn.Module:
    """Build a peer at the sizes of one of our models: ids [B, T] -> logits [B, T, V]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the peer's own code
        return PEERS[peer](config)


def _flash_pytorch(config: ModelConfig) -> nn.Module:
    from flash_pytorch import FLASHTransformer

    sizes = config.mixer.options
    model: nn.Module = FLASHTransformer(
        dim=config.d_model,
        num_tokens=config.vocab_size,
        depth=config.n_blocks,
        group_size=sizes["chunk_size"],
        query_key_dim=sizes["d_qk"],
        expansion_factor=float(sizes["expansion"]),
        causal=config.task == "clm",
        norm_type="layernorm" if config.norm == "layernorm" else "scalenorm",
    )
    return model


class _GatedLinearAttentionBlock(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        from fla.layers import GatedLinearAttention

        self.norm = nn.LayerNorm(d_model)
        self.attention: nn.Module = GatedLinearAttention(hidden_size=d_model, num_heads=max(1, d_model // 256))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))[0]
        return out


def _fla(config: ModelConfig) -> nn.Module:
    """Gated linear attention with as many layers as the model has blocks; fla has no FLASH."""
    blocks = [_GatedLinearAttentionBlock(config.d_model) for _ in range(config.n_blocks)]
    embedding = nn.Embedding(config.vocab_size, config.d_model)
    logits = nn.Linear(config.d_model, config.vocab_size, bias=False)
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(config.d_model), logits)


PEERS: dict[str, Callable[[ModelConfig], nn.Module]] = {"flash-pytorch": _flash_pytorch, "fla": _fla}
