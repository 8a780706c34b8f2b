"""Tiny models of transformers, of every system, and inputs for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tests.definitions import noisy
from torch import Tensor, nn

import lineartime
from lineartime.hf import LineartimeConfig, LineartimeForCausalLM, LineartimeForMaskedLM
from lineartime.models.systems import SIZED

Model = TypeVar("Model", bound=nn.Module)

SHIFTED = "flash-next"
"""The system that has a token shift in these tests, so that its states are among those that are cached."""
KINDS = ["flash", SHIFTED, "flash-quad", "transformer++", "performer", "combiner", "hybrid-attention"]
"""One system for each kind of state; that the layers of all systems keep one contract is tested beside the layers."""
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
_SMALL: dict[str, Any] = {"d_qk": 8, "n_heads": 2, "chunk_size": 8}


def tiny(system: str = "flash", task: Any = "clm", **overrides: Any) -> LineartimeConfig:
    """The configuration of a tiny model of a system."""
    preset = LineartimeConfig.from_preset(f"{system}-tiny", task)
    options = {name: _SMALL[name] for name in SIZED if name in preset.mixer}
    if system == "mhsa-single-head":
        del options["n_heads"]
    if system == SHIFTED:
        options["token_shift"] = True
    if preset.pattern:
        options["pattern"] = preset.pattern[-2:]
    sizes = {"d_model": 16, "n_blocks": 2, "vocab_size": 40, **options, **overrides}
    return LineartimeConfig.from_preset(f"{system}-tiny", task, **sizes)


def awake(model: Model) -> Model:
    """The model in evaluation mode with weights far from their small initial values, so that all have a say."""
    torch.manual_seed(1)
    noisy(model, 0.2)
    return model.eval()


def causal_model(system: str = "flash", task: str = "clm", **overrides: Any) -> LineartimeForCausalLM:
    return awake(LineartimeForCausalLM(tiny(system, task, **overrides)))


def masked_model(system: str = "flash", **overrides: Any) -> LineartimeForMaskedLM:
    return awake(LineartimeForMaskedLM(tiny(system, "mlm", **overrides)))


def own(model: Any) -> Any:
    """The same model, as lineartime builds it."""
    built = lineartime.build(model.config.to_model_config()).eval()
    built.backbone.load_state_dict(model.model.backbone.state_dict())
    return built


def ids_of(*shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(2))


def left_padded() -> tuple[Tensor, Tensor]:
    """Ids of three prompts, 12, 5 and 9 long, and their mask."""
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :7] = mask[2, :3] = 0
    return ids_of(3, 12), mask


def close(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """Assert that two tensors agree, to `atol` of their size."""
    size = max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(found, expected, atol=atol * size, rtol=0)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights in a folder of transformers by a function that changes them by name."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
