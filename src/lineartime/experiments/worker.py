"""One run in a process of its own: `python -m lineartime.experiments.worker`, with a job as a line of JSON on standard input.

It ends as its parent does: when standard input is closed, it stops after the current step, which is saved.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lineartime.errors import DivergedError, LineartimeError, typed_first_line
from lineartime.experiments.definitions import FinalTest
from lineartime.experiments.outcome import OUTCOME_FILE, Measurement, StepTime
from lineartime.files import write_atomically
from lineartime.screen import SCREEN

INTERRUPTED = 130


def main() -> int:
    """Read a job, do it, and return the exit status: 0, also for a run that failed; 1 to be tried again; 130 if interrupted."""
    with suppress(OSError, AttributeError):
        os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        return INTERRUPTED if perform(job) is None else 0
    except LineartimeError as error:
        print(error, file=SCREEN)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _end_with_parent(parent: int) -> None:
    while os.read(parent, 1024):  # not by sys.stdin, whose lock this thread would still hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGINT)


def perform(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Do a job, and write and return its outcome; None if it was interrupted.

    That training diverges is an outcome: the same steps would diverge again. After any other error, such as a full disk, the
    next call tries again.

    Raises:
        LineartimeError: for any other error of training.
        Exception: for any error of testing the trained model.
    """
    folder = Path(job["folder"])
    outcome: dict[str, Any] | None = None
    try:
        if job["kind"] == "latency":
            outcome = _latency(folder, job)
        elif not _train(folder, job):
            return None
    except DivergedError as error:
        outcome = {"error": str(error)}
        print(error, file=SCREEN)
    except Exception as error:  # whatever it is, the other runs continue, and the report tells it
        raise LineartimeError(typed_first_line(error)) from error
    if outcome is None:
        outcome = _tested(folder, job)
    write_atomically(folder / OUTCOME_FILE, json.dumps({"kind": job["kind"], **outcome}, indent=1) + "\n")
    return outcome


def _train(folder: Path, job: Mapping[str, Any]) -> bool:
    """Train, or resume; return whether the run has finished."""
    from lineartime.checkpoint import list_checkpoints
    from lineartime.training.config import TrainConfig
    from lineartime.training.loop import train

    if list_checkpoints(folder):
        result = train(out=folder, resume=True)
    else:
        result = train(TrainConfig.from_dict({**job["options"], "out": str(folder)}))
    return result.finished


def _tested(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Test the model of a finished run, and delete the checkpoints that are no longer needed."""
    from lineartime.checkpoint import list_checkpoints

    tests = [FinalTest(**test) for test in job["tests"]]
    outcome = {"tests": [asdict(test) for test in _measured(folder, tests, job["test_tokens"])]} if tests else {}
    for checkpoint in list_checkpoints(folder)[: -1 if job["kind"] == "run" else None]:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return outcome


def _measured(run: Path, tests: list[FinalTest], most_tokens: int | None) -> list[Measurement]:
    """Measure the last model of a run on the beginning of its test split."""
    from lineartime.checkpoint import last_checkpoint, load, load_tokenizer, read_training_state
    from lineartime.data import load_corpus, token_stream
    from lineartime.evaluation import evaluate_windowed
    from lineartime.experiments.chunks import with_chunk_size
    from lineartime.host import cache_folder
    from lineartime.machine import choose_device, using_threads
    from lineartime.training.config import TrainConfig

    checkpoint = last_checkpoint(run)
    config = TrainConfig.from_dict(read_training_state(checkpoint).config)
    tokenizer = load_tokenizer(checkpoint)
    model = load(checkpoint, choose_device(config.device))
    corpus = load_corpus(config.data, config.text_column, config.max_expansion, config.include, config.exclude)
    measured = []
    with using_threads(config.threads):
        for test in tests:
            changed = model if test.chunk_size is None else with_chunk_size(model, test.chunk_size)
            if changed is None:
                continue
            length = config.context_length * test.times_context
            tokens = None if most_tokens is None else max(most_tokens, length)
            stream = token_stream(corpus, "test", tokenizer, config.cache or cache_folder(), tokens)
            batch = max(1, config.batch_size * config.context_length // length)
            result = evaluate_windowed(
                changed,
                stream,
                tokenizer,
                context_length=length,
                stride=length,
                batch_size=batch,
                bf16=config.precision == "bf16",
                max_tokens=tokens,
            )
            measured.append(
                Measurement(
                    name=test.name,
                    context_length=length,
                    loss=result.loss,
                    bits_per_byte=result.bits_per_byte,
                    word_perplexity=result.word_perplexity,
                    tokens=result.tokens,
                    text=result.text,
                    by_position=tuple((each.first, each.last, each.loss) for each in result.by_position),
                )
            )
    return measured


def _latency(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all systems at a context, in turn. An interrupted measurement leaves no results."""
    from lineartime.bench.command import run_benchmark
    from lineartime.bench.config import RESULTS_FILE, BenchConfig

    out = folder / "bench"
    shutil.rmtree(out, ignore_errors=True)
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in job["options"].items()
    }
    run_benchmark(BenchConfig(**options, out=out))
    results = json.loads((out / RESULTS_FILE).read_text(encoding="utf-8"))
    names = [field.name for field in fields(StepTime)]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "time": now,
        "machine": results["machine"],
        "entries": [{name: entry[name] for name in names} for entry in results["entries"]],
    }


if __name__ == "__main__":
    sys.exit(main())
