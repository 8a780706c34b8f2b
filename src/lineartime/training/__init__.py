"""Training: `loop.train` runs it, `config.TrainConfig` holds its options, `parallel` divides it over processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.training.config import TrainConfig
    from lineartime.training.loop import TrainingResult, train

__all__ = ["TrainConfig", "TrainingResult", "train"]

_MODULE_OF = {"TrainConfig": "config", "TrainingResult": "loop", "train": "loop"}


def __getattr__(name: str) -> Any:
    # Imported at first use: the command line reads the options of training without PyTorch.
    if name in _MODULE_OF:
        return getattr(import_module(f"lineartime.training.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
