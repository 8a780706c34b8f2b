"""Transformer quality in linear time: GAU, FLASH-Quad and FLASH for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.checkpoint import load, load_tokenizer, save
    from lineartime.errors import LineartimeError
    from lineartime.evaluation import evaluate
    from lineartime.filling import fill_mask
    from lineartime.generation import Sampling, generate
    from lineartime.layers import FLASH, GAU
    from lineartime.models import LayerConfig, ModelConfig, build, presets
    from lineartime.text_generation import generate_text
    from lineartime.training.config import TrainConfig
    from lineartime.training.loop import train

    __version__: str

__all__ = [
    "FLASH",
    "GAU",
    "LayerConfig",
    "LineartimeError",
    "ModelConfig",
    "Sampling",
    "TrainConfig",
    "__version__",
    "build",
    "evaluate",
    "fill_mask",
    "generate",
    "generate_text",
    "load",
    "load_tokenizer",
    "presets",
    "save",
    "train",
]

_HOMES = {
    "FLASH": "layers",
    "GAU": "layers",
    "LayerConfig": "models",
    "LineartimeError": "errors",
    "ModelConfig": "models",
    "Sampling": "generation",
    "TrainConfig": "training.config",
    "build": "models",
    "evaluate": "evaluation",
    "fill_mask": "filling",
    "generate": "generation",
    "generate_text": "text_generation",
    "load": "checkpoint",
    "load_tokenizer": "checkpoint",
    "presets": "models",
    "save": "checkpoint",
    "train": "training.loop",
}
_ROOMS = (
    "baselines",
    "bench",
    "checkpoint",
    "data",
    "evaluation",
    "export",
    "filling",
    "generation",
    "inspection",
    "layers",
    "models",
    "ops",
    "runs",
    "text_generation",
    "training",
)


def __getattr__(name: str) -> Any:
    # Imported at first use: layers and models need torch alone, while checkpoints and training need more packages. The
    # command line must also be able to handle an interrupt while torch is being imported.
    if name in _HOMES:
        return getattr(import_module(f"lineartime.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return import_module(f"lineartime.{name}")
    if name == "__version__":
        from lineartime.host import installed_version

        return installed_version("lineartime") or "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
