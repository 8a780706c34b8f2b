"""Files of weights that other packages saved, of which nothing is believed."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lineartime.data.hub import first_line
from lineartime.errors import LineartimeError, reporting
from lineartime.fields import shown

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""How the names of files of weights end."""
_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The names under which training scripts keep the weights in a file with other things."""


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights by their names, on the CPU: of safetensors or of torch.save, without running code.

    Raises:
        LineartimeError: if the file cannot be read, or holds something else.
    """
    with reporting("read", file):
        size = file.stat().st_size
        found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file, size)
    if isinstance(found, Mapping):
        found = next((found[name] for name in _WRAPPERS if isinstance(found.get(name), Mapping)), found)
    if not isinstance(found, Mapping) or not found:
        raise LineartimeError(f"{file} holds no weights: save the state_dict() of the model.")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise LineartimeError(f"{file} holds {shown(name)}, which is no tensor: save the state_dict() of the model alone.")
        if tensor.numel() * tensor.element_size() > size:  # one number that says it is millions
            raise LineartimeError(f"{file} is damaged: {shown(name)} is larger than the file.")
        if not torch.isfinite(tensor).all():
            raise LineartimeError(f"{file} is damaged: {shown(name)} holds numbers that are not finite.")
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def _read_safetensors(file: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise LineartimeError(f"{file} is damaged ({error}): restore it from a copy.") from None


def _read_pickle(file: Path, size: int) -> object:
    """What torch.save wrote. Only archives without compression are opened: others could take memory beyond their size."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise LineartimeError(
            f"{file} is no file of weights: give one of safetensors, or of torch.save of PyTorch 1.6 or newer."
        ) from None
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or sum(r.file_size for r in records) > size:
        raise LineartimeError(f"{file} is damaged: it is an archive that torch.save does not write.")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # the reader of pickles raises whatever a damaged one makes it run into
        reason = "it holds objects besides tensors" if "weights_only" in str(error) else first_line(error)
        raise LineartimeError(f"{file} cannot be read safely ({reason}): save the state_dict() of the model alone.") from None


class StateDict:
    """Named tensors of another package, taken one by one: `finish` tells of those that nobody took."""

    def __init__(self, tensors: Mapping[str, Tensor], package: str) -> None:
        self._left = dict(tensors)
        self._package = package

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def count(self, pattern: str) -> int:
        """How many numbers, from 0 on, the first group of a pattern finds at the beginnings of names."""
        found = {int(match[1]) for name in self._left if (match := re.match(pattern, name)) and len(match[1]) < 7}
        return next(number for number in range(len(found) + 1) if number not in found)

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor; LineartimeError if there is none, or it has another number of dimensions."""
        tensor = self._find(name)
        if tensor.dim() != dimensions:
            raise LineartimeError(
                f"{name} has shape {list(tensor.shape)}, but {self._package} has {dimensions} dimensions there."
            )
        return tuple(tensor.shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of that shape, as float32 or wider; LineartimeError if there is none."""
        tensor = self._find(name)
        if tuple(tensor.shape) != shape:
            raise LineartimeError(f"{name} has shape {list(tensor.shape)}, but {self._package} has {list(shape)} there.")
        if not tensor.is_floating_point():
            raise LineartimeError(f"{name} has dtype {tensor.dtype}, but must hold numbers with fractions.")
        del self._left[name]
        return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))

    def drop(self, name: str) -> None:
        """Leave out a tensor that is not needed, if it is there."""
        self._left.pop(name, None)

    def finish(self) -> None:
        """LineartimeError for tensors that nobody took."""
        if self._left:
            raise LineartimeError(f"The weights hold {shown(min(self._left))}, which {self._package} does not have.")

    def _find(self, name: str) -> Tensor:
        if name not in self._left:
            raise LineartimeError(f"The weights lack {name}, which {self._package} has.")
        return self._left[name]


def interleaved_order(width: int, rotated: int) -> list[int]:
    """Where each feature of our queries and keys stands in those of code that rotates neighbouring features.

    Ours turns feature i with feature width / 2 + i, theirs 2 i with 2 i + 1, for i below rotated / 2.
    """
    still = list(range(rotated, width))
    half = (width - rotated) // 2
    return [*range(0, rotated, 2), *still[:half], *range(1, rotated, 2), *still[half:]]
