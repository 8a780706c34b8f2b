"""Sequence to sequence: an encoder-decoder learns from pairs of texts, and writes the targets of others.

`Trainer` of transformers trains it, as `lineartime.finetuning.tune` does. The end of a document comes before every target and
after every source and target.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lineartime.checkpoint import load, load_tokenizer, save
from lineartime.data.tokenizers import Tokenizer
from lineartime.data.train_tokenizer import tokenizer_for
from lineartime.errors import ArgumentError, LineartimeError, require_packages
from lineartime.files import read_file, remove, removed_on_failure, write_file
from lineartime.finetuning.pairs import Pair, corpus_of, find_pairs, read_pairs
from lineartime.finetuning.pairs_config import PairsConfig
from lineartime.finetuning.predict import PAIRS_RESULT, blocks
from lineartime.finetuning.trainer import Task, begun, plain_options, train, write_result
from lineartime.finetuning.windows import by_length
from lineartime.machine import autocast
from lineartime.models.encoder_decoder import EncoderDecoder, beam_search, greedy

PREDICTIONS, CHECKPOINTS = "predictions.jsonl", "checkpoints"
IGNORED = -100


@dataclass(frozen=True)
class PairsResult:
    """What training on pairs found.

    Attributes:
        config: the options.
        max_target_tokens: the maximum number of tokens in a target that is written, with its end.
        metrics: exact match and chrF in percent, and the loss in nats per token, of the best model; empty until it is done.
        epoch: when they were measured.
        losses: the mean training loss of each epoch.
    """

    config: dict[str, Any]
    max_target_tokens: int
    metrics: dict[str, float]
    epoch: float = 0.0
    losses: tuple[float, ...] = ()


def seq2seq(config: PairsConfig, say: Callable[[str], None] = print) -> PairsResult:
    """Train an encoder-decoder on pairs of texts, and keep the model with the most exact matches (of equals, the lowest loss).

    The folder `config.out` gets the model, which `lineartime.load` reads; the predictions on the held-out pairs; and
    seq2seq.json with the metrics.

    Args:
        config: the options.
        say: called with each line about what is done.

    Raises:
        ArgumentError: for options that do not fit the data.
        LineartimeError: if a file cannot be read or written, or a package is missing.
    """
    require_packages("accelerate", "sacrebleu", extra="finetune", purpose="Training on pairs")
    done = begun(config, PAIRS_RESULT, PairsResult)
    if done is not None and done.metrics:
        return done
    pairs, checkpoints = find_pairs(config.data), config.out / CHECKPOINTS
    with removed_on_failure(config.out) if done is None else nullcontext():
        tokenizer = tokenizer_for(config.tokenizer, corpus_of(str(config.data), pairs["train"]), checkpoints)
        torch.manual_seed(config.seed)
        model = EncoderDecoder(config.model(tokenizer.vocab_size))
        task = PairTask(pairs["train"], pairs["validation"], tokenizer, model, config)
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"{len(task.train):,} pairs to train with, {len(pairs['validation']):,} held out; {size:,} parameters")
    result = PairsResult(plain_options(config), task.max_tokens, {})
    write_result(config.out / PAIRS_RESULT, result)
    trained = train(
        task,
        Learner(model),
        checkpoints,
        say,
        device=config.device,
        precision=config.precision,
        patience=config.patience,
        learning_rate=config.learning_rate,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        adam_beta2=0.98,
        seed=config.seed,
    )
    task.write(config.out)
    remove(config.out / "new")
    for file in save(model, tokenizer, config.out / "new").iterdir():
        file.replace(config.out / file.name)
    metrics = {name: trained.metrics[name] for name in ("exact_match", "chrf", "loss")}
    result = dataclasses.replace(result, metrics=metrics, epoch=trained.epoch, losses=trained.losses)
    write_result(config.out / PAIRS_RESULT, result)
    for folder in (config.out / "new", checkpoints):
        shutil.rmtree(folder)
    return result


class PairTask(Task):
    """Pairs to train with and to validate with, as token ids for one model.

    Raises:
        LineartimeError: naming the line of a text that is longer than the model can read.
    """

    metric = "rank"

    def __init__(
        self,
        train: Sequence[Pair],
        held_out: Sequence[Pair],
        tokenizer: Tokenizer,
        model: EncoderDecoder,
        config: PairsConfig,
    ) -> None:
        self.tokenizer, self.config, self.pairs = tokenizer, config, held_out
        self.train, self.held_out = (
            [{name: encoded(tokenizer, model, pair, name) for name in ("source", "target")} for pair in each]
            for each in (train, held_out)
        )
        longest = max(len(row["target"]) for row in (*self.train, *self.held_out))
        self.max_tokens = config.max_target_tokens or longest
        self.predictions: list[str] = []

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of padded pairs: the sources, the targets to read, and the targets to predict."""
        end = self.tokenizer.end_of_document
        source_ids, source_mask = padded([row["source"] for row in rows], end)
        target_ids, target_mask = padded([[end, *row["target"][:-1]] for row in rows], end)
        labels, _ = padded([row["target"] for row in rows], IGNORED)
        masks = {"source_mask": source_mask, "target_mask": target_mask}
        return {"source_ids": source_ids, "target_ids": target_ids, **masks, "labels": labels}

    @torch.no_grad()
    def evaluate(self, learner: "Learner", bf16: bool = False) -> dict[str, float]:
        """Write the targets of the held-out sources, and compare them with the right ones; `rank` orders models."""
        from sacrebleu.metrics.chrf import CHRF

        model = learner.model.eval()
        device, size, nats, count = _device(model), self.config.batch_size, 0.0, 0
        for first in range(0, len(self.held_out), size):
            batch = {name: x.to(device) for name, x in self.collate(self.held_out[first : first + size]).items()}
            with autocast(device, bf16):
                nats += float(_loss(model, batch, "sum"))
            count += int((batch["labels"] != IGNORED).sum())
        sources = [row["source"] for row in self.held_out]
        self.predictions = write_targets(model, self.tokenizer, sources, self.max_tokens, self.config.beams, size, bf16)
        right = [pair.target for pair in self.pairs]
        exact = sum(map(str.__eq__, self.predictions, right))
        loss = nats / count
        return {
            "exact_match": 100 * exact / len(right),
            "chrf": CHRF().corpus_score(self.predictions, [right]).score,
            "loss": loss,
            "rank": exact + 0.5 / (1 + loss),  # the second part is below one exact match
        }

    def write(self, folder: Path) -> None:
        """Write the last predictions beside the right targets."""
        rows = zip(self.pairs, self.predictions, strict=True)
        lines = [{"id": pair.key, "source": pair.source, "target": pair.target, "predicted": each} for pair, each in rows]
        write_file(folder / PREDICTIONS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def encoded(tokenizer: Tokenizer, model: EncoderDecoder, pair: Pair, name: Literal["source", "target"]) -> list[int]:
    """The token ids of a text of a pair, and its end. Raises LineartimeError, naming its line, if the model reads fewer."""
    ids, longest = [*tokenizer.encode(getattr(pair, name)).tolist(), tokenizer.end_of_document], model.longest_target
    if longest is not None and len(ids) > longest:
        what = f"has a {name} of {len(ids):,} tokens, but the model reads at most {longest:,}"
        raise LineartimeError(f"{pair.where} {what}: leave it out, or train a model with a larger max_length.")
    return ids


def padded(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, padded on the right, [B, T], and which of them are real, bool [B, T]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def _loss(model: EncoderDecoder, batch: Mapping[str, Tensor], reduction: str) -> Tensor:
    logits = model(*(batch[name] for name in ("source_ids", "target_ids", "source_mask", "target_mask")))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction=reduction)


def _device(model: EncoderDecoder) -> torch.device:
    return next(model.parameters()).device


class Learner(nn.Module):
    """The loss of an encoder-decoder, as `Trainer` asks for it. It expects other configs than the model has."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """The mean loss of the target tokens of a batch, in nats."""
        return {"loss": _loss(self.model, batch, "mean")}


def write_targets(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    sources: Sequence[list[int]],
    max_tokens: int,
    beams: int,
    batch_size: int,
    bf16: bool = False,
) -> list[str]:
    """The targets of sources, given as token ids with their end. Sources of about one length are read together."""
    end, device, targets = tokenizer.end_of_document, _device(model), [""] * len(sources)
    options: dict[str, Any] = {"start_token": end, "stop_token": end, "max_tokens": max_tokens}
    for rows in by_length(list(map(len, sources)), batch_size):
        ids, mask = (each.to(device) for each in padded([sources[row] for row in rows], end))
        with autocast(device, bf16):
            written = (
                greedy(model, ids, mask, **options) if beams == 1 else beam_search(model, ids, mask, beams=beams, **options)
            )
        for row, target in zip(rows, written, strict=True):
            targets[row] = tokenizer.decode(target)
    return targets


def target_blocks(
    model: Path, beams: int, file: Path, done: int, batch_size: int, device: torch.device, bf16: bool
) -> Iterator[list[dict[str, Any]]]:
    """The targets of the sources of a file after the first `done`, in blocks."""
    result = read_file(model / PAIRS_RESULT, PairsResult)
    if not result.metrics:
        raise ArgumentError("run", f"is {model}, whose training was stopped: go on with it by `resume=True` of `seq2seq()`.")
    loaded, tokenizer = cast("EncoderDecoder", load(model, device)), load_tokenizer(model)
    for block in blocks(read_pairs(file, targets=False), done):
        sources = [encoded(tokenizer, loaded, pair, "source") for pair in block]
        targets = write_targets(loaded, tokenizer, sources, result.max_target_tokens, beams, batch_size, bf16)
        yield [{"id": pair.key, "target": target} for pair, target in zip(block, targets, strict=True)]
