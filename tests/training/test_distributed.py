"""Several processes on one machine, over gloo: whatever they share, the run is that of one process.

They are started as by torchrun, but within tenths of a second.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.checkpoint import last_checkpoint, list_checkpoints, read_validation_loss
from lineartime.errors import LineartimeError
from lineartime.runs.metrics import losses, read_metrics
from lineartime.runs.record import last_error, read_record
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.training.parallel import Environment, read_environment

pytestmark = pytest.mark.slow

# What each process does: it takes its place from the environment, like one that torchrun started.
PROCESS = """
import os, warnings
from pathlib import Path
os.environ.update({environment!r})
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
import lineartime.runs.metrics
lineartime.runs.metrics.draw_curve = lambda run: run  # as in the fixture `without_pictures`
config = TrainConfig.from_dict({config!r})
try:
    exec({before!r})
    train(config)
except LineartimeError as error:
    Path({error_file!r}).write_text(f"{{type(error).__name__}}: {{error}}")
    os._exit(1)
"""

Launch = Callable[..., "Processes"]
MakeConfig = Callable[..., TrainConfig]


class Processes:
    """The processes of one run."""

    def __init__(self, processes: list[Any], folder: Path) -> None:
        self.processes = processes
        self.folder = folder

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Their exit statuses; those that still run after that time are killed, and have None."""
        codes = [process.wait(seconds) for process in self.processes]
        for process in self.processes:
            process.kill()
        return codes

    def errors(self) -> list[str]:
        """The error of each of them: of lineartime, or what it wrote last; empty where there is none."""
        files = [self.folder / f"error-{rank}.txt" for rank in range(len(self.processes))]
        return [
            file.read_text() if file.exists() else process.output if "Traceback" in process.output else ""
            for file, process in zip(files, self.processes, strict=True)
        ]


