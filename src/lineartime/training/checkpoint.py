"""Checkpoints: directories of safetensors and JSON that are complete from the moment they can be seen.

A run's folder holds directories step-00000100, .... Each is written under another name and renamed when all its bytes are
on disk, so that being killed at any moment leaves only whole checkpoints. Which is the last and which the best is not
stored, but read off the directories.

    model.safetensors  model.json  tokenizer.json       all that `load`, `eval` and `generate` need
    training.safetensors  training.json                 all that `train --resume` needs besides
    manifest.json                                       the SHA-256 of each of these files, which all readers check
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.data.tokenizers import TOKENIZER_FILE, Tokenizer
from lineartime.errors import LineartimeError, cannot
from lineartime.models.config import ModelConfig
from lineartime.models.heads import CausalLM, LanguageModel, MaskedLM, build_model

_MANIFEST = "manifest.json"
_MODEL_FILES = ("model.safetensors", "model.json", TOKENIZER_FILE)
_FACTS = ("step", "validation_loss", "training_tokens", "config")  # the fields of a TrainingState that are kept in JSON


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to go on as if it had never stopped.

    Attributes:
        step: steps taken.
        validation_loss: in nats per token, at this step.
        training_tokens: in the text it learns from.
        config: the run's options, as a dictionary.
        tensors: the optimiser's and the random generators' state.
    """

    step: int
    validation_loss: float
    training_tokens: int
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def save_checkpoint(run: Path, model: LanguageModel, tokenizer: Tokenizer, state: TrainingState) -> Path:
    """Write a checkpoint, then delete those of the run that are neither the last nor the best.

    Raises:
        LineartimeError: if it cannot be written; the run's other checkpoints stay as they are.
    """
    target = run / f"step-{state.step:08d}"
    partial = _hidden(target)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_tensors(partial / "model.safetensors", dict(model.state_dict()))
        _write_json(partial / "model.json", model.config.to_dict())
        _write_text(partial / TOKENIZER_FILE, tokenizer.to_json())
        _write_tensors(partial / "training.safetensors", state.tensors)
        facts = {name: getattr(state, name) for name in _FACTS}
        _write_json(partial / "training.json", facts)
        _write_json(partial / _MANIFEST, {file.name: _digest(file) for file in sorted(partial.iterdir())})
        _sync(partial)
        partial.rename(target)
        _sync(run)
        keep = {last_checkpoint(run), best_checkpoint(run)}
        for checkpoint in list_checkpoints(run):
            if checkpoint not in keep:
                checkpoint.rename(_hidden(checkpoint))  # so that being killed while deleting leaves nothing half visible
                shutil.rmtree(_hidden(checkpoint))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        then = f"go on by --resume --out {run}" if list_checkpoints(run) else "run the command again"
        raise cannot("write", f"the checkpoint {target}", error, then) from None
    return target


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def last_checkpoint(run: Path) -> Path:
    """The latest checkpoint in a run's folder; LineartimeError if there is none."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        what = "has no checkpoint" if run.is_dir() else "does not exist" if not run.exists() else "is no folder"
        raise LineartimeError(f"{run} {what}: give the folder of a run, or of one of its checkpoints.")
    return checkpoints[-1]


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the lowest validation loss in a run's folder; LineartimeError if there is none."""
    last_checkpoint(run)
    return min(reversed(list_checkpoints(run)), key=lambda checkpoint: float(read_facts(checkpoint)["validation_loss"]))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is itself a checkpoint, perhaps a damaged one."""
    return any((path / name).is_file() for name in ("model.safetensors", "model.json"))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint directory `path`, or the best one of the run's folder `path`; LineartimeError if there is none."""
    return path if is_checkpoint(path) else best_checkpoint(path)


def load(path: str | Path, device: str | torch.device = "cpu") -> CausalLM | MaskedLM:
    """The model in a checkpoint directory, or the best one of a run's folder, ready for use (in evaluation mode).

    Raises:
        LineartimeError: if there is no checkpoint, or it is damaged.
    """
    checkpoint = find_checkpoint(Path(path))
    _verify(checkpoint, _MODEL_FILES)
    try:
        model = build_model(ModelConfig.from_dict(_read_json(checkpoint / "model.json")))
        model.load_state_dict(_read_tensors(checkpoint / "model.safetensors"))
    except (ValueError, RuntimeError) as error:
        raise _damaged(checkpoint, str(error).splitlines()[0]) from None
    return model.to(device).eval()


def read_training_state(checkpoint: Path) -> TrainingState:
    """What `save_checkpoint` was given; LineartimeError if the checkpoint is damaged."""
    _verify(checkpoint, ("training.safetensors", "training.json"))
    facts = read_facts(checkpoint)
    tensors = _read_tensors(checkpoint / "training.safetensors")
    return TrainingState(**{name: facts[name] for name in _FACTS}, tensors=tensors)


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What a `TrainingState` holds besides tensors; LineartimeError if it cannot be read."""
    facts = _read_json(checkpoint / "training.json")
    if not facts.keys() >= set(_FACTS):
        raise _damaged(checkpoint, "training.json lacks fields")
    return facts


def remove_partial(run: Path) -> None:
    """Delete what a killed process left half written or half deleted."""
    for partial in run.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _hidden(checkpoint: Path) -> Path:
    """Where a checkpoint stands before it is whole, and while it is deleted."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def _verify(checkpoint: Path, names: Sequence[str]) -> None:
    """Raise LineartimeError unless these files are there, byte for byte as they were written."""
    for name in (*names, _MANIFEST):
        if not (checkpoint / name).is_file():
            raise _damaged(checkpoint, f"{name} is missing")
    manifest = _read_json(checkpoint / _MANIFEST)
    for name in names:
        file, digest = checkpoint / name, manifest.get(name)
        try:
            found = _digest(file)
        except OSError as error:
            raise cannot("read", file, error) from None
        if found != digest:
            raise _damaged(checkpoint, f"{name} is not what was written")


def _damaged(checkpoint: Path, reason: str) -> LineartimeError:
    siblings = list_checkpoints(checkpoint.parent)
    others = [other.name for other in siblings if other != checkpoint] if checkpoint in siblings else []
    advice = f"delete it to go on from {others[-1]}" if others else "restore it from a copy, or train again"
    return LineartimeError(f"The checkpoint {checkpoint} is damaged ({reason}): {advice}.")


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    _sync(file)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    _write_text(file, json.dumps(data, indent=2) + "\n")


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from None
    _sync(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        hasher = hashlib.sha256()
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot("read", file, error) from None
    except ValueError:
        raise _damaged(file.parent, f"{file.name} is not JSON") from None
    if not isinstance(data, dict):
        raise _damaged(file.parent, f"{file.name} is not a JSON object")
    return data


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _damaged(file.parent, f"{file.name}: {error}") from None
