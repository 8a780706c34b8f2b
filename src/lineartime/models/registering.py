"""Systems of your own: registered by name, in modules that the command line and other processes can import."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lineartime.errors import ArgumentError, LineartimeError, check_choice, typed_first_line
from lineartime.fields import check_names, check_type
from lineartime.layers.mixer import Mixer
from lineartime.models.config import ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.layer_config import KINDS, own_options
from lineartime.models.presets import PRESETS, SIZES, model_of
from lineartime.models.systems import SYSTEMS, Size, System
from lineartime.shapes import shapes_only

VARIABLE = "LINEARTIME_IMPORT"
"""The environment variable that names modules to import with the models, so that all processes know the same systems."""

_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("task", "vocab_size", "d_model", "n_blocks", "mixer", "feed_forward")  # of the size and the arguments
)
"""The fields of a model that a system may set."""
FeedForward = Literal["mlp", "glu"]
_registered: set[str] = set()


def register_system(
    name: str,
    mixer: type[Mixer],
    feed_forward: FeedForward | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    scaled: Mapping[str, Callable[[Size], int | str]] | None = None,
    fields: Mapping[str, Any] | None = None,
    description: str = "",
) -> None:
    """Add a system of your own, with the presets NAME-tiny and NAME-base, as if it were a row of the table of systems.

    Registering the same name again replaces the system, as when a cell of a notebook is run again.

    Args:
        name: of lower-case letters, digits, + and -, beginning with a letter; not that of a system of the library.
        mixer: the class of the layer that moves information between tokens. Its attribute `name`, which model.json records,
            must be its own.
        feed_forward: the layer after the mixer in a Transformer block, "mlp" or "glu"; None for a gated unit, which needs none.
        options: options of the mixer that differ from its class's defaults and from the size.
        scaled: options of the mixer that are computed from the `Size` of the model; `d_qk`, `n_heads` and `chunk_size` are.
        fields: fields of `ModelConfig` that differ from the usual ones.
        description: in a line; the default is the first line of the mixer's docstring.

    Raises:
        ArgumentError: for a name that is taken or not a name, and a class that is not a complete mixer or lacks an option.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9+-]*", name):
        raise ArgumentError("name", f"is {name!r}, but must begin with a-z, and consist of a-z, 0-9, + and -.")
    if name in SYSTEMS and name not in _registered:
        raise ArgumentError("name", f"is {name!r}, which is a system of the library: choose another one.")
    _check_mixer(mixer)
    if feed_forward is not None:
        check_choice("feed_forward", feed_forward, get_args(FeedForward))
    layer = None if feed_forward is None else KINDS["feed_forward"][feed_forward]
    for argument, given in (("options", options), ("scaled", scaled), ("fields", fields)):
        if given is not None:
            check_type(argument, given, dict)
    system = System(mixer, layer, options or {}, scaled or {}, fields or {}, description=description)
    check_names({**system.options, **system.scaled}, own_options(mixer), mixer.__name__)
    check_names(system.fields, _FIELDS, "fields")
    _check_options(mixer, layer, system.options)
    mixers = KINDS["mixer"]
    before = dict(mixers)
    mixers[mixer.name] = mixer  # a class that is defined again replaces the one before
    try:
        _check_builds(system)
    except BaseException:
        mixers.clear()
        mixers.update(before)
        raise
    _registered.add(name)
    SYSTEMS[name] = system
    PRESETS.update({f"{name}-{size}": (name, SIZES[size]) for size in ("tiny", "base")})


def _check_builds(system: System) -> None:
    """Raise ArgumentError unless the presets of a system are models that can be built."""
    name, causal = system.mixer.__name__, system.mixer.why_not_causal is None
    for size in (SIZES["tiny"], SIZES["base"]):
        for option, of_size in system.scaled.items():
            try:
                of_size(size)
            except Exception as error:  # whatever the function does
                raise ArgumentError("scaled", f"has a function for {option} that fails: {typed_first_line(error)}.") from error
        try:
            with shapes_only():
                system.mixer(size.d_model, causal=causal, **system.mixer_options(size))
                build_model(model_of(system, size, "clm" if causal else "mlm").override(n_blocks=1))
        except TypeError as error:  # an abstract class, or an option without a default, for instance
            raise ArgumentError("mixer", f"is {name}, which cannot be built with these options: {error}.") from None


