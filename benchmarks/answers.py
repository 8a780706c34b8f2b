"""Pre-train small systems at equal time, fine-tune them to answer questions, and switch off the paper's changes one by one.

    python benchmarks/answers.py WORK --wikipedia ARTICLES.jsonl.xz --squad dev-v1.1.json

Every fifth article of the questions is held out. All runs go on where they were stopped; `--jobs` run at once, each
on one thread.
The steps of pre-training are those that a system does in `--minutes` by its median seconds per step, measured first.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from measure import save

import lineartime
from lineartime.finetuning.answer_metrics import score_answers
from lineartime.finetuning.questions import Question, find_questions
from lineartime.markdown import markdown_table
from lineartime.plots import new_figure, save_figure

CONTEXT, BATCH, VOCABULARY = 2048, 2, 4096
SMALL = {"d_model": 128, "vocab_size": VOCABULARY}
PRETRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer+": ("transformer+-tiny", {"n_blocks": 3}),
    "flash-quad-32": ("flash-quad-tiny", {"n_blocks": 6, "d_qk": 32}),
    "flash-quad-128": ("flash-quad-tiny", {"n_blocks": 6, "d_qk": 128}),
    "flash-32": ("flash-tiny", {"n_blocks": 6, "d_qk": 32, "chunk_size": 256}),
    "flash-128": ("flash-tiny", {"n_blocks": 6, "d_qk": 128, "chunk_size": 256}),
}
"""The preset and the overrides of each. The widths of queries and keys are to d_model = 128 about as 128 and 512 are to 768."""
RATES = ("3e-4", "1e-3", "3e-3")
ROWS: dict[str, tuple[str, list[str]]] = {
    "transformer+": ("transformer+", []),
    "flash-quad, s = 32": ("flash-quad-32", []),
    "flash-quad, s = 128": ("flash-quad-128", []),
    "flash, s = 128": ("flash-128", []),
    "flash, s = 128, first-to-all": ("flash-128", ["--mixer", "flash-first-to-all"]),
}
"""The systems of table 4, with three rates for the first seed, and the best of them for the second."""
FLASH = "flash, s = 128"
OFF: dict[str, tuple[str, list[str]]] = {
    "flash with s = 32": ("flash-32", []),
    "flash with chunks of 256": ("flash-128", ["--chunk-size", "256"]),
    "flash with relu^2 for [CLS]": ("flash-128", ["--mixer", "flash"]),
    "flash with clipping at 1": ("flash-128", ["--clip-norm", "1"]),
}
"""One change of the paper is switched off in each, with the best rate of flash and the first seed."""
SEEDS = (0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the runs")
    parser.add_argument("--wikipedia", type=Path, required=True, help="articles to pre-train with")
    parser.add_argument("--squad", type=Path, required=True, help="questions in the layout of SQuAD 1.1")
    parser.add_argument("--articles", type=int, default=48, help="of the questions, the first ones")
    parser.add_argument("--minutes", type=float, default=5, help="of pre-training, by the measured speed")
    parser.add_argument("--epochs", type=float, default=0.5, help="of fine-tuning")
    parser.add_argument("--jobs", type=int, default=2, help="models to fine-tune at once")
    parser.add_argument("--until", choices=["speed", "pretrain", "finetune"], default="finetune", help="the last part to run")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    questions = json.loads(options.squad.read_text(encoding="utf-8"))
    options.squad = options.work / "questions.json"
    options.squad.write_text(json.dumps({**questions, "data": questions["data"][: options.articles]}), encoding="utf-8")
    steps = {name: round(60 * options.minutes / each) for name, each in seconds_per_step(options.work / "speed.json").items()}
    if options.until == "speed":
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: pretrain(options, name, steps[name]), PRETRAINED))
        if options.until == "pretrain":
            return
        list(pool.map(lambda row: finetune(options, row, SEEDS[0], *ROWS[row], RATES), ROWS))
        best = {row: [best_rate(options.work, row)] for row in ROWS}
        again = [(row, SEEDS[1], *of, best[row]) for row, of in ROWS.items()]
        off = [(row, SEEDS[0], *of, best[FLASH]) for row, of in OFF.items()]
        list(pool.map(lambda job: finetune(options, *job), [*again, *off]))
    report(options, steps)


def seconds_per_step(file: Path) -> dict[str, float]:
    """The median time of a training step of each system, measured in turn."""
    if not file.exists():
        steps = {name: training_step(*each) for name, each in PRETRAINED.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(5):
            for name, step in steps.items():
                start = perf_counter()
                step()
                times[name].append(perf_counter() - start)
        file.write_text(json.dumps({name: statistics.median(each[1:]) for name, each in times.items()}))
    found: dict[str, float] = json.loads(file.read_text())
    print(f"seconds per step: {found}")
    return found


def training_step(preset: str, overrides: dict[str, Any]) -> Any:
    """A function that does a step of masked training on random tokens."""
    model = lineartime.build(preset, "mlm", **SMALL, **overrides)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

    return step


def run(arguments: list[str], log: Path, threads: int) -> None:
    """Run a command of lineartime, whose output goes to a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("a") as output:
        command = [sys.executable, "-m", "lineartime", *arguments]
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, env=environment)
    print(f"done: {log.stem}", flush=True)


