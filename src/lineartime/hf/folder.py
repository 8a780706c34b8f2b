"""Read the contents of a transformers folder without running or allocating anything."""

import re
from pathlib import Path

from safetensors import SafetensorError

from lineartime.checkpoint.weights import Stored, read_header
from lineartime.errors import LineartimeError
from lineartime.json_files import read_plain

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"


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


def read_folder_header(file: Path) -> dict[str, Stored]:
    """The tensors in a file by name, without their values; raises LineartimeError if the file is missing or damaged."""
    try:
        return read_header(file)
    except FileNotFoundError:
        raise LineartimeError(f"{file} is missing: copy all files of the model into this folder.") from None
    except (SafetensorError, OSError) as error:
        raise LineartimeError(f"{file} is damaged ({error}): restore it from a copy.") from None


def check_not_adapter(folder: Path) -> None:
    """Raise LineartimeError for a folder that holds an adapter of PEFT and no model."""
    if (folder / ADAPTER).exists() and not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
        raise LineartimeError(
            f"{folder} holds only an adapter: merge it into its model with merge_and_unload(), and save that model."
        )


def check_blocks(folder: Path, blocks: int) -> None:
    """Raise LineartimeError for a configuration with more blocks than there are tensors, before blocks are built."""
    tensors = sum(len(read_folder_header(file)) for file in weight_files(folder))
    if blocks > tensors:
        raise LineartimeError(f"{folder} holds {tensors} tensors, but its {CONFIG} specifies {blocks} blocks: it is damaged.")
