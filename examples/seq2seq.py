"""An encoder-decoder learns to rewrite dates: `python examples/seq2seq.py`, about a minute on two cores.

Sources such as "on 3 March 1987", "Mar 3rd, 1987" and "3.3.87" become targets, "1987-03-03". The encoder reads a source in both
directions. The decoder reads it by gated cross-attention (`CrossGAU`), and generates the target token by token.
"""

import argparse
import random
import time
from datetime import date, timedelta

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lineartime.seq2seq import EncoderDecoder, beam_search, encoder_decoder_config

VOCAB_SIZE = 128  # characters of ASCII are their own ids
END = 0  # before every target, and after every source and target
IGNORED = -100  # labels at padding
Pair = tuple[str, str]


def pair() -> Pair:
    """A date from 1950 to 2049, as somebody writes it, and by ISO 8601."""
    day = date(1950, 1, 1) + timedelta(random.randrange(36_500))
    ordinal = {1: "st", 2: "nd", 3: "rd"}.get(day.day if day.day < 20 else day.day % 10, "th")
    spellings = [
        f"{day.day} {day:%B} {day.year}",
        f"on {day:%A}, {day.day} {day:%B} {day.year}",
        f"{day:%b} {day.day}{ordinal}, {day.year}",
        f"{day.day}.{day.month}.{day:%y}",  # 50 to 99 are of the last century
        f"{day:%d/%m/%Y}",
    ]
    return random.choice(spellings), day.isoformat()


def ids(text: str) -> Tensor:
    """The tokens of a text, and its end."""
    return torch.tensor([*text.encode("ascii"), END])


def padded(rows: list[Tensor], value: int = END) -> Tensor:
    """Rows of tokens as one tensor, padded on the right."""
    return pad_sequence(rows, batch_first=True, padding_value=value)


def read(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Sources [B, S], and the mask of their tokens."""
    rows = [ids(text) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    source = padded(rows)
    return source, torch.arange(source.shape[1]) < lengths[:, None]


def loss_of(model: EncoderDecoder, pairs: list[Pair]) -> Tensor:
    """The mean loss of the tokens of the targets, each of which is predicted from the source and the tokens before it."""
    source, mask = read([source for source, _ in pairs])
    labels = padded([ids(target) for _, target in pairs], IGNORED)
    given = F.pad(labels[:, :-1], (1, 0), value=END)
    logits = model(source, given.masked_fill(given == IGNORED, END), mask)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def rewrite(model: EncoderDecoder, texts: list[str], beams: int) -> list[str]:
    """The targets of sources, the most likely ones that beam search finds."""
    source, mask = read(texts)
    found = beam_search(model, source, mask, start_token=END, stop_token=END, max_tokens=16, beams=beams)
    return [bytes(tokens).decode("ascii") for tokens in found]


def main() -> None:
    """Train the model, and compare what it writes for dates that it has not seen."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--preset", default="flash-quad-tiny", help="layers of both sides, by the name of a preset")
    parser.add_argument("--steps", type=int, default=500, help="steps of 64 pairs")
    parser.add_argument("--beams", type=int, default=4, help="beams of the second way to decode")
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    held_out = {pair() for _ in range(500)}
    size = {"d_model": 64, "n_encoder_blocks": 2, "n_decoder_blocks": 2, "dropout": 0.0}
    model = EncoderDecoder(encoder_decoder_config(options.preset, vocab_size=VOCAB_SIZE, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps, pct_start=0.1)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")

    begin = time.perf_counter()
    for step in range(1, options.steps + 1):
        batch = [each for each in (pair() for _ in range(64)) if each not in held_out]
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == options.steps:
            print(f"step {step}: loss {loss.item():.4f} after {time.perf_counter() - begin:.0f} s")

    model.eval()
    sources, targets = zip(*sorted(held_out), strict=True)
    for beams in (1, options.beams):
        written = rewrite(model, list(sources), beams)
        exact = sum(map(str.__eq__, written, targets)) / len(targets)
        print(f"{'greedy' if beams == 1 else f'{beams} beams'}: exact match {100 * exact:.1f} %")
    for source, target in list(zip(sources, written, strict=True))[::100]:
        print(f"  {source} -> {target}")


if __name__ == "__main__":
    main()
