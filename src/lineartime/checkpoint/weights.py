"""The weights in a checkpoint: compared with the model's config before memory is allocated, and checked when read."""

from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.fields import shown
from lineartime.files import utf8_path

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    from lineartime.models.config import ModelConfig
    from lineartime.models.language_model import LanguageModel

_FLOATS = ("F64", "F32", "F16", "BF16")


class UnfitWeightsError(ValueError):
    """Weights that do not fit the model. The message is a clause."""


def check_weights(file: Path, config: "ModelConfig") -> None:
    """Compare the names, shapes and types in the header of a file with what a model needs; nothing else is read.

    Raises:
        UnfitWeightsError: naming the tensor that differs, or if the file cannot be read.
        ArgumentError: for a model that is too large for PyTorch.
    """
    from safetensors import SafetensorError, safe_open

    from lineartime.models.memory import model_tensors

    size = model_tensors(config)
    try:
        with utf8_path(file) as path, safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
            if len(names) != size.n_tensors:
                what = f"{len(names):,} tensors, but a model of n_blocks = {size.n_blocks:,} has {size.n_tensors:,}"
                raise UnfitWeightsError(f"{file.name} has {what}")
            for name in sorted(names):
                wanted = size.tensor(name)
                if wanted is None:
                    raise UnfitWeightsError(f"{file.name} has the tensor {shown(name)}, which the model does not have")
                found = opened.get_slice(name)
                shape, dtype = list(found.get_shape()), found.get_dtype()
                if shape != list(wanted.shape):
                    raise UnfitWeightsError(f"{name} has the shape {shape}, but the model needs {list(wanted.shape)}")
                if wanted.is_floating_point() and dtype not in _FLOATS:
                    raise UnfitWeightsError(f"{name} is of type {dtype}, but must be one of {', '.join(_FLOATS)}")
                if not wanted.is_floating_point() and not dtype.startswith(("I", "U")):
                    raise UnfitWeightsError(f"{name} is of type {dtype}, but must be integers")
    except (SafetensorError, OSError) as error:
        raise UnfitWeightsError(f"{file.name}: {error}") from None


def load_weights(file: Path, model: "LanguageModel") -> None:
    """Copy the weights of a file into a model, one tensor at a time.

    Call `check_weights` first.

    Raises:
        UnfitWeightsError: if one of them is infinite or not a number, or the file cannot be read.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with torch.no_grad(), utf8_path(file) as path, safe_open(path, framework="pt") as opened:
            for name, own in model.state_dict().items():
                found = opened.get_tensor(name)
                if not torch.isfinite(found).all():
                    raise UnfitWeightsError(f"{name} holds numbers that are not finite")
                own.copy_(found)
    except (SafetensorError, OSError) as error:
        raise UnfitWeightsError(f"{file.name}: {error}") from None