@pytest.fixture
def launch(fork: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """`launch(config, 2)`: train in two processes; `before` is run in each of them first, `only` names those to start."""

    def start(config: TrainConfig, size: int, *, before: str = "", only: tuple[int, ...] | None = None) -> Processes:
        folder = tmp_path_factory.mktemp("processes")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        processes = []
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            values = json.loads(json.dumps(config.to_dict()))
            error_file = str(folder / f"error-{rank}.txt")
            code = PROCESS.format(environment=environment, config=values, before=before, error_file=error_file)
            if only is None or rank in only:
                processes.append(fork(code))
        return Processes(processes, folder)

    return start


def metrics(run: Path, name: str) -> dict[int, float]:
    return losses(read_metrics(run), name)


def assert_same_run(run: Path, expected: Path) -> None:
    for name in ("loss", "gradient_norm", "validation_loss"):
        found, wanted = metrics(run, name), metrics(expected, name)
        if name == "validation_loss":  # a run is also evaluated where it is interrupted
            found = {step: loss for step, loss in found.items() if step in wanted}
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5), name
    weights = (lineartime.load(last_checkpoint(each)).state_dict() for each in (run, expected))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("alone", "changed", "size"),
    [
        ({"packed": True, "optimizer": "muon"}, {}, 2),
        ({"optimizer": "muon", "tokens_per_batch": 12 * 32}, {"parallel": "fsdp", "recompute": True}, 3),
        ({"task": "mlm"}, {"context_parallel": 2, "batch_size": 2}, 4),
        ({"clip_tokens": 4 * 32, "clip_norm": 0.01}, {"clip_tokens": None, "clip": "local"}, 2),
        pytest.param({}, {"context_parallel": 4, "parallel": "fsdp"}, 4, marks=pytest.mark.nightly),
        pytest.param(
            {"clip_tokens": 4 * 32, "clip_norm": 0.01, "batch_size": 1},
            {"context_parallel": 2, "batch_size": 4},
            2,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["ddp", "fsdp", "context", "clip", "context-fsdp", "context-clip"],
)
def test_any_number_of_processes_gives_the_run_of_one(
    config: MakeConfig, launch: Launch, tmp_path: Path, alone: dict[str, Any], changed: dict[str, Any], size: int
) -> None:
    common = {"context_length": 32, "tokens_per_batch": 8 * 32, "batch_size": 4, "steps": 3, "eval_every": 3, **alone}
    for name, options, count in (("one", {}, 1), ("run", changed, size)):
        processes = launch(config(**{**common, **options}, out=tmp_path / name), count)
        assert processes.wait() == [0] * count, processes.errors()
    assert_same_run(tmp_path / "run", tmp_path / "one")
    if "clip_norm" in alone:  # and clipping the whole gradient is another thing
        train(config(**{**common, "clip_tokens": None}, out=tmp_path / "global"))
        assert metrics(tmp_path / "global", "loss") != pytest.approx(metrics(tmp_path / "one", "loss"), rel=1e-6)


def test_run_saved_by_four_processes_goes_on_with_two_and_with_one(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    common = {
        "optimizer": "muon",
        "tokens_per_batch": 4 * 24,
        "batch_size": 4,
        "override": (*config().override, "dropout=0.0"),
    }
    expected = train(config(**common, out=tmp_path / "one")).run
    for size, last in ((4, 2), (2, 4)):
        resume = config(**common, parallel="fsdp", resume=size != 4)
        assert launch(resume, size, before=stop_after(last)).wait() == [0] * size
        assert last_checkpoint(tmp_path / "run").name == f"step-0000000{last}"
        assert read_validation_loss(last_checkpoint(tmp_path / "run")) is not None  # all processes evaluated it together
    train(config(**common, resume=True))
    assert_same_run(tmp_path / "run", expected)


def stop_after(step: int) -> str:
    """What makes the last process alone receive a signal in that step: all have to agree."""
    return f"""
import signal
import lineartime.training.loop as loop
take = loop.Trainer.take_step
def take_and_stop(self, report, stop):
    if self.step + 1 == {step} and self.world.rank == self.world.size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return take(self, report, stop)
loop.Trainer.take_step = take_and_stop
"""


@pytest.mark.nightly
def test_context_longer_than_the_held_out_text_is_measured_in_shorter_windows(
    config: MakeConfig, launch: Launch, tmp_path: Path
) -> None:
    long = config(context_length=1024, context_parallel=2, batch_size=1, steps=1)  # 5% of the text are 690 tokens
    processes = launch(long, 2)
    assert processes.wait() == [0, 0], processes.errors()
    assert metrics(tmp_path / "run", "validation_loss")[1] > 0


@pytest.mark.parametrize("options", [{"optimizer": "muon", "parallel": "ddp"}, {"streaming": True}], ids=["muon", "stream"])
def test_two_processes_resume_to_the_bit(
    config: MakeConfig, launch: Launch, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    (file := tmp_path / "org" / "name" / "text.jsonl").parent.mkdir(parents=True)
    file.write_text("".join(json.dumps({"text": f"{i} times {i} is {i * i}. " * (1 + i % 3)}) + "\n" for i in range(600)))
    common = {"data": "hub:org/name" if "streaming" in options else str(file), "tokens_per_batch": 4 * 24, **options}
    assert launch(config(**common, out=tmp_path / "one"), 2).wait() == [0, 0]
    assert launch(config(**common), 2, before=stop_after(3)).wait() == [0, 0]
    assert launch(config(**common, resume=True), 2).wait() == [0, 0]
    weights, wanted = (lineartime.load(last_checkpoint(tmp_path / name)).state_dict() for name in ("run", "one"))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert metrics(tmp_path / "run", "loss") == metrics(tmp_path / "one", "loss")


@pytest.mark.nightly
def test_in_bf16_fsdp_trains_as_ddp_does(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    for name in ("ddp", "fsdp"):
        processes = launch(config(parallel=name, precision="bf16", steps=4, out=tmp_path / name), 2)
        assert processes.wait() == [0, 0], processes.errors()
    found, wanted = (metrics(tmp_path / name, "loss") for name in ("fsdp", "ddp"))
    assert found == pytest.approx(wanted, rel=1e-5), "the residual stream must stay in float32"


def test_two_processes_train_one_run_after_another(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    first = 'import dataclasses\ntrain(dataclasses.replace(config, out=Path(str(config.out) + "-first")))'
    processes = launch(config(steps=2), 2, before=first)
    assert processes.wait() == [0, 0], processes.errors()
    assert_same_run(tmp_path / "run", tmp_path / "run-first")


def test_process_that_never_starts_ends_the_others_in_time(config: MakeConfig, launch: Launch) -> None:
    for only, size in (((0, 2), 3), ((1,), 2)):  # with the process that serves the store, and without it
        processes = launch(config(timeout=2.0), size, only=only)
        assert processes.wait(30) == [1] * len(only)
        said = [file.read_text() for file in processes.folder.iterdir()]
        assert any(f"Process {only[0]} of {size} did not find the others within 2 s (timeout; " in each for each in said)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_process_that_is_lost_while_training_ends_the_others_in_time(
    config: MakeConfig, launch: Launch, tmp_path: Path, how: signal.Signals
) -> None:
    processes = launch(config(steps=100_000, eval_every=50_000, timeout=3.0), 2)
    wait_for_step(tmp_path / "run", 3)
    processes.processes[1].send(how)
    assert processes.processes[0].wait(60) == 1
    said = "A process of the run was lost, or exchanged nothing for 3 s (timeout)"
    assert said in processes.errors()[0]
    assert said in (last_error(read_record(tmp_path / "run")) or "")
    assert "resume the run from its last checkpoint" in processes.errors()[0]


LINES = [json.dumps({"text": f"{i} times {i} is {i * i}. "}) for i in range(600)]
REPLACED = """
import dataclasses
if os.environ["RANK"] == "2":
    config = dataclasses.replace(config, {})
"""
NO_MEMORY = """
import lineartime.training.setup as setup
def fail(config):
    raise LineartimeError("the first process has no memory left")
if os.environ["RANK"] == "0":
    setup.build_model = fail
"""


@pytest.mark.parametrize(
    ("options", "before", "speaker", "message"),
    [
        ({"data": "/does/not/exist"}, "", 0, "ArgumentError: data is /does/not/exist, which is neither a file or folder"),
        ({"preset": "flash-quad-tiny", "context_parallel": 3, "override": ("d_model=16",)}, "", 0, "but GAU reads"),
        ({"context_parallel": 3, "context_length": 25}, "", 0, "context_length is 25, but must be a multiple of 24, for 3"),
        ({"context_parallel": 2}, "", 0, "context_parallel is 2, which does not divide the number of processes, 3: use a"),
        ({}, REPLACED.format("learning_rate=0.03"), 0, "learning_rate is 0.03 in process 2, and 0.003 in process 0: start all"),
        ({}, REPLACED.format("decay_steps=5"), 2, "decay_steps is 5, but linear schedules have no decay: use `schedule=wsd`"),
        ({"data": "hub:org/name", "streaming": True}, "", 1, "Cannot read hub:org/name ("),
        ({"timeout": 60.0}, NO_MEMORY, 0, "the first process has no memory left"),
    ],
    ids=["data", "model", "length", "number", "options", "value", "text", "memory"],
)
def test_error_of_one_process_ends_all_and_that_process_says_why(
    config: MakeConfig,
    launch: Launch,
    tmp_path: Path,
    options: dict[str, Any],
    before: str,
    speaker: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    (tmp_path / "org" / "name").mkdir(parents=True)
    for part in ("train-0", "train-1", "train-2", "valid", "test"):
        cut = '{"te' if part == "train-1" else ""  # of the second process
        (tmp_path / "org" / "name" / f"{part}.jsonl").write_text("\n".join([*LINES, cut]))
    started = time.monotonic()
    processes = launch(config(**{"steps": 100, "eval_every": 100, **options}), 3, before=before)
    assert processes.wait(60) == [1, 1, 1]
    assert time.monotonic() - started < 40  # long before the timeout
    said = processes.errors()
    assert message in said[speaker]
    lost = ("A process of the run was lost", "The first process of machine 0 could not prepare")
    assert all(message in each or any(sentence in each for sentence in lost) for each in said)


def test_tokenizer_that_the_main_process_trained_is_that_of_all(config: MakeConfig, launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    # As if a machine of its own had trained another tokenizer.
    other = f"""
if os.environ["RANK"] == "1":
    import dataclasses
    import lineartime.data as data
    own = data.tokenizer_for
    def with_another_one(choice, corpus, cache):
        return own("bpe-300", corpus, Path({str(tmp_path / "cache-1")!r}))
    data.tokenizer_for = with_another_one
"""
    processes = launch(config(tokenizer="bpe-400"), 2, before=other)
    assert processes.wait(120) == [0, 0], processes.errors()


def steps_of(run: Path) -> list[int]:
    """The steps on record."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("\n")]


def wait_for_step(run: Path, step: int) -> None:
    """Wait until that step and a checkpoint are on record."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if max(steps_of(run), default=0) >= step and list_checkpoints(run):
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} did not come to step {step}")


def test_steps_that_cannot_be_divided_are_named(config: MakeConfig) -> None:
    for options, message in (
        ({"tokens_per_batch": 96}, "tokens_per_batch is 96, .* multiple of 72, which is 3 processes x `context_length`"),
        ({"clip_tokens": 36}, "clip_tokens is 36, .* multiple of `context_length=24` that divides the 48 tokens"),
    ):
        with pytest.raises(LineartimeError, match=message):
            replace(config(), **options).rows(0, 3)


def test_environment_of_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # of another program: one process alone is the first
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert read_environment() == Environment()
    values = {"WORLD_SIZE": 4, "RANK": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert read_environment() == Environment(4, 3, 1, 2, 1, 2, 0)
    for name, value in (("LOCAL_RANK", "one"), ("RANK", "4"), ("RANK", "")):  # all processes would be the first, and wait
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(LineartimeError, match=r"The environment is not that of several processes .*: start"):
                read_environment()


OPTIONS = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context-length", "24", "--batch-size", "2"]
OPTIONS += ["--steps", "100000", "--eval-every", "4", "--eval-windows", "2", "--precision", "fp32"]
SCRIPT = """
import os, signal, sys
from lineartime.cli import main
from lineartime.training.loop import Trainer

take = Trainer.take_step
def take_or_die(self, report, stop):
    if self.step == 5 and self.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, report, stop)
Trainer.take_step = take_or_die
sys.exit(main(sys.argv[1:]))
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.nightly
@pytest.mark.slow
def test_mistake_that_all_processes_find_is_said_once(tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "lineartime", "train", "--data", "nothing", "--out", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 1
    assert result.stderr.count("error: --data is nothing, which is neither a file or folder") == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_torchrun_starts_all_again_after_a_loss_and_can_be_asked_to_stop(text: Path, tmp_path: Path) -> None:
    run, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [*TORCHRUN, "--max-restarts", "1"]
    where = ["--data", str(text), "--cache", str(tmp_path / "cache"), "--out", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, str(script), "train", *OPTIONS, *where], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            deadline = time.monotonic() + 240
            while max(steps_of(run), default=0) < 7:  # beyond the step at which a process is lost
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            _, shown = process.communicate(timeout=120)
        finally:  # torchrun ends its processes when it is asked to stop, but not when it is killed
            process.terminate()
            end = threading.Timer(60, process.kill)
            end.start()
            process.wait()
            end.cancel()
    # Both processes say what there is to say once: a sentence for each start, and one for the end.
    assert shown.count("x 2 processes (ddp)") == 2
    assert shown.count("resume by: torchrun --nproc-per-node 2 -m lineartime train --resume --out") == 1
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert last_checkpoint(run).name == f"step-{len(steps):08d}"
