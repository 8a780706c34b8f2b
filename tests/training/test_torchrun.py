"""What users type: torchrun itself, and the command line in each of its processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lineartime.checkpoint import last_checkpoint

OPTIONS = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context", "24", "--batch-size", "2"]
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


def steps_of(run: Path) -> list[int]:
    """The steps on record."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("\n")]


@pytest.mark.nightly
@pytest.mark.slow
def test_torchrun_starts_all_again_after_a_loss_and_can_be_asked_to_stop(text: Path, tmp_path: Path) -> None:
    run, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
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
