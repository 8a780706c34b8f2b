"""What users type: torchrun itself, and the command line in each of its processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lineartime.checkpoint import last_checkpoint

pytestmark = pytest.mark.slow

OPTIONS = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context", "24", "--batch-size", "2"]
OPTIONS += ["--steps", "6", "--eval-every", "2", "--eval-windows", "2", "--precision", "fp32"]


def torchrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)


def test_torchrun_itself_can_be_asked_to_stop(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    where = ["--data", str(text), "--cache", str(tmp_path / "cache"), "--out", str(run)]
    endless = ["--steps", "100000", "--eval-every", "50000"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lineartime"]
    with subprocess.Popen([*command, "train", *OPTIONS, *where, *endless], stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not (run / "metrics.jsonl").exists() or '"loss"' not in (run / "metrics.jsonl").read_text():
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
    assert "resume by: torchrun --nproc-per-node 2 -m lineartime train --resume --out" in shown
    assert last_checkpoint(run).name > "step-00000000"


def test_after_a_process_was_lost_torchrun_starts_all_again_and_they_go_on(text: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, signal, sys
from lineartime.cli import main
from lineartime.training.loop import Trainer

take = Trainer.take_step
def take_or_die(self, report, stop):
    if self.step == 4 and self.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, report, stop)
Trainer.take_step = take_or_die
sys.exit(main(sys.argv[1:]))
"""
    )
    where = ["--data", str(text), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    done = torchrun("--max-restarts", "1", str(script), "train", *OPTIONS, *where)
    assert done.returncode == 0, done.stderr
    assert last_checkpoint(tmp_path / "run").name == "step-00000006"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line.split(",")[0] for line in lines if '"loss"' in line]
    assert steps == [f'{{"step": {step}' for step in range(1, 7)]
    # Both processes say what there is to say once: a sentence for each start, one for the end, and one for a mistake.
    assert done.stdout.count("best checkpoint:") == 1
    assert done.stderr.count("x 2 processes (ddp)") == 2
    assert (tmp_path / "run" / "loss.png").is_file()
    again = torchrun("-m", "lineartime", "train", *OPTIONS, *where)
    assert again.returncode != 0
    assert again.stderr.count("already holds a run: resume it") == 1
