"""Count what a reader of the code meets: `python benchmarks/structure.py` (15 seconds), for the lineartime that is imported.

It runs on any commit: `PYTHONPATH=CHECKOUT/src python benchmarks/structure.py --json FILE`. `--compare OLD NEW` makes a table
of two such files, which must come from the same Python: from 3.12 on, it enters no frames for comprehensions.

A call is a Python frame entered in a file of the package, that of a comprehension included, by the second FLASH.forward on
[2, 100, 64] in four chunks, in fp32 on a CPU, with gradients. It is counted with functions in C++ and without. A function is a
piece of code that is entered at least once.

A type is a class, an alias or a type variable that a module of ops/ or layers/ defines at its top level. The forward pass needs
those that a function which it enters names or is a method of, and those that a needed one has as bases, as fields' types or, if
it is an alias, as parts. An alias is a constant in CamelCase whose value has brackets or `|`, such as Literal[...] or A | B.

Functions of the core are all that its Python defines, methods and nested ones included. The body of one is its lines of code,
those of nested functions included, without docstring, blank lines and comments. Lines outside code are docstrings, blank lines,
comments and imports, of Python and C++.
"""

import argparse
import ast
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import lineartime
from lineartime.layers import FLASH

PACKAGE = Path(lineartime.__file__).parent
CHECKOUT = PACKAGE.parents[1]
CORE = ("ops", "layers", "models", "generation", "hf/cache", "hf/model", "native", "machine", "export", "text_generation")
"""Folders and modules; those that a commit does not have count nothing."""
CODE = (".py", ".cpp", ".h")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Code(NamedTuple):
    """A function, or a comprehension, by its place."""

    file: str
    line: int
    name: str


class Name(NamedTuple):
    """A name at the top level of a module."""

    module: str
    name: str


def entered() -> Counter[Code]:
    """How often a FLASH.forward enters each piece of the package's code."""
    torch.manual_seed(0)
    layer, x = FLASH(64, chunk_size=32), torch.randn(2, 100, 64)
    layer(x)  # the first call builds functions and fills caches
    calls: Counter[Code] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            calls[Code(code.co_filename, code.co_firstlineno, code.co_name)] += 1

    sys.setprofile(count)
    layer(x)
    sys.setprofile(None)
    return calls


def entered_by_process(native: bool) -> Counter[Code]:
    """The same in a new process: whether functions in C++ are used is decided once in each."""
    os.environ["LINEARTIME_NATIVE"] = "1" if native else "0"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(entered).result()


class Source:
    """The modules of the package, as syntax trees, and the types that they define."""

    def __init__(self) -> None:
        self.modules = {_module(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
        self.types: dict[Name, ast.stmt] = {}
        self._imports: dict[Name, Name] = {}
        for module, tree in self.modules.items():
            self.types |= {Name(module, name): node for node in tree.body if (name := _defined_type(node))}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    self._imports |= {
                        Name(module, each.asname or each.name): Name(node.module, each.name) for each in node.names
                    }

    def needed(self, calls: Counter[Code]) -> set[Name]:
        """The types that a reader of these functions needs."""
        starts = {(_module(Path(code.file)), code.line) for code in calls}
        todo: set[Name] = set()
        for module, tree in self.modules.items():
            for node in ast.walk(tree):
                inside = node.body if isinstance(node, ast.ClassDef) else [node]
                functions = [each for each in inside if isinstance(each, ast.FunctionDef) and (module, _start(each)) in starts]
                todo |= self._named(module, *functions)
                if functions and isinstance(node, ast.ClassDef):
                    todo.add(Name(module, node.name))
        found: set[Name] = set()
        while todo := (todo & self.types.keys()) - found:
            found |= todo
            todo = set().union(*(self._named(each.module, *_parts(self.types[each])) for each in todo))
        return {each for each in found if _room(each.module) in ("ops", "layers")}

    def _named(self, module: str, *nodes: ast.AST) -> set[Name]:
        """What the names in these nodes mean in their modules, also those within quotes."""
        texts = [node for each in nodes for node in ast.walk(each)]
        names = [node.id for node in texts if isinstance(node, ast.Name)]
        names += [node.value for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return {self._origin(Name(module, name)) for name in names}

    def _origin(self, name: Name) -> Name:
        """Where a name is defined that a module imports, perhaps through others."""
        while name not in self.types and self._imports.get(name, name) != name:  # a package imports modules from itself
            name = self._imports[name]
        return name


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _room(module: str) -> str:
    return (*module.split("."), "")[1]


def _start(function: ast.FunctionDef) -> int:
    """The line at which Python says that the function starts: that of its first decorator."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _defined_type(node: ast.stmt) -> str | None:
    """The name of the type that a statement defines."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    name, value = node.targets[0].id, node.value
    alias = isinstance(value, ast.Subscript) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr))
    variable = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "NewType")
    camel = name.lstrip("_")[:1].isupper() and not name.isupper()
    return name if camel and (alias or variable) else None


