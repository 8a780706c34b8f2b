"""One run in a process of its own: `python -m lineartime.experiments.worker`, with a job as a line of JSON on standard input.

It ends as its parent does: when standard input is closed, it stops after the current step, which is saved.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from lineartime.bench.command import run_benchmark
from lineartime.bench.config import BenchConfig
from lineartime.checkpoint import last_checkpoint, list_checkpoints, load_with_tokenizer, read_training_state
from lineartime.data import load_corpus, token_stream
from lineartime.errors import DivergedError, typed_first_line
from lineartime.evaluation import evaluate_windowed
from lineartime.experiments.definitions import INTERRUPTED, Job
from lineartime.experiments.memory import learn
from lineartime.experiments.models import with_chunk_size
from lineartime.experiments.results import OUTCOME_FILE, PROGRESS_FILE, FinalResult, Outcome
from lineartime.files import decoded, write_file
from lineartime.host import cache_folder
from lineartime.machine import choose_device, using_threads
from lineartime.screen import SCREEN
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train


def main() -> int:
    """Read a job, do it, and return the exit status: 0, also for a run that failed; 1 to be tried again; 130 if interrupted."""
    with suppress(OSError, AttributeError):
        os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once
    job = decoded(Job, json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        return INTERRUPTED if perform(job) is None else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # whatever it is, the other runs continue, and the report tells it
        print(typed_first_line(error), file=SCREEN)
        return 1


def _end_with_parent(parent: int) -> None:
    while os.read(parent, 1024):  # not by sys.stdin, whose lock this thread would still hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGINT)


def perform(job: Job) -> Outcome | None:
    """Do a job, and write and return its outcome; None if it was interrupted.

    That training diverges is an outcome: the same steps would diverge again. After any other error, such as a full disk, which
    is raised, the next call tries again.
    """
    try:
        if job.kind == "latency":
            outcome = _latency(job)
        elif job.kind == "memory":
            found = learn(job)
            if found is None:
                return None
            outcome = found
        elif _train(job):
            outcome = Outcome(job.kind, tests=tuple(_measured(job)))
            for checkpoint in list_checkpoints(job.folder)[: -1 if job.kind == "run" else None]:  # no longer needed
                shutil.rmtree(checkpoint, ignore_errors=True)
        else:
            return None
    except DivergedError as error:
        outcome = Outcome(job.kind, str(error))
        print(error, file=SCREEN)
    content = {name: value for name, value in asdict(outcome).items() if value}
    write_file(job.folder / OUTCOME_FILE, json.dumps(content, indent=1) + "\n")
    (job.folder / PROGRESS_FILE).unlink(missing_ok=True)  # no longer needed
    return outcome


def _train(job: Job) -> bool:
    """Train, or resume; return whether the run has finished."""
    if list_checkpoints(job.folder):
        return train(out=job.folder, resume=True).finished
    return train(TrainConfig.from_dict({**job.options, "out": str(job.folder)})).finished


def _measured(job: Job) -> Iterator[FinalResult]:
    """Measure the last model of a run on the beginning of its test split."""
    if not job.tests:
        return
    checkpoint = last_checkpoint(job.folder)
    config = TrainConfig.from_dict(read_training_state(checkpoint).config)
    _, model, tokenizer = load_with_tokenizer(checkpoint, choose_device(config.device))
    corpus = load_corpus(config.data, config.text_column, config.max_expansion, config.include, config.exclude)
    with using_threads(config.threads):
        for test in job.tests:
            changed = model if test.chunk_size is None else with_chunk_size(model, test.chunk_size)
            if changed is None:
                continue
            length = config.context_length * test.times_context
            tokens = None if job.test_tokens is None else max(job.test_tokens, length)
            result = evaluate_windowed(
                changed,
                token_stream(corpus, "test", tokenizer, config.cache or cache_folder(), tokens),
                tokenizer,
                context_length=length,
                stride=length,
                batch_size=max(1, config.batch_size * config.context_length // length),
                bf16=config.precision == "bf16",
                max_tokens=tokens,
            )
            yield FinalResult(
                name=test.name,
                context_length=length,
                loss=result.loss,
                bits_per_byte=result.bits_per_byte,
                word_perplexity=result.word_perplexity,
                tokens=result.tokens,
                text=result.text,
                by_position=tuple((each.first, each.last, each.loss) for each in result.by_position),
            )


def _latency(job: Job) -> Outcome:
    """Measure all systems at a context, in turn. An interrupted measurement leaves no results."""
    out = job.folder / "bench"
    shutil.rmtree(out, ignore_errors=True)
    results = run_benchmark(BenchConfig(**job.options, out=out))
    return Outcome(job.kind, time=results.started, machine=results.machine, entries=tuple(results.finished))


if __name__ == "__main__":
    sys.exit(main())
