"""The experiment on memory: tasks whose texts are generated, and a run, which trains on texts drawn anew in every step.

A text is token ids, and at each token the answer that is asked there, -100 where none is. Shapes: B rows, T tokens, N tokens to
remember.
"""

import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.bench.measure import synchronized
from lineartime.choices import MemoryTask
from lineartime.data import Batch
from lineartime.errors import DivergedError
from lineartime.machine import autocast, choose_device, using_threads
from lineartime.models.cost import stream_bytes
from lineartime.models.language_model import CausalLM, build_model
from lineartime.models.systems import SIZES
from lineartime.ops.cross_entropy import IGNORED
from lineartime.runs.metrics import MetricsLog
from lineartime.runs.record import RunRecord
from lineartime.training.config import TrainConfig, learning_rate
from lineartime.training.loop import memory_of_steps
from lineartime.training.optimizers import build_optimizer, matrices_of

if TYPE_CHECKING:  # which makes a job of each task
    from lineartime.experiments.plan import Job

KEYS, SYMBOLS, FEW_SYMBOLS = 64, 64, 16
"""The keys, and as many values, of recall, unless there are too many pairs; the symbols of copying, and of the other tasks."""
POWER = 0.01
"""The parameter a of Zoology's power law."""


def distinct(rows: int, kinds: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different numbers below `kinds` for each row: [B, count]."""
    return torch.rand(rows, kinds, generator=generator).argsort(1)[:, :count]


def key_count(pairs: int) -> int:
    """The number of keys in the vocabulary of recall, which is that of values, too."""
    return max(KEYS, 4 * pairs)


def recall(rows: int, length: int, pairs: int, generator: torch.Generator, kinds: int | None = None) -> Batch:
    """Multi-query associative recall: keys and values in turn, then each key once more, where its value is asked.

    The i-th key returns at the place 2 g of the rest, which is filler otherwise. The places g = 0, 1, ... are drawn without
    replacement by their weights (g + 1)^(a - 1). Ids are keys, then values, then the filler. Source: Zoology, arXiv 2312.04927,
    with the filler of its published settings.
    """
    shown, kinds = 2 * pairs, kinds or key_count(pairs)
    keys, values = distinct(rows, kinds, pairs, generator), kinds + distinct(rows, kinds, pairs, generator)
    inputs = torch.full((rows, length), 2 * kinds)
    targets = torch.full_like(inputs, IGNORED)
    inputs[:, 0:shown:2], inputs[:, 1:shown:2] = keys, values
    weights = torch.arange(1, (length - shown) // 2 + 1).float() ** (POWER - 1)
    places = shown + 2 * torch.multinomial(weights.expand(rows, -1), pairs, generator=generator)
    return Batch(inputs.scatter(1, places, keys), targets.scatter(1, places, values))


def recall_training(rows: int, length: int, pairs: int, generator: torch.Generator) -> Batch:
    """Texts to learn `recall` from: of `pairs` over any power of two, and half of the time with a question at each token.

    What few pairs teach is needed for many, with which alone most systems learn nothing in thousands of steps. Source: the
    pairs are a curriculum as in Zoology's experiments; the questions are ours.
    """
    fewer = pairs >> int(torch.randint(pairs.bit_length(), (), generator=generator))
    batch, shown = recall(rows, length, fewer, generator, key_count(pairs)), 2 * fewer
    if torch.rand((), generator=generator) < 0.5:
        return batch
    asked = torch.randint(fewer, (rows, length - shown), generator=generator)
    keys, values = batch.inputs[:, 0:shown:2].gather(1, asked), batch.inputs[:, 1:shown:2].gather(1, asked)
    return Batch(torch.cat([batch.inputs[:, :shown], keys], 1), torch.cat([batch.targets[:, :shown], values], 1))


def copying(rows: int, length: int, _: int, generator: torch.Generator) -> Batch:
    """N = T / 2 random symbols, a separator, and the symbols once more: each is asked at the token before it."""
    symbols = torch.randint(SYMBOLS, (rows, length // 2), generator=generator)
    separator, nothing = torch.full((rows, 1), SYMBOLS), torch.full_like(symbols, IGNORED)
    return Batch(torch.cat([symbols, separator, symbols[:, :-1]], 1), torch.cat([nothing, symbols], 1))


def induction(rows: int, length: int, _: int, generator: torch.Generator) -> Batch:
    """Random symbols, among them one special token, which also is the last token: there its follower is asked.

    Source: induction heads, H3, arXiv 2212.14052.
    """
    inputs = torch.randint(FEW_SYMBOLS, (rows, length), generator=generator)
    targets = torch.full_like(inputs, IGNORED)
    place = torch.randint(length - 2, (rows, 1), generator=generator)
    targets[:, -1:] = inputs.gather(1, place + 1)
    inputs.scatter_(1, place, FEW_SYMBOLS)[:, -1] = FEW_SYMBOLS
    return Batch(inputs, targets)


def selective_copying(rows: int, length: int, pairs: int, generator: torch.Generator) -> Batch:
    """N symbols at random places among noise, then N marks, where the symbols are asked in their order.

    Source: Mamba, arXiv 2312.00752.
    """
    symbols = torch.randint(FEW_SYMBOLS, (rows, pairs), generator=generator)
    places = distinct(rows, length - pairs, pairs, generator).sort(1).values
    inputs = torch.full((rows, length), FEW_SYMBOLS)
    inputs[:, -pairs:] = FEW_SYMBOLS + 1
    targets = torch.full_like(inputs, IGNORED)
    targets[:, -pairs:] = symbols
    return Batch(inputs.scatter(1, places, symbols), targets)


Draw = Callable[[int, int, int, torch.Generator], Batch]
"""Makes texts: (rows, length, pairs, generator) -> batch."""


@dataclass(frozen=True)
class TaskTexts:
    """How the texts of a task are made."""

    draw: Draw
    vocab_size: Callable[[int], int]  # of its vocabulary, from the pairs
    shortest: Callable[[int], int] = lambda _: 4  # the fewest tokens of a text, from the pairs
    takes_pairs: bool = False  # whether it has a number of tokens to remember beside its length
    training: Draw | None = None  # where training differs


TASKS: dict[MemoryTask, TaskTexts] = {
    "recall": TaskTexts(recall, lambda pairs: 2 * key_count(pairs) + 1, lambda pairs: 4 * pairs, True, recall_training),
    "copying": TaskTexts(copying, lambda _: SYMBOLS + 1),
    "induction": TaskTexts(induction, lambda _: FEW_SYMBOLS + 1),
    "selective-copying": TaskTexts(selective_copying, lambda _: FEW_SYMBOLS + 2, lambda pairs: 2 * pairs, takes_pairs=True),
}
SEEDS = {"validation": 2**62, "test": 2**62 + 1}
"""The seeds of held-out texts, which are the same for all runs."""


def train_on_task(job: "Job") -> dict[str, Any]:
    """Train a model on texts that follow from the seed and the step, and measure it; an interrupted run has learnt nothing.

    Raises:
        DivergedError: if a loss is not finite.
    """
    assert job.setting.task is not None
    config, task, pairs = (
        TrainConfig.from_dict({**job.options, "out": str(job.folder)}),
        TASKS[job.setting.task],
        job.setting.pairs,
    )
    record, device = RunRecord(job.folder), choose_device(config.device)
    length, bf16, draw = config.context_length, config.precision == "bf16", task.training or task.draw
    with record.errors(), using_threads(config.threads), memory_of_steps(device), closing(MetricsLog(job.folder, 0)) as log:
        record.begin(config.to_dict(), sys.argv)
        model = new_model(config, task.vocab_size(pairs)).to(device)
        optimizer, score = build_optimizer(model, config), partial(held_out, model, task, pairs, config)
        for step in range(1, config.steps + 1):
            begin = synchronized(device)
            batch = draw(config.rows(0, 1).per_step, length, pairs, _generator(config.seed, step - 1))
            optimizer.set_learning_rate(learning_rate(step - 1, config))
            with autocast(device, bf16):
                loss = model.loss(batch.inputs.to(device), batch.targets.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            if not math.isfinite(value := float(loss.detach())):
                raise DivergedError(f"The loss became {value} at step {step}: a lower rate helps.")
            log.tokens += batch.inputs.numel()
            log.write(step, {"loss": value, "tokens_per_second": batch.inputs.numel() / (synchronized(device) - begin)})
            if step % config.eval_every == 0 or step == config.steps:
                found = score("validation", length, config.eval_windows)
                log.write(step, {f"validation_{name}": found[name] for name in ("loss", "accuracy")})
        tests = []
        for times in job.tests:
            measures = score("test", times * length, max(1, job.test_tokens // (times * length)))
            tests.append({"name": test_name(times), "context_length": times * length, **measures})
    # The state is that of a stream after a text, in float32.
    return {"tests": tests, "state_bytes": stream_bytes(model.config, length)}


def new_model(config: TrainConfig, vocab_size: int) -> CausalLM:
    """A model whose weights of N(0, 0.02) are as large for its width as they are in the paper's largest models.

    Small ones would need most of a short run to wake up.
    """
    torch.manual_seed(config.seed)
    model = build_model(config.model_config(vocab_size))
    assert isinstance(model, CausalLM)
    with torch.no_grad():
        for matrix in matrices_of(model):
            if abs(float(matrix.std()) - 0.02) < 0.005:
                matrix.mul_((SIZES["large"].d_model / model.config.d_model) ** 0.5)
    if config.compile == "on":
        model.compile_blocks()
    return model


@torch.no_grad()
def held_out(
    model: CausalLM, task: TaskTexts, pairs: int, config: TrainConfig, part: str, length: int, rows: int
) -> dict[str, float]:
    """The mean loss in nats, the share of right answers and their number, on texts that are the same for all runs."""
    generator, device = _generator(SEEDS[part]), next(model.parameters()).device
    at_once = max(1, config.batch_size * config.context_length // length)
    loss, right, count = 0.0, 0, 0
    model.eval()
    for begin in range(0, rows, at_once):
        batch = task.draw(min(at_once, rows - begin), length, pairs, generator)
        targets = batch.targets.to(device)
        asked = targets != IGNORED
        with autocast(device, config.precision == "bf16"):
            logits = model.logits(model.backbone(batch.inputs.to(device))[asked]).float()
        loss += float(F.cross_entropy(logits, targets[asked], reduction="sum"))
        right += int((logits.argmax(-1) == targets[asked]).sum())
        count += int(asked.sum())
    model.train()
    return {"loss": loss / count, "accuracy": right / count, "tokens": count}


def test_name(times: int) -> str:
    """What differs from training in a test at so many times the context; empty if nothing does."""
    return f"at {times} times the length" if times > 1 else ""


def _generator(*key: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator().manual_seed(seed)