def _parts(definition: ast.stmt) -> list[ast.AST]:
    """What a type consists of: its bases and the types of its fields, or the value of an alias."""
    if isinstance(definition, ast.ClassDef):
        fields = [node.annotation for node in definition.body if isinstance(node, ast.AnnAssign)]
        return [*definition.bases, *definition.keywords, *fields]
    return [definition]


class Core:
    """What the files of the core consist of.

    Attributes:
        lines: all lines.
        outside: docstrings, blank lines, comments and imports.
        bodies: the lines of code in the body of each function.
    """

    def __init__(self) -> None:
        self.lines = self.outside = 0
        self.bodies: list[int] = []
        for path in (each for part in CORE for each in _files(part)):
            text = path.read_text()
            self.lines += len(text.splitlines())
            if path.suffix == ".py":
                self._python(text)
            else:
                stripped = [line.strip() for line in text.splitlines()]
                self.outside += sum(not line or line.startswith(("//", "#include")) for line in stripped)

    def _python(self, text: str) -> None:
        nodes, code = list(ast.walk(ast.parse(text))), set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in NO_CODE:
                code |= set(range(token.start[0], token.end[0] + 1))
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                code -= _lines_of(node.body[0])
        self.bodies += [
            len(code & set().union(*map(_lines_of, node.body))) for node in nodes if isinstance(node, ast.FunctionDef)
        ]
        imports = set().union(*(_lines_of(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)))
        self.outside += len(text.splitlines()) - len(code - imports)


def _lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _files(part: str) -> Iterator[Path]:
    """The files with code of a folder, or of the module of this name."""
    yield from (path for path in (PACKAGE / part).rglob("*") if path.suffix in CODE)
    if (module := PACKAGE / f"{part}.py").exists():
        yield module


def lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def lines_of_rooms() -> dict[str, int]:
    """The lines of each folder of the package, and of the modules beside them."""
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (*CODE, ".json")]
    found = Counter[str]()
    for path in files:
        room = path.relative_to(PACKAGE).parts
        found[f"lines of {room[0]}/" if len(room) > 1 else "lines of modules outside folders"] += lines(path)
    return {"lines of the package, JSON included": found.total(), **dict(sorted(found.items()))}


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", CHECKOUT, *arguments], capture_output=True, text=True, check=True).stdout


def figures() -> dict[str, int]:
    source, found = Source(), {}
    for native, where in ((True, ""), (False, ", without C++")):
        calls = entered_by_process(native)
        found[f"files entered by FLASH.forward{where}"] = len({code.file for code in calls})
        found[f"functions{where}"] = len(calls)
        found[f"calls{where}"] = calls.total()
        if native:
            types = source.needed(calls)
    found["own classes of FLASH"] = sum(each.__module__.split(".")[0] == "lineartime" for each in FLASH.__mro__)
    found["types that the forward pass needs"] = len(types)
    found["types of ops, layers and generation"] = sum(
        _room(each.module) in ("ops", "layers", "generation") for each in source.types
    )
    core = Core()
    found["functions of the core"] = len(core.bodies)
    found["median body of these, lines"] = round(statistics.median(core.bodies))
    found["lines of the core"] = core.lines
    found["lines of the core outside code"] = core.outside
    found |= lines_of_rooms()
    found["lines of tests"] = lines(*(CHECKOUT / "tests").rglob("*.py"))
    found["lines of docs/*.md"] = lines(*(CHECKOUT / "docs").glob("*.md"))
    found["tracked files"] = len(git("ls-files").splitlines())
    return found


def table(*columns: dict[str, int]) -> str:
    rows = [["", "before", "after", "after / before"], ["---"] + ["---:"] * 3]
    if len(columns) == 1:
        rows = [["", "count"], ["---", "---:"]]
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, 0) for column in columns]  # a room may be new, or gone
        ratios = [f"{each / values[0]:.2f}" if values[0] else "-" for each in values[1:]]
        rows.append([name, *(f"{each:,}" for each in values), *ratios])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the counts to this file too")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="only print a table of two such files")
    options = parser.parse_args()
    if options.compare:
        print(table(*(json.loads(path.read_text())["figures"] for path in options.compare)))
        return
    found = figures()
    print(table(found))
    if options.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        commit = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
        options.json.write_text(json.dumps({"commit": commit, **versions, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
