"""Systems of your own: registered by name, in modules that the command line and other processes can import."""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lineartime.errors import ArgumentError, LineartimeError, check_choice, first_line, typed_first_line
from lineartime.fields import check_names
from lineartime.layers.mixer import Mixer
from lineartime.machine import shapes_only
from lineartime.models.config import KINDS, ModelConfig, own_options
from lineartime.models.systems import PRESETS, SIZES, SYSTEMS, Size, System

VARIABLE = "LINEARTIME_IMPORT"
"""The environment variable that names modules to import with the models, so that all processes know the same systems."""

FeedForward = Literal["mlp", "glu"]
_OF_THE_LIBRARY = frozenset(SYSTEMS)


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
    if name in _OF_THE_LIBRARY:
        raise ArgumentError("name", f"is {name!r}, which is a system of the library: choose another one.")
    if feed_forward is not None:
        check_choice("feed_forward", feed_forward, get_args(FeedForward))
    layer = None if feed_forward is None else KINDS["feed_forward"][feed_forward]
    _check_mixer(mixer, layer)
    fixed = ("task", "vocab_size", "d_model", "n_blocks", "mixer", "feed_forward")  # by the size and the arguments
    check_names(fields or {}, [field for field in ModelConfig.__dataclass_fields__ if field not in fixed], "fields")
    system = System(mixer, layer, {**(options or {}), **(scaled or {})}, fields or {}, description=description)
    mixers = KINDS["mixer"]
    before = dict(mixers)
    mixers[mixer.name] = mixer  # a class that is defined again replaces the one before
    try:
        for size in ("tiny", "base"):
            _check_builds(system, SIZES[size])
    except BaseException:
        mixers.clear()
        mixers.update(before)
        raise
    SYSTEMS[name] = system
    PRESETS.update({f"{name}-{size}": (name, SIZES[size]) for size in ("tiny", "base")})


def _check_mixer(mixer: object, feed_forward: type[Any] | None) -> None:
    """Raise ArgumentError unless `mixer` is the class of a mixer whose name, and the names of whose options, are its own."""
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise ArgumentError("mixer", f"is {mixer!r}, but must be a class derived from lineartime.layers.Mixer.")
    if not isinstance(getattr(mixer, "name", None), str):
        raise ArgumentError("mixer", f"is {mixer.__name__}, which has no name: give the class an attribute `name`.")
    other = next((kinds[mixer.name] for kinds in KINDS.values() if mixer.name in kinds), None)
    if other is not None and _origin(other) != _origin(mixer):
        found = f"is {mixer.__name__}, whose name, {mixer.name!r}, is that of {other.__name__}"
        raise ArgumentError("mixer", f"{found}: give the class an attribute `name` of its own.")
    others = {} if feed_forward is None else own_options(feed_forward)
    for option in own_options(mixer):  # `ModelConfig.override` names no layer
        if option in {"kind", *others, *ModelConfig.__dataclass_fields__}:
            found = f"is {mixer.__name__}, whose option {option} has the name of one of"
            raise ArgumentError("mixer", f"{found} {'the feed-forward layer' if option in others else 'the model'}: rename it.")


def _origin(layer: type[Any]) -> tuple[str, str]:
    """Where a class was defined: the same for a class that is defined again, also in a file that is imported in another way."""
    place = getattr(sys.modules.get(layer.__module__), "__file__", layer.__module__)  # in a notebook, there is no file
    return place, layer.__qualname__


def _check_builds(system: System, size: Size) -> None:
    """Raise ArgumentError unless a model of the system can be built, and restored from what model.json records."""
    name = system.mixer.__name__
    config = system.model(size, "clm" if system.why_not_learned("clm") is None else "mlm").first_round
    try:
        with shapes_only():
            ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))).build()
    except (TypeError, ArgumentError) as error:  # of an abstract class, or of an option that JSON cannot hold
        types = "the types bool, int, float, str, Literal, None or tuple[..., ...] of these"
        found = f"is {name}, of which no model can be built from model.json ({first_line(error).rstrip('.')})"
        raise ArgumentError("mixer", f"{found}: complete the class, and give its options {types}.") from None


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
