"""Save a model outside of a training run: one that was modified, or trained in your own loop."""

from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.checkpoint.format import WEIGHTS, UnfitWeightsError, all_finite, check_weights, write_files
from lineartime.errors import ArgumentError
from lineartime.files import new_folder, os_error_behind

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    from lineartime.data import Tokenizer
    from lineartime.models.language_model import LanguageModel
    from lineartime.seq2seq import EncoderDecoder

    AnyModel = LanguageModel | EncoderDecoder


def save(model: "AnyModel", tokenizer: "Tokenizer", folder: str | Path) -> Path:
    """Save a model with its tokenizer into a new folder, which `load`, `evaluate` and all commands can read.

    The folder is written under a temporary name and renamed when all of it is on the disk.

    Args:
        model: the model, on any device.
        tokenizer: the tokenizer with which the model was trained.
        folder: where to save it; a folder that is not empty is not replaced.

    Returns:
        The folder.

    Raises:
        ArgumentError: for anything but a model, layers or weights that are not those of the model's config, weights that are
            not finite, a tokenizer that does not fit, or a folder that cannot be used.
        LineartimeError: if it cannot be written.
    """
    from lineartime.data.tokenizers import check_vocabulary
    from lineartime.models.language_model import LanguageModel, check_model
    from lineartime.seq2seq import EncoderDecoder

    if not isinstance(model, EncoderDecoder):
        model = check_model(model, LanguageModel, "be saved", computes=False)
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_finite("model", model)
    check_layers(model)
    with new_folder("folder", Path(folder)) as partial:
        write_model(partial, model, tokenizer)
        try:
            check_weights(partial / WEIGHTS, model.config)
        except UnfitWeightsError as error:
            raise ArgumentError("model", f"could not be loaded again: {error}.") from None
    return Path(folder)


def check_finite(argument: str, model: "AnyModel") -> None:
    """Raise ArgumentError, naming the argument that holds the model, unless all weights are finite."""
    for name, weight in model.state_dict().items():
        if weight.is_meta:
            raise ArgumentError(argument, f"has {name} on the meta device, where it has no values: move it from there first.")
        if not all_finite(weight.detach().cpu()):
            raise ArgumentError(argument, f"has numbers in {name} that are not finite, so it could not be loaded again.")


def check_layers(model: "AnyModel") -> None:
    """Raise ArgumentError unless every module has the class and the options with which the config builds it again."""
    from torch import nn

    from lineartime.machine import shapes_only

    with shapes_only():
        built = model.config.build()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, wanted in built.named_modules(remove_duplicate=False):
        found = modules.get(name)
        if found is None or isinstance(found, nn.Dropout):  # missing weights are named later; saved models do not drop
            continue
        if type(found) is not type(wanted):
            raise ArgumentError(
                "model",
                f"has a {type(found).__name__} as {name}, but a {type(wanted).__name__} in its config, so another model would "
                "be loaded: save its state_dict() instead.",
            )
        for option, value in vars(wanted).items():
            is_option = isinstance(value, (bool, int, float, str, type(None))) and option[0] != "_" and option != "training"
            if is_option and getattr(found, option) != value:
                raise ArgumentError(
                    "model",
                    f"has {option} = {getattr(found, option)!r} in {name}, but {value!r} in its config, so another model would "
                    f"be loaded: build it with {option}={getattr(found, option)!r}, and copy its weights.",
                )


def write_model(folder: Path, model: "AnyModel", tokenizer: "Tokenizer") -> None:
    """Write a model and its tokenizer into a folder. Raises OSError or LineartimeError on failure."""
    from safetensors import SafetensorError

    # Copies, because safetensors refuses weights that share memory.
    weights = {name: weight.detach().to("cpu", copy=True) for name, weight in model.state_dict().items()}
    try:
        write_files(folder, weights, model.config, tokenizer)
    except SafetensorError as error:
        raise os_error_behind(error) from None