def pretrain(options: argparse.Namespace, name: str, steps: int) -> None:
    """Train a masked language model, or go on with that."""
    out = options.work / "pretrained" / name
    preset, overrides = PRETRAINED[name]
    if out.exists() and validations(out)[-1]["step"] == steps:
        return
    override = [f"{key}={value}" for key, value in {"d_model": SMALL["d_model"], **overrides}.items()]
    arguments = ["--model", preset, "--override", *override, "--task", "mlm", "--data", str(options.wikipedia)]
    arguments += ["--tokenizer", f"bpe-{VOCABULARY}", "--context-length", str(CONTEXT), "--batch-size", str(BATCH)]
    arguments += ["--steps", str(steps), "--eval-every", str(max(1, steps // 5)), "--learning-rate", "3e-3", "--out", str(out)]
    again = ["--resume"] if out.exists() else []
    run(["train", *(["--resume", str(out)] if again else arguments)], options.work / f"pretrain-{name}.log", 1)


def validations(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics that have a validation loss."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "validation_loss" in line]


def folder_of(work: Path, row: str, seed: int) -> Path:
    """Where a fine-tuned model goes."""
    return work / "finetuned" / f"{re.sub('[^a-z0-9+]+', '-', row)}-{seed}"


def finetune(options: argparse.Namespace, row: str, seed: int, pretrained: str, more: list[str], rates: Sequence[str]) -> None:
    """Fine-tune with these rates, or go on with that."""
    out = folder_of(options.work, row, seed)
    arguments = ["finetune", str(options.work / "pretrained" / pretrained), "--data", str(options.squad), "--out", str(out)]
    arguments += ["--learning-rates", *rates, "--epochs", str(options.epochs), "--context-length", "512"]
    arguments += ["--dropout", "0", "--seed", str(seed), *more]
    again = ["--resume"] if (out / "finetune.json").exists() else []
    run([*arguments, *again], options.work / f"{out.name}.log", 1)


def result_of(work: Path, row: str, seed: int) -> dict[str, Any]:
    """What `finetune` wrote."""
    result: dict[str, Any] = json.loads((folder_of(work, row, seed) / "finetune.json").read_text())
    return result


def best_rate(work: Path, row: str) -> str:
    """The rate with the best F1 of the first seed."""
    result = result_of(work, row, SEEDS[0])
    return str(result["trials"][result["best"]]["learning_rate"])


def report(options: argparse.Namespace, steps: dict[str, int]) -> None:
    """Write the table, the raw results and the picture."""
    rows = []
    for row, (pretrained, _) in {**ROWS, **OFF}.items():
        results = [result_of(options.work, row, seed) for seed in (SEEDS if row in ROWS else SEEDS[:1])]
        best = [result["trials"][result["best"]] for result in results]
        loss = validations(options.work / "pretrained" / pretrained)[-1]["validation_loss"]
        rows.append({"row": row, "steps": steps[pretrained], "loss": loss, "results": results, "best": best})
    questions = find_questions(options.squad)
    rows += [
        {"row": name, "best": [{"metrics": each}]}
        for name, each in baselines(*map(list, (questions["train"], questions["validation"]))).items()
    ]
    cells = []
    for each in rows:
        f1, exact = ([one["metrics"][name] for one in each["best"]] for name in ("f1", "exact_match"))
        rates = "/".join(f"{one['learning_rate']:g}" for one in each["best"] if "learning_rate" in one)
        trained = [f"{each['steps']:,}", f"{each['loss']:.2f}"] if "steps" in each else ["", ""]
        cells.append([each["row"], *trained, spread(f1), spread(exact), rates])
    header = ["system", "steps of pre-training", "their loss", "F1", "exact match", "best rates"]
    save("answers", rows, markdown_table(header, cells))
    draw(rows)


def spread(values: list[float]) -> str:
    """The mean, and each value if there are several."""
    return f"{statistics.mean(values):.1f}" + (f" ({', '.join(f'{each:.1f}' for each in values)})" if len(values) > 1 else "")


def baselines(train: list[Question], validation: list[Question]) -> dict[str, dict[str, float]]:
    """What needs no learning: the best constant span in words, and the words nearest to those of the question."""
    right = {each.key: each.answers for each in validation}

    def constant(questions: list[Question], start: int, count: int) -> dict[str, str]:
        return {each.key: " ".join(each.text.split()[start : start + count]) for each in questions}

    def f1(place: tuple[int, int]) -> float:
        return score_answers(constant(train[::5], *place), {each.key: each.answers for each in train[::5]}, "squad").f1

    best = max(((start, count) for start in range(12) for count in range(1, 9)), key=f1)
    rest = {each.key: nearest(each) for each in validation}
    answers = {f"the words {best[0] + 1} to {sum(best)} of each text": constant(validation, *best), "lexical overlap": rest}
    return {name: vars(score_answers(each, right, "squad")) for name, each in answers.items()}


def nearest(question: Question, count: int = 3) -> str:
    """The `count` words, none of them in the question, with most of the question's words within ten words."""
    asked = Counter(re.findall(r"\w+", question.question.lower()))
    words = question.text.split()
    shared = [int(bool(asked[re.sub(r"\W", "", word.lower())])) for word in words]
    starts = range(max(1, len(words) - count + 1))
    start = max(
        starts, key=lambda place: sum(shared[max(0, place - 10) : place + count + 10]) - 10 * sum(shared[place : place + count])
    )
    return " ".join(words[start : start + count])


def draw(rows: list[dict[str, Any]]) -> None:
    """F1 of each row and seed."""
    figure = new_figure(7, 0.4 * len(rows) + 1)
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        values = [each["metrics"]["f1"] for each in row["best"]]
        axes.barh(place, statistics.mean(values), color="C0" if "steps" in row else "0.7")
        axes.plot(values, [place] * len(values), "k|")
    axes.set_yticks(range(len(rows)), [row["row"] for row in reversed(rows)])
    axes.set_xlabel("F1 on held-out articles; a line for each seed")
    save_figure(figure, Path(__file__).parent.parent / "docs" / "answers.png")


if __name__ == "__main__":
    main()
