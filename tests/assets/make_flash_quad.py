"""Save what the layer of FLASHQuad_pytorch computes in float64: `python make_flash_quad.py GAU_PY FILE`.

GAU_PY is flash/gau.py of the repository JunnYu/FLASHQuad_pytorch at e590261. FILE is tests/assets/flash_quad.safetensors, to
which test_flash_quad.py holds ours: for each case its weights, the output, and the gradient of the input for one direction.
"""

import runpy
import sys

import torch
from safetensors.torch import save_file

D, S, LONGEST = 4, 4, 8
CASES = {"scale_norm": (5, False), "layer_norm": (LONGEST, False), "causal": (6, True)}
"""The number of tokens, and the direction."""


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    unit_class = runpy.run_path(sys.argv[1])["GAU"]
    saved = {}
    for name, (length, causal) in CASES.items():
        norm = "layer_norm" if name == "layer_norm" else "scale_norm"
        unit = unit_class(D, s=S, norm_type=norm, max_position_embeddings=LONGEST)
        with torch.no_grad():
            for parameter in unit.parameters():
                parameter.normal_(std=2.0)  # those it begins with hardly attend
        x = torch.randn(2, length, D, requires_grad=True)
        mask = (torch.arange(length) < torch.tensor([[length], [length - 2]])).long()
        direction = torch.randn(2, length, D) * mask[..., None]
        (out,) = unit(x, attention_mask=mask, causal=causal)
        (gradient,) = torch.autograd.grad((out * direction).sum(), x)
        made = {"x": x.detach(), "mask": mask, "direction": direction, "out": out.detach(), "gradient": gradient}
        saved |= {f"{name}.{key}": tensor for key, tensor in made.items()}
        saved |= {f"{name}.weight.{key}": tensor for key, tensor in unit.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in saved.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
