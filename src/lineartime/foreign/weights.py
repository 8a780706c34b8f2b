"""Read weight files of other packages, without trusting their contents."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lineartime.checkpoint import all_finite
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
        try:
            found = load_file(file) if file.suffix == ".safetensors" else _read_pickle(file, size)
        except SafetensorError as error:
            raise LineartimeError(f"{file} is damaged ({error}): restore it from a copy.") from None
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


def _read_pickle(file: Path, size: int) -> object:
    """Read what torch.save wrote. Only uncompressed archives are opened: others could take more memory than their size."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # what zipfile raises for anything that is no archive
        what = "is no file of weights: give one of safetensors, or of torch.save of PyTorch 1.6 or newer."
        raise LineartimeError(f"{file} {what}") from None
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or sum(r.file_size for r in records) > size:
        raise LineartimeError(f"{file} is damaged: it is an archive that torch.save does not write.")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        reason = "it holds objects besides tensors" if "weights_only" in str(error) else typed_first_line(error)
        raise LineartimeError(f"{file} cannot be read safely ({reason}): save the state_dict() of the model alone.") from None


class StateDict(dict[str, Tensor]):
    """Named tensors of another package, taken one by one; `finish` reports those that were not taken."""

    def __init__(self, tensors: Mapping[str, Tensor], package: str) -> None:
        if not isinstance(tensors, Mapping):
            found = type(tensors).__name__
            raise ArgumentError("weights", f"is of type {found}, but must be tensors by name: give model.state_dict().")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                found = f"holds a {type(tensor).__name__} as {shown(name)}"
                raise ArgumentError("weights", f"{found}, but must be tensors by name: give model.state_dict().")
        super().__init__(tensors)
        self.package = package

    def __missing__(self, name: str) -> Tensor:
        raise LineartimeError(f"The weights lack {name}, which {self.package} has.")

    def part(self, anchor: str) -> "StateDict":
        """The tensors of the only module that has one of the name `anchor`; raises LineartimeError unless there is one."""
        found = [name.removesuffix(anchor) for name in self if re.search(rf"(?:^|\.){re.escape(anchor)}$", name)]
        if not found:
            raise LineartimeError(f"The weights lack {anchor}, which {self.package} has.")
        if len(found) > 1:
            places = f"{shown(found[0])} and {len(found) - 1} more"
            raise LineartimeError(f"The weights hold {len(found)} units of {self.package}, {places}: give those of one.")
        own = {name.removeprefix(found[0]): tensor for name, tensor in self.items() if name.startswith(found[0])}
        return StateDict(own, self.package)

    def count(self, pattern: str) -> int:
        """The number of consecutive integers from 0 that the first group of a pattern matches at the beginnings of names."""
        found = {int(match[1]) for name in self if (match := re.match(pattern, name)) and len(match[1]) < 7}
        return next(number for number in range(len(found) + 1) if number not in found)

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a matrix; raises LineartimeError if it is missing or has another number of dimensions."""
        shape = list(self[name].shape)
        if len(shape) != 2:
            raise LineartimeError(f"{name} has shape {shape}, but {self.package} has a matrix there.")
        return shape[0], shape[1]

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor of that shape, as float32 or wider; raises LineartimeError if there is none."""
        tensor = self[name]
        if tuple(tensor.shape) != shape:
            raise LineartimeError(f"{name} has shape {list(tensor.shape)}, but {self.package} has {list(shape)} there.")
        if not tensor.is_floating_point():
            raise LineartimeError(f"{name} has dtype {tensor.dtype}, but must be floating-point.")
        del self[name]
        return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))

    def finish(self) -> None:
        """Raise LineartimeError for tensors that were not taken."""
        if self:
            raise LineartimeError(f"The weights hold {shown(min(self))}, which {self.package} does not have.")


def interleaved_order(width: int, rotated: int) -> list[int]:
    """The index of each feature of our queries and keys in code that rotates neighbouring features.

    For i below rotated / 2, our code rotates feature i with feature width / 2 + i, theirs 2 i with 2 i + 1.
    """
    still = list(range(rotated, width))
    half = (width - rotated) // 2
    return [*range(0, rotated, 2), *still[:half], *range(1, rotated, 2), *still[half:]]
