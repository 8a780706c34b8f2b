"""Kill or stop processes, or take away their disk, at random moments: `python benchmarks/kills.py --seconds 100`.

Each kind of work is done once undisturbed. Then it is disturbed at a random moment of its duration and restarted as a user
would do, until it has finished; sometimes it is disturbed again. A stopped process continues after 0.3 s, and may be stopped
again. The results must equal those of the undisturbed work, to the byte, and after every disturbance the last checkpoint must
be intact. With --add, the counts are added to those of earlier calls. On Linux, full and read-only disks are mounts in a
private namespace; where that is not possible, they are left out.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from measure import RESULTS, save

from lineartime import checkpoint as checkpoints
from lineartime.cli import main as command
from lineartime.runs.metrics import read_metrics
from lineartime.units import markdown_table

TINY = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context-length", "24", "--batch-size", "2"]
TINY += ["--precision", "fp32", "--threads", "1", "--eval-windows", "2"]
KINDS = ("SIGKILL", "SIGSTOP", "full disk", "read-only disk")
MAX_REPEATS = 6
"""The maximum number of disturbances of the same work; after these, it can finish."""
LONGEST = 120
"""The maximum seconds that a process may take after its last disturbance, on a busy machine."""
_INSIDE = "LINEARTIME_KILLS_INSIDE"


@dataclass(frozen=True)
class Work:
    """Work in a folder: the arguments of a command, given whether it has begun before; and a digest of the results."""

    arguments: Callable[[Path, bool], list[str]]
    digest: Callable[[Path], str]


def digest_of(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def training(inputs: Path, steps: int, every: int, *extra: str) -> Work:
    def arguments(folder: Path, begun: bool) -> list[str]:
        out = ["train", "--out", str(folder / "run")]
        if checkpoints.list_checkpoints(folder / "run"):
            return [*out, "--resume"]
        where = ["--data", str(inputs / "text.txt"), "--cache", str(inputs / "cache")]
        return [*out, *where, *TINY, "--steps", str(steps), "--eval-every", str(every), *extra]

    def digest(folder: Path) -> str:
        last = checkpoints.last_checkpoint(folder / "run")
        losses = [(line["step"], line["loss"]) for line in read_metrics(folder / "run") if "loss" in line]
        return f"{last.name} {digest_of(last / 'model.safetensors')} {losses}"

    return Work(arguments, digest)


def works(inputs: Path) -> dict[str, Work]:
    text = str(inputs / "text.txt")

    def encoding(folder: Path, begun: bool) -> list[str]:
        if checkpoints.list_checkpoints(folder / "run"):
            return ["train", "--out", str(folder / "run"), "--resume"]
        where = ["--data", str(inputs / "long.txt"), "--cache", str(folder / "cache"), "--out", str(folder / "run")]
        return ["train", *where, *TINY, "--steps", "1"]

    # The digest leaves out *.partial folders of killed processes, which are removed only after an hour.
    return {
        "training": training(inputs, 40, 10),
        "saving": training(inputs, 12, 1),
        "fine-tuning": training(inputs, 20, 5, "--init-from", str(inputs / "base" / "run")),
        "encoding": Work(
            encoding,
            lambda folder: digest_of(*sorted((folder / "cache").glob("*[!l]/tokens-*.bin"))),
        ),
        "tokenizer training": Work(
            lambda folder, begun: ["tokenize", "--data", text, "--vocab-size", "400", "--out", str(folder / "tokenizer.json")],
            lambda folder: digest_of(folder / "tokenizer.json"),
        ),
        "export": Work(
            lambda folder, begun: ["convert", str(inputs / "base" / "run"), str(folder / "exported")],
            lambda folder: digest_of(*sorted((folder / "exported").iterdir())),
        ),
    }


def start(arguments: Sequence[str], log: Path) -> int:
    """Do the work in a fork of this process, which has imported everything; return its id."""
    process = os.fork()
    if process:
        return process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 70
    try:
        status = command(arguments)
    finally:
        os._exit(status)


def wait(process: int, seconds: float) -> int | None:
    """The exit status of a process, or None if it has not ended after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def mount(folder: Path, *options: str) -> None:
    subprocess.run(["mount", *options, str(folder)], check=True)


def disturb(kind: str, process: int, folder: Path) -> None:
    """Disturb a process that works in a folder."""
    if kind == "SIGKILL":
        os.kill(process, signal.SIGKILL)
    elif kind == "SIGSTOP":
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(process, signal.SIGCONT)
    elif kind == "full disk":
        with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(4096)):
                pass
    else:  # move a read-only view over the folder: a mount with files open for writing cannot be remounted
        (view := folder.with_name("view")).mkdir(exist_ok=True)
        mount(view, "--bind", str(folder))
        mount(view, "-o", "remount,bind,ro")
        mount(folder, "--move", str(view))


def repair(kind: str, folder: Path) -> None:
    if kind == "full disk":
        (folder / "filler").unlink(missing_ok=True)
    if kind == "read-only disk":
        subprocess.run(["umount", str(folder)], check=True)


