"""The weights in a checkpoint: compared with the model's config before memory is allocated, and checked when read."""

from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.fields import shown
from lineartime.files import utf8_path

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    from torch import Tensor

    from lineartime.models.config import ModelConfig
    from lineartime.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
    from lineartime.models.language_model import LanguageModel

FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of floating-point weights, as the header of a file names them."""


def all_finite(tensor: "Tensor") -> bool:
    """Whether all numbers are finite in float32, in which models are loaded."""
    return bool(tensor.float().isfinite().all())


class UnfitWeightsError(ValueError):
    """Weights that do not fit the model. The message is a clause."""


def check_weights(file: Path, config: "ModelConfig | EncoderDecoderConfig") -> None:
    """Compare the names, shapes and types in the header of a file with what a model needs; nothing else is read.

    Raises UnfitWeightsError, naming the tensor that differs, and ArgumentError for a model that is too large for PyTorch.
    """
    from safetensors import SafetensorError, safe_open

    from lineartime.models.memory import model_tensors

    size = model_tensors(config)
    try:
        with utf8_path(file) as path, safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is not a dict
            header = {name: (list(found.get_shape()), found.get_dtype()) for name, found in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UnfitWeightsError(f"{file.name}: {error}") from None
    if len(header) != size.n_tensors:
        what = f"{len(header):,} tensors, but a model of n_blocks = {size.n_blocks:,} has {size.n_tensors:,}"
        raise UnfitWeightsError(f"{file.name} has {what}")
    tensors = dict(size.items())
    for name, (shape, dtype) in sorted(header.items()):
        wanted = tensors.get(name)
        if wanted is None:
            raise UnfitWeightsError(f"{file.name} has the tensor {shown(name)}, which the model does not have")
        if shape != list(wanted.shape):
            raise UnfitWeightsError(f"{name} has the shape {shape}, but the model needs {list(wanted.shape)}")
        if wanted.is_floating_point() and dtype not in FLOATS:
            raise UnfitWeightsError(f"{name} is of type {dtype}, but must be one of {', '.join(FLOATS)}")
        if not wanted.is_floating_point() and not dtype.startswith(("I", "U")):
            raise UnfitWeightsError(f"{name} is of type {dtype}, but must be integers")


def load_weights(file: Path, model: "LanguageModel | EncoderDecoder") -> None:
    """Copy the weights of a file, which `check_weights` has compared, into a model, one tensor at a time.

    Raises UnfitWeightsError if one of them is infinite or not a number.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with torch.no_grad(), utf8_path(file) as path, safe_open(path, framework="pt") as opened:
            for name, own in model.state_dict().items():
                own.copy_(opened.get_tensor(name))
                if not torch.isfinite(own).all():  # float64 may hold numbers that are infinite in the dtype of the model
                    raise UnfitWeightsError(f"{name} holds numbers that are not finite")
    except (SafetensorError, OSError) as error:
        raise UnfitWeightsError(f"{file.name}: {error}") from None
