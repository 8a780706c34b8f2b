"""Read the contents of a transformers folder without running or allocating anything."""

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lineartime.errors import LineartimeError
from lineartime.files import utf8_path
from lineartime.json_files import read_plain

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The weight files in a folder; raises LineartimeError if there are none, or if the index names files elsewhere."""
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise LineartimeError(f"{folder} holds no {WEIGHTS}: save the model with safetensors.")
        return [folder / WEIGHTS]
    listed = read_plain(folder / INDEX).get("weight_map")
    names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
    if not names:
        raise LineartimeError(f"{folder / INDEX} names no files of weights: restore it from a copy.")
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise LineartimeError(f"{folder / INDEX} names {name!r}, which is not a weight file in this folder.")
    return [folder / name for name in names]


def read_shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a file, by name, from the header alone; raises LineartimeError if the file is damaged."""
    try:
        with utf8_path(file) as path, safe_open(path, "pt") as opened:
            names = list(opened.keys())
            return {name: opened.get_slice(name).get_shape() for name in names}
    except (SafetensorError, OSError) as error:
        raise LineartimeError(f"{file} is damaged ({error}): restore it from a copy.") from None


def check_blocks(folder: Path, blocks: int) -> None:
    """Raise LineartimeError for a configuration with more blocks than there are tensors, before blocks are built."""
    tensors = sum(len(read_shapes(file)) for file in weight_files(folder))
    if blocks > tensors:
        raise LineartimeError(f"{folder} holds {tensors} tensors, but its {CONFIG} specifies {blocks} blocks: it is damaged.")
