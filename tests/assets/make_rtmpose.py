"""Save what the published units of RTMPose compute in float64: `python make_rtmpose.py FOLDER FILE`.

FOLDER holds the unpacked wheels mmpose 1.3.2, deeplabcut 3.0.2, otx 2.6.0 and netspresso-trainer 1.4.1, each in a folder of its
own with the name of its package. Their units are taken out of their files, for the packages need mmcv and much else. FILE is
tests/assets/rtmpose.safetensors, to which test_rtmpose.py holds ours: the weights, which all units share, and inputs; and for
each case, in which all packages agree to 1e-13, the output, and the gradients of all inputs and weights in one row.
"""

import ast
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

FILES = {
    "mmpose": ["models/utils/transformer.py", "models/utils/rtmcc_block.py"],
    "deeplabcut": [f"pose_estimation_pytorch/models/modules/{name}.py" for name in ("norm", "gated_attention_unit")],
    "otx": [f"backend/native/models/keypoint_detection/utils/{name}.py" for name in ("scale_norm", "rtmcc_block")],
    "netspresso_trainer": ["models/heads/pose_estimation/experimental/rtmcc.py"],
}
UNITS = {"mmpose": "RTMCCBlock", "deeplabcut": "GatedAttentionUnit", "otx": "RTMCCBlock", "netspresso_trainer": "RTMCCBlock"}
NEEDED = {"rope", "Scale", "ScaleNorm", "ChannelWiseScale", "SinePositionalEncoding", "GAUEncoder", *UNITS.values()}
D, E, S, T, OTHERS, OUT = 4, 8, 4, 5, 3, 6


def read_classes(folder: Path, package: str) -> dict[str, Any]:
    """The classes and functions that a unit of a package needs, by name."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "functional": F, "math": math, "Tensor": Tensor}
    scope |= {"BaseModule": nn.Module, "TORCH_VERSION": "2.0.0", "digit_version": str, "DictConfig": dict}
    scope |= {"ACTIVATION_REGISTRY": {"silu": nn.SiLU, "relu": nn.ReLU}}
    exec("from typing import *", scope)
    for name in FILES[package]:
        tree = ast.parse((folder / package / package / name).read_text())
        tree.body = [part for part in tree.body if getattr(part, "name", None) in NEEDED]
        exec(compile(tree, name, "exec"), scope)
    return scope


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # their rotations are computed in it
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    shapes = {
        "uv.weight": (2 * E + S, D), "uv.bias": (2 * E + S,), "o.weight": (OUT, E), "o.bias": (OUT,), "gamma": (2, S),
        "beta": (2, S), "w": (2 * T + 1,), "ln.g": (1,), "res_scale.scale": (D,), "k_fc.weight": (S, D), "k_fc.bias": (S,),
        "v_fc.weight": (E, D), "v_fc.bias": (E,), "a": (1, S), "b": (1, S),
    }  # fmt: skip
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    inputs = {"x": (2, T, D), "keys": (2, OTHERS, D), "values": (2, OTHERS, D), "encoding": (T, S), "direction": (2, T, OUT)}
    given = {name: torch.randn(shape) for name, shape in inputs.items()} | {"mask": torch.randint(2, (2, T, T)).double()}
    saved = {f"weight.{name}": tensor for name, tensor in weights.items()} | {f"input.{k}": v for k, v in given.items()}
    plain = {"use_rel_bias": False}
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for package in FILES:
        cases += [(package, "plain", plain), (package, "wider", {**plain, "bias": True, "out_token_dims": OUT})]
        cases += [(package, "table", {}), (package, "inverted", {**plain, "pos_enc": True})]
        if package != "otx":  # which has no cross-attention
            cases += [(package, "cross", {**plain, "attn_type": "cross-attn"})]
            cases += [(package, "cross-bias", {"attn_type": "cross-attn", "pos_enc": True, "bias": True})]
    for positions in ("none", "add", "rope"):
        cases += [
            ("mmpose", f"rtmo-{positions}", {"pos_enc": positions}),
            ("mmpose", f"rtmo-{positions}-mask", {"pos_enc": positions}),
        ]
    relu = {package: {"act_type": "relu"} if package == "netspresso_trainer" else {"act_fn": "ReLU"} for package in FILES}
    cases += [(package, "relu", {**plain, **relu[package]}) for package in FILES]
    for package, name, options in cases:
        scope = read_classes(folder, package)
        options = {"in_token_dims": D, "out_token_dims": D, "expansion_factor": E / D, "s": S, **options}
        encoder = name.startswith("rtmo")
        unit = scope["GAUEncoder"](**options) if encoder else scope[UNITS[package]](T + 1, **options)
        unit = unit.double()  # the relative bias is made in float32
        state = {key: weights[key][tuple(slice(size) for size in own.shape)] for key, own in unit.state_dict().items()}
        unit.load_state_dict(state)
        leaves = [tensor.clone().requires_grad_() for tensor in (given["x"], given["keys"], given["values"])]
        if encoder:
            arguments = {"mask": given["mask"] if name.endswith("mask") else None, "pos_enc": given["encoding"]}
            out, leaves = unit(leaves[0], **arguments), leaves[:1]
        elif "attn_type" in options:
            out = unit(tuple(leaves))
        else:
            out, leaves = unit(leaves[0]), leaves[:1]
        leaves += [dict(unit.named_parameters())[key] for key in sorted(state)]
        gradients = torch.autograd.grad((out * given["direction"][..., : out.shape[-1]]).sum(), leaves)
        made = {"out": out.detach(), "gradients": torch.cat([gradient.flatten() for gradient in gradients])}
        for key, tensor in made.items():
            torch.testing.assert_close(saved.setdefault(f"{name}.{key}", tensor), tensor, atol=1e-13, rtol=1e-13)
    save_file({name: tensor.contiguous() for name, tensor in saved.items()}, file)


if __name__ == "__main__":
    main()