def trial(work: Work, kind: str, duration: float, draw: random.Random, folder: Path, log: Path) -> tuple[int, str]:
    """Do work with disturbances until it has finished; return how many there were, and what went wrong."""
    count = 0
    for attempt in range(MAX_REPEATS + 5):
        if not attempt or (not (folder / "exported").exists() and not (folder / "tokenizer.json").exists()):
            process = start(work.arguments(folder, attempt > 0), log)
            status, disturbed = None, False
            while count < MAX_REPEATS and (kind == "SIGSTOP" or not disturbed):
                status = wait(process, draw.uniform(0, duration))
                if status is not None:
                    break
                disturb(kind, process, folder)
                count, disturbed = count + 1, True
            status = wait(process, LONGEST) if status is None else status
            if disturbed:
                repair(kind, folder)
            if status is None:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return count, f"did not end within {LONGEST} s"
            shown = log.read_text(errors="replace")
            if "Traceback" in shown:
                return count, f"a traceback: {shown.strip().splitlines()[-1]}"
            if status not in (0, 1, -signal.SIGKILL) or (status == 1 and not disturbed):
                return count, f"ended with {status}: {(shown.strip().splitlines() or ['nothing'])[-1]}"
            for last in checkpoints.list_checkpoints(folder / "run")[-1:]:
                checkpoints.load(last)
            if status != 0:
                continue
        return count, ""
    return count, "did not finish"


def in_namespace() -> bool:
    """Whether this process may mount; if not, it restarts itself in a namespace where it may, if possible."""
    if os.environ.get(_INSIDE):
        return True
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        return False
    return os.execvpe(inside[0], [*inside, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"})


def import_all() -> None:
    """Import what the commands need, so that forks of this process need not do it again."""
    for name in ("training.loop", "evaluation", "hf.convert", "cli.train", "cli.tokenize", "cli.convert", "data"):
        import_module(f"lineartime.{name}")
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg", "tensorboardX", "torch.distributed.checkpoint"):
        import_module(name)
    import_module("tokenizers")


def make_inputs(folder: Path) -> None:
    folder.mkdir()
    (folder / "text.txt").write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(2000)))
    (folder / "long.txt").write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(100_000)))
    base = training(folder, 5, 5)
    (folder / "base").mkdir()
    # In a separate process: a fork of a process that has used threads may wait for them forever.
    if wait(start(base.arguments(folder / "base", False), folder / "log.txt"), 60) != 0:
        sys.exit(f"the model to start from cannot be trained: {(folder / 'log.txt').read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="how long to disturb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="add to the counts of earlier calls")
    options = parser.parse_args()
    disks = in_namespace()
    draw, counts, before, wrong = random.Random(options.seed), Counter[tuple[str, str]](), Counter[str](), list[str]()
    if options.add and (RESULTS / "kills.json").exists():
        for row in json.loads((RESULTS / "kills.json").read_text())["rows"]:
            counts.update({(row["work"], kind): row[kind] for kind in KINDS})
            before[row["work"]] = row["trials"]
    import_all()
    with tempfile.TemporaryDirectory(prefix="lineartime-kills-") as temporary:
        root = Path(temporary)
        make_inputs(root / "inputs")
        all_works = works(root / "inputs")
        expected, durations = {}, {}
        for name, work in all_works.items():
            (folder := root / f"undisturbed {name}").mkdir()
            began = time.monotonic()
            status = wait(start(work.arguments(folder, False), root / "undisturbed.txt"), 60)
            if status != 0:
                sys.exit(f"{name} fails undisturbed: {(root / 'undisturbed.txt').read_text()}")
            durations[name], expected[name] = time.monotonic() - began, work.digest(folder)
            print(f"{name}: {durations[name]:.1f} s undisturbed", file=sys.stderr)
        done = Counter[str]()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            kind = draw.choices(KINDS, (8, 2, 2, 2))[0] if disks else draw.choices(KINDS[:2], (8, 2))[0]
            name = min(all_works, key=lambda each: (done[each], draw.random()))
            (folder := root / "disturbed").mkdir()
            mounted = kind == "full disk"
            if mounted:
                mount(folder, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
            log = root / "log.txt"
            log.write_text("")
            count, what = trial(all_works[name], kind, durations[name], draw, folder, log)
            if not what and all_works[name].digest(folder) != expected[name]:
                what = "another result"
            if what:
                wrong.append(f"{name}, {kind}: {what}")
            done[name] += 1
            counts[name, kind] += count
            if mounted:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
            shutil.rmtree(folder)
    done.update(before)
    rows = [{"work": name, "trials": done[name], **{kind: counts[name, kind] for kind in KINDS}} for name in all_works]
    table = markdown_table(["work", *KINDS], [[name, *(str(counts[name, kind]) for kind in KINDS)] for name in all_works])
    verdict = "\n".join(["Wrong:", *wrong]) if wrong else "Every result was that of the undisturbed work, to the byte."
    kills = sum(counts[name, "SIGKILL"] for name in all_works)
    summary = f"\n{sum(counts.values())} disturbances, {kills} of them kills, in {sum(done.values())} trials. {verdict}\n"
    save("kills", rows, table + summary)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
