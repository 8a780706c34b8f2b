"""Save small layers of MossFormer with what they compute: `python make_mossformer.py FOLDER`.

It ran once, in an environment of its own: FunASR 1.4.16 (installed without its dependencies), rotary-embedding-torch 0.9.1,
safetensors and torch. What it wrote is tests/assets/mossformer, to which test_mossformer.py holds the conversion. The layers of
modelscope 1.40.2 and clearvoice 0.1.2 gave the same outputs for these weights.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding  # type: ignore[import-untyped]
from safetensors.torch import save_file

LENGTHS = (1, 8, 21)
SIZES: dict[str, Any] = {"dim": 4, "query_key_dim": 6, "group_size": 8, "expansion_factor": 4.0}


class ScaleNorm(torch.nn.Module):
    """As FunASR's in funasr.models.transformer.layer_norm, whose import needs its dependencies."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.g = dim, torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = x / (x.norm(dim=-1, keepdim=True) * self.dim**-0.5).clamp(min=1e-5) * self.g
        return normed


def layer_class() -> Any:
    """Theirs, from a file of FunASR alone, since its import needs its dependencies."""
    package = find_spec("funasr")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "models" / "mossformer" / "mossformer.py"
    return runpy.run_path(str(file))["FLASH_ShareA_FFConvM"]


def main() -> None:
    theirs = layer_class()
    for name, causal, norm in (("scalenorm", False, ScaleNorm), ("layernorm-causal", True, torch.nn.LayerNorm)):
        torch.manual_seed(0)
        layer = theirs(**SIZES, causal=causal, norm_klass=norm, rotary_pos_emb=RotaryEmbedding(dim=4)).double().eval()
        layer.rotary_pos_emb.freqs.data = 10000.0 ** -(torch.arange(2, dtype=torch.float64) / 2)  # theirs are float32
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.requires_grad:  # those it begins with hardly attend
                    parameter.add_(0.5 * torch.randn_like(parameter))
        for length in LENGTHS:
            x = torch.randn(2, length, SIZES["dim"], dtype=torch.float64, requires_grad=True)
            y, direction = layer(x), torch.randn(2, length, SIZES["dim"], dtype=torch.float64)
            (gradient,) = torch.autograd.grad((y * direction).sum(), x, retain_graph=True)
            found = {"x": x, "y": y, "direction": direction, "gradient": gradient}
            tensors |= {f"{length}.{key}": value.detach() for key, value in found.items()}
        named = {key: parameter for key, parameter in layer.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad((y * direction).sum(), list(named.values()))  # of the longest
        tensors |= {f"gradient.{key}": value for key, value in zip(named, gradients, strict=True)}
        tensors |= {f"weights.{key}": value for key, value in layer.state_dict().items()}
        folder = Path(sys.argv[1])
        folder.mkdir(exist_ok=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
