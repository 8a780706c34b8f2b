"""Pages that are made when the site is built, by a hook of mkdocs.yml: a page for each system, and the API reference.

All they say is read from the table of systems, the constructors and the docstrings, so that a new system has a page.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from typing import Any, get_args

from griffe import Docstring, DocstringSectionParameters
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import lineartime
from lineartime.layers.residual import constructor_options
from lineartime.models.systems import PRESETS, SIZES, SYSTEMS, System

ROOMS = ["layers", "ops", "models", "seq2seq", "data", "generation", "text_generation", "evaluation", "inspection", "export"]
ROOMS += ["foreign"] + (["hf"] if importlib.util.find_spec("transformers") else [])
"""The packages and modules of the API reference, besides the public names and the baselines."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages where the navigation has `systems/` and `api/`."""
    for entry in config.nav or []:
        for title, listed in entry.items():
            if isinstance(listed, list):
                entry[title] = [made for page in listed for made in _generated_entries(page)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def _generated_entries(page: Any) -> list[Any]:
    if page == "systems/":
        return [{name: system_path(name)} for name in SYSTEMS]
    if page == "api/":
        return [{"lineartime": "api/index.md"}, *({f"lineartime.{room}": f"api/{room}.md"} for room in (*ROOMS, "baselines"))]
    return [page]


def pages() -> dict[str, str]:
    """All generated pages, by their paths below docs/."""
    made = {system_path(name): system_page(name) for name in SYSTEMS}
    made |= {"api/index.md": public_names_page(), "api/baselines.md": baselines_page()}
    return made | {f"api/{room}.md": room_page(room) for room in ROOMS}


def system_path(name: str) -> str:
    """Where the page of a system is; a + would have to be escaped in addresses."""
    return f"systems/{name.replace('+', 'p')}.md"


def system_page(name: str) -> str:
    """What a system is, its formula, options and source."""
    system = SYSTEMS[name]
    return f"""# {name}

{system.describe()}.

{_facts(name, system)}

## Formula

{formula(system.mixer)}

## Options

{_options(system)}

## Source

{source(system.mixer)}

Where it leaves a choice: [Systems](../systems.md).
"""


def public_names_page() -> str:
    """The names of `lineartime` itself, each from its home."""
    homes = [_home(value) for value in map(_public, lineartime.__all__) if value is not None]
    return "\n\n".join(["# lineartime", inspect.getdoc(lineartime) or "", *map(_member, homes)]) + "\n"


def room_page(room: str) -> str:
    """The public names of a package or module; what is shown with the public names is linked from here."""
    module = importlib.import_module(f"lineartime.{room}")
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    parts = [f"# lineartime.{room}", prose(module)]
    shown = {id(_public(name)) for name in lineartime.__all__}
    for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
        value = getattr(module, name)
        if id(value) in shown:
            parts.append(f"{_link(value)}: see [lineartime](index.md).")
        else:
            is_at_home = inspect.isclass(value) or inspect.isfunction(value)
            parts.append(_member(_home(value) if is_at_home else f"{module.__name__}.{name}"))
    return "\n\n".join(parts) + "\n"


def baselines_page() -> str:
    """The layers of all systems that are not in `lineartime.layers`."""
    module = importlib.import_module("lineartime.baselines")
    mixers = dict.fromkeys(system.mixer for system in SYSTEMS.values())
    homes = [_home(mixer) for mixer in mixers if mixer.__module__.startswith(module.__name__)]
    return "\n\n".join([f"# {module.__name__}", prose(module), *map(_member, homes)]) + "\n"


def _home(value: Any) -> str:
    return f"{value.__module__}.{value.__name__}"


def _link(value: Any) -> str:
    """A link to the place of a class or function in the reference."""
    return f"[`{value.__name__}`][{_home(value)}]"


def _public(name: str) -> Any:
    """A class or function of `lineartime.__all__`; None for a plain value, which has no documentation of its own."""
    value = getattr(lineartime, name)
    return value if inspect.isclass(value) or inspect.isfunction(value) else None


def _member(path: str) -> str:
    return f"::: {path}"


def _facts(name: str, system: System) -> str:
    presets = ", ".join(f"`{preset}`" for preset, (of, _) in PRESETS.items() if of == name)
    reason = next(filter(None, (mixer.why_not_causal for mixer in system.mixers)), None)
    only = next(filter(None, (mixer.why_only_causal for mixer in system.mixers)), None)
    facts = {"layers": ", ".join(map(_link, system.mixers))}
    if pattern := system.fields.get("pattern"):
        facts["pattern"] = f"{', '.join(map(_code, pattern))}; the formula and the options below are those of the first"
    facts["feed-forward after it"] = "none" if system.feed_forward is None else _link(system.feed_forward)
    facts["presets"] = presets
    facts["causal"] = f"no: {reason}" if reason else f"always: {only}" if only else "yes"
    facts["prefix language model"] = "yes" if all(mixer.reads_prefix for mixer in system.mixers) else "no"
    return "\n".join(f"- {title}: {value}" for title, value in facts.items())


def formula(mixer: type[Any]) -> str:
    """The documentation of the modules that define a mixer: its own, those that it names, and those of its bases."""
    bases = [sys.modules[base.__module__] for base in mixer.__mro__ if base.__module__.startswith("lineartime.")]
    modules = []
    for module in dict.fromkeys(bases):
        named = re.findall(r"`(lineartime(?:\.\w+)+)`", module.__doc__ or "")
        modules += [module, *(importlib.import_module(name) for name in named)]
    own, *others = dict.fromkeys(modules)  # the first tells the shapes, even without a formula of its own
    shown = [own, *(module for module in others if re.search(r"^    \S", module.__doc__ or "", re.MULTILINE))]
    return "\n\n".join(f"In `{module.__name__}`:\n\n{prose(module)}" for module in shown)


def prose(module: Any) -> str:
    """A module's documentation without its sources."""
    text = inspect.cleandoc(module.__doc__ or "")
    return re.sub(r"^Source: .*?(?=\n\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).strip()


def source(mixer: type[Any]) -> str:
    """Where a mixer is published: the nearest source that its class, its module or its bases state."""
    for base in mixer.__mro__:
        module = sys.modules[base.__module__] if base.__module__.startswith("lineartime.") else None
        for text in (inspect.cleandoc(base.__doc__ or ""), "" if module is None else inspect.cleandoc(module.__doc__ or "")):
            found = re.search(r"^Source: (.*?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
            if found:
                return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", found[1])
    return ""


def _options(system: System) -> str:
    described = described_options(system.mixer)
    tiny, base = (system.layer(SIZES[size]).options for size in ("tiny", "base"))
    rows = []
    for name, option in constructor_options(system.mixer).items():
        cells = [_code(value) for value in (option.default, tiny.get(name, option.default), base.get(name, option.default))]
        rows.append((f"`{name}`", _type_name(option.type), *cells, described.get(name, "")))
    return _table(("option", "type", "default of the layer", "tiny", "base", "what it is"), rows)


def described_options(mixer: type[Any]) -> dict[str, str]:
    """The description of each option, from the nearest class that describes it."""
    found: dict[str, str] = {}
    for base in reversed(mixer.__mro__):
        sections = Docstring(inspect.getdoc(base) or "").parse("google", warnings=False) if "__doc__" in vars(base) else []
        for section in sections:
            if isinstance(section, DocstringSectionParameters):
                for parameter in section.value:
                    found |= dict.fromkeys(parameter.name.split(", "), " ".join(parameter.description.split()))
    return found


def _type_name(annotation: Any) -> str:
    choices = get_args(annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(_code(choice) for choice in choices)
    return f"`{annotation.__name__ if inspect.isclass(annotation) else annotation}`"


def _code(value: object) -> str:
    return f"`{value!r}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
