import gc
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from lineartime.data import JsonTokenizer
    from lineartime.training.config import TrainConfig

# What the user has set does not decide what is tested, here and in the processes that tests start; LINEARTIME_NATIVE=0 does.
for name in [name for name in os.environ if name.startswith("LINEARTIME_") and name != "LINEARTIME_NATIVE"]:
    del os.environ[name]
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it only then

if "PYTEST_XDIST_WORKER" in os.environ:  # at least as many processes as cores: one thread for each, and for those it starts
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell: tests of interrupts need them
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("deterministic", derandomize=True)
settings.load_profile("deterministic")


def pytest_xdist_auto_num_workers() -> int:
    """Half as many processes more than cores: tests that wait for other processes leave a core idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first: at the end, one of them would keep one process busy and leave the others idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None and item.get_closest_marker("nightly") is None)


def pytest_collection_finish() -> None:
    """Keep modules and tests out of later garbage collections, which took a large part of the time of the suite."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let everything be collected at the end: Triton reports what is not."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the user's cache as it is, but for functions in C++ and the list of fonts, which take long to make."""
    theirs, own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), tmp_path_factory.mktemp("cache")
    (own / "lineartime").mkdir()
    for shared in ("lineartime/native", "matplotlib"):
        with suppress(OSError):  # no rights, or no symbolic links: each process of pytest makes its own
            (theirs / shared).mkdir(mode=0o700, parents=True, exist_ok=True)
            (own / shared).symlink_to(theirs / shared, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class ChildProcess:
    """A process that runs Python code, and the file of what it writes."""

    def __init__(self, process: BaseProcess, output: Path) -> None:
        self._process, self._output = process, output
        output.touch()
        process.start()

    def wait(self, seconds: float = 300) -> int | None:
        """Wait until it ends, and return its exit status, or None if it still runs after that time."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def is_running(self) -> bool:
        return self._process.exitcode is None

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def output(self) -> str:
        return self._output.read_text()


# What runs and their tests import sooner or later. The compiler, which optimizers import, alone takes seconds.
PRELOADED = ["lineartime.training.loop", "lineartime.cli", "torch._dynamo", "matplotlib.backends.backend_agg"]
PRELOADED += ["tensorboardX", "tyro", "datasets", "pytest"]
# The server of processes keeps the environment, the folder and the output with which it was started.
PREPARE_CHILD = """
import os, sys
os.environ.clear()
os.environ.update({environment!r})
os.chdir({folder!r})
output = open({output!r}, "w", buffering=1)
os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
sys.stdout = sys.stderr = output
"""


@pytest.fixture
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ChildProcess]]:
    """`fork(code)`: start a process that runs the code. It starts fast, because what runs need has been imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    started: list[ChildProcess] = []

    def start(code: str) -> ChildProcess:
        output = tmp_path_factory.mktemp("process") / "output.txt"
        prepare = PREPARE_CHILD.format(environment=dict(os.environ), folder=str(Path.cwd()), output=str(output))
        process = context.Process(target=exec, args=(prepare + code, {"__name__": "__main__"}))
        started.append(ChildProcess(process, output))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the loss curve at the end of each run, which takes a third of a short one, where no test looks at it."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr("lineartime.runs.metrics.draw_curve", lambda run: run / "loss.png")


TINY_RUN: dict[str, Any] = {
    "override": ("d_model=16", "n_blocks=2", "d_qk=8", "chunk_size=8"),
    "context_length": 24,
    "batch_size": 2,
    "steps": 6,
    "eval_every": 2,
    "eval_windows": 4,
    "precision": "fp32",
}


def tiny_run(folder: Path) -> dict[str, Any]:
    """The options of a run of a second below a folder, whose text is written there; it has something to learn in it."""
    text = folder / "text.txt"
    text.write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(400)))
    return {**TINY_RUN, "data": str(text), "cache": folder / "cache", "out": folder / "run"}


SMALL = {"d_qk": 8, "chunk_size": 8, "n_heads": 2}


@pytest.fixture
def tiny() -> "Callable[..., Any]":
    """`tiny("flash", "mlm", noise=0.3, vocab_size=40)`: a model of a system, 16 wide, with two blocks, in training mode.

    With `noise`, its weights are far from their small initial values, so that all of them matter.
    """
    from tests.definitions import noisy

    import lineartime
    from lineartime.models.systems import resolve

    def build(system: str = "flash", task: Any = "clm", noise: float = 0.0, **overrides: Any) -> Any:
        options = resolve(f"{system}-tiny", task).mixer.options
        small = {name: value for name, value in SMALL.items() if name in options}
        model = lineartime.build(f"{system}-tiny", task, **{"d_model": 16, "n_blocks": 2, **small, **overrides})
        return noisy(model, noise)

    return build


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text with something to learn in it."""
    return Path(tiny_run(tmp_path)["data"])


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> "JsonTokenizer":
    """A byte-level BPE tokenizer whose tokens are words of a few sentences."""
    from lineartime.data import load_corpus, train_tokenizer

    file = tmp_path_factory.mktemp("bpe") / "train.txt"
    file.write_text("the café of 日本 is naïve, the café of 日本 is open\nwith two lines and 🚀\n" * 50)
    return train_tokenizer(load_corpus(file), 300)


@pytest.fixture
def config(tmp_path: Path) -> "Callable[..., TrainConfig]":
    """Options of a run of a second: `config(steps=3)`."""
    from lineartime.training.config import TrainConfig

    usual = tiny_run(tmp_path)
    return lambda **options: TrainConfig(**{**usual, **options})


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the options of `config`, to be read only."""
    from lineartime.training.loop import train

    return train(**tiny_run(tmp_path_factory.mktemp("whole"))).run


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))


@pytest.fixture
def only_systems_of_the_library_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the systems that a test registers, and the files that it imports."""
    from lineartime.models import systems
    from lineartime.models.config import KINDS
    from lineartime.models.systems import PRESETS, SYSTEMS

    tables: list[dict[str, Any]] = [SYSTEMS, PRESETS, KINDS["mixer"]]
    before = [set(table) for table in tables]
    monkeypatch.setenv(systems.VARIABLE, "")  # which restores it, too
    yield
    for table, names in zip(tables, before, strict=True):
        for name in set(table) - names:
            del table[name]
    for name in [name for name in sys.modules if name.startswith("lineartime_imported_")]:
        del sys.modules[name]
