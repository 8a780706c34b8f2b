"""Read weight files of other packages, without trusting their contents."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lineartime.checkpoint.format import all_finite
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors, typed_first_line
from lineartime.fields import shown

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of weight files."""
_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The keys under which training scripts store the weights in a file with other data."""

_WRAPPED = re.compile(r"^module\.|(?:^|(?<=\.))_orig_mod\.(?:module\.)?")
"""What distributed training and torch.compile put into the names of the modules that they wrap."""


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read the tensors in a weight file by name, on the CPU, from safetensors or torch.save, without running code.

    Raises:
        LineartimeError: if the file cannot be read, or does not hold weights.
    """
    file = Path(file)
    with reporting_file_errors("read", file):
        size = file.stat().st_size
        found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file, size)
    if isinstance(found, Mapping):
        found = next((found[name] for name in _WRAPPERS if isinstance(found.get(name), Mapping)), found)
    if not isinstance(found, Mapping) or not found:
        raise LineartimeError(f"{file} holds no weights: save the state_dict() of the model.")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise LineartimeError(f"{file} holds {shown(name)}, which is no tensor: save the state_dict() of the model alone.")
        if tensor.numel() * tensor.element_size() > size:  # an expanded view: one stored number claims to be millions
            raise LineartimeError(f"{file} is damaged: {shown(name)} is larger than the file.")
        if not all_finite(tensor):
            raise LineartimeError(f"{file} is damaged: {shown(name)} holds numbers that are not finite.")
    return {_WRAPPED.sub("", name): tensor for name, tensor in found.items()}


def _read_safetensors(file: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise LineartimeError(f"{file} is damaged ({error}): restore it from a copy.") from None


def _read_pickle(file: Path, size: int) -> object:
    """Read what torch.save wrote. Only uncompressed archives are opened: others could take more memory than their size."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # what zipfile raises for anything that is no archive
        raise LineartimeError(
            f"{file} is no file of weights: give one of safetensors, or of torch.save of PyTorch 1.6 or newer."
        ) from None
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or sum(r.file_size for r in records) > size:
        raise LineartimeError(f"{file} is damaged: it is an archive that torch.save does not write.")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        reason = "it holds objects besides tensors" if "weights_only" in str(error) else typed_first_line(error)
        raise LineartimeError(f"{file} cannot be read safely ({reason}): save the state_dict() of the model alone.") from None


class StateDict:
    """Named tensors of another package, taken one by one; `finish` reports those that were not taken."""

    def __init__(self, tensors: Mapping[str, Tensor], package: str) -> None:
        if not isinstance(tensors, Mapping):
            found = type(tensors).__name__
            raise ArgumentError("weights", f"is of type {found}, but must be tensors by name: give model.state_dict().")
        self._left = dict(tensors)
        self._package = package

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def count(self, pattern: str) -> int:
        """The number of consecutive integers from 0 that the first group of a pattern matches at the beginnings of names."""
        found = {int(match[1]) for name in self._left if (match := re.match(pattern, name)) and len(match[1]) < 7}
        return next(number for number in range(len(found) + 1) if number not in found)

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor; raises LineartimeError if it is missing or has another number of dimensions."""
        tensor = self._find(name)
        if tensor.dim() != dimensions:
            raise LineartimeError(
                f"{name} has shape {list(tensor.shape)}, but {self._package} has {dimensions} dimensions there."
            )
        return tuple(tensor.shape)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored."""
        return self._find(name).dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor of that shape, as float32 or wider; raises LineartimeError if there is none."""
        tensor = self._find(name)
        if tuple(tensor.shape) != shape:
            raise LineartimeError(f"{name} has shape {list(tensor.shape)}, but {self._package} has {list(shape)} there.")
        if not tensor.is_floating_point():
            raise LineartimeError(f"{name} has dtype {tensor.dtype}, but must be floating-point.")
        del self._left[name]
        return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))

    def drop(self, name: str) -> None:
        """Drop a tensor that is not needed, if it is present."""
        self._left.pop(name, None)

    def finish(self) -> None:
        """Raise LineartimeError for tensors that were not taken."""
        if self._left:
            raise LineartimeError(f"The weights hold {shown(min(self._left))}, which {self._package} does not have.")

    def _find(self, name: str) -> Tensor:
        if name not in self._left:
            raise LineartimeError(f"The weights lack {name}, which {self._package} has.")
        return self._left[name]


def interleaved_order(width: int, rotated: int) -> list[int]:
    """The index of each feature of our queries and keys in code that rotates neighbouring features.

    For i below rotated / 2, our code rotates feature i with feature width / 2 + i, theirs 2 i with 2 i + 1.
    """
    still = list(range(rotated, width))
    half = (width - rotated) // 2
    return [*range(0, rotated, 2), *still[:half], *range(1, rotated, 2), *still[half:]]