def _check_mixer(mixer: object) -> None:
    """Raise ArgumentError unless `mixer` is the class of a mixer with a name of its own."""
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise ArgumentError("mixer", f"is {mixer!r}, but must be a class derived from lineartime.layers.Mixer.")
    if not isinstance(getattr(mixer, "name", None), str):
        raise ArgumentError("mixer", f"is {mixer.__name__}, which has no name: give the class an attribute `name`.")
    other = next((kinds[mixer.name] for kinds in KINDS.values() if mixer.name in kinds), None)
    if other is not None and _origin(other) != _origin(mixer):
        found = f"is {mixer.__name__}, whose name, {mixer.name!r}, is that of {other.__name__}"
        raise ArgumentError("mixer", f"{found}: give the class an attribute `name` of its own.")


def _check_options(mixer: type[Mixer], feed_forward: type[Any] | None, values: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an option of a mixer that no checkpoint can record, as JSON, and read back.

    Options are named without their layer, so that no two parts of a model may have one of the same name.
    """
    others = {} if feed_forward is None else own_options(feed_forward)
    taken = {"kind", *(field.name for field in dataclasses.fields(ModelConfig)), *others}
    for name, option in own_options(mixer).items():
        if name in taken:
            owner = "the feed-forward layer" if name in others else "the model"
            raise ArgumentError("mixer", f"is {mixer.__name__}, whose option {name} has the name of one of {owner}: rename it.")
        wanted = f"is {mixer.__name__}, whose option {name}"
        if not _is_plain_type(option.type):
            allowed = "bool, int, float, str, Literal, None and tuple[..., ...] of these"
            found = f"{wanted} is of type {inspect.formatannotation(option.type)}"
            raise ArgumentError("mixer", f"{found}, but a checkpoint can only record {allowed}.")
        value = values.get(name, option.default)
        if value is not inspect.Parameter.empty and not _is_plain(value):
            raise ArgumentError(
                "mixer", f"{wanted} is {value!r}, which no checkpoint can record: use a number, a text or None."
            )


def _is_plain_type(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return all(map(_is_plain_type, get_args(hint)))
    if get_origin(hint) is Annotated:
        return _is_plain_type(get_args(hint)[0])
    if get_origin(hint) is tuple:
        items = get_args(hint)
        return len(items) == 2 and items[1] is ... and _is_plain_type(items[0])
    if get_origin(hint) is Literal:
        return all(map(_is_plain, get_args(hint)))
    return hint in (bool, int, float, str, NoneType, Any)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _origin(layer: type[Any]) -> tuple[str, str]:
    """Where a class was defined: the same for a class that is defined again, also in a file that is imported in another way."""
    try:
        place = inspect.getsourcefile(layer) or layer.__module__
    except (TypeError, OSError):  # in a notebook or at a prompt
        place = layer.__module__
    return place, layer.__qualname__


def import_modules(names: Iterable[str]) -> None:
    """Import modules, or the files ending in .py, that register systems; each once. A file can import what is beside it.

    Raises:
        LineartimeError: naming the first one that cannot be imported, and the line of the error.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            beside = f": write {name}.py for the file" if error.name == name and Path(f"{name}.py").exists() else ""
            raise LineartimeError(f"Cannot import {name} ({typed_first_line(error).rstrip('.')}){beside}.") from error
        except Exception as error:  # whatever the module does
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f", line {frame.lineno} of {frame.filename}" if frame.filename.endswith(".py") else ""
            raise LineartimeError(f"Cannot import {name} ({typed_first_line(error).rstrip('.')}{where}).") from error


def _import_file(file: Path) -> None:
    """Import a file, unless it has been imported by this or another name."""
    if any(getattr(module, "__file__", None) == str(file) for module in list(sys.modules.values())):
        return
    name = f"lineartime_imported_{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # the suffix is .py
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))


def import_everywhere(names: Sequence[str]) -> None:
    """Import modules here and in all processes that this one starts. Raises as `import_modules`."""
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*imported_names(), *names]))
    import_modules(names)


def imported_names() -> list[str]:
    """The modules and files that the environment variable names, separated as in PATH."""
    return list(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
