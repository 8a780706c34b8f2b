"""A layer of MossFormer that streams learns to take noise off tones: `python examples/enhance.py`, two minutes on a core.

Tones with harmonics and a slow tremolo stand in white noise. Frames of 4 ms go through two layers: bidirectional, as in the
released models, or causal with causal convolutions. The causal ones also read a frame at a time, and give what they give for a
whole sequence. The table has SI-SNR, the ratio of signal to noise whatever the scale, of tones that training did not see. The
model without layers knows a frame alone.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from lineartime.foreign import MossFormerFLASH, MossFormerStack

RATE, FRAME, SECONDS = 8000, 32, 1.0
STEPS, ROWS, WIDTH = 250, 8, 64


def sounds(rows: int, seconds: float = SECONDS) -> tuple[Tensor, Tensor]:
    """Clean and noisy sounds, [rows, samples]: 1 to 5 harmonics of 80 to 400 Hz, and noise 0 to 10 dB below them."""
    t = torch.arange(int(seconds * RATE / FRAME) * FRAME) / RATE
    pitch, tremolo = 80 * 5 ** torch.rand(rows, 1, 1), 1 + 0.5 * torch.sin(2 * torch.pi * (1 + 3 * torch.rand(rows, 1)) * t)
    order = torch.arange(1, 6)[:, None]
    size = torch.rand(rows, 5, 1) / order
    clean = (size * torch.sin(2 * torch.pi * (pitch * order * t + torch.rand(rows, 5, 1)))).sum(1) * tremolo
    clean = clean / clean.std(1, keepdim=True)
    return clean, clean + torch.randn_like(clean) * 10 ** (-0.5 * torch.rand(rows, 1))


def si_snr(found: Tensor, clean: Tensor) -> Tensor:
    """In dB, of each row."""
    found, clean = found - found.mean(1, keepdim=True), clean - clean.mean(1, keepdim=True)
    target = (found * clean).sum(1, keepdim=True) / clean.square().sum(1, keepdim=True) * clean
    return 10 * (target.square().sum(1) / (found - target).square().sum(1)).log10()


class Enhancer(nn.Module):
    """Frames [B, T, samples] -> frames: two linear maps, with the layers between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encode, self.decode, self.layers = nn.Linear(FRAME, WIDTH), nn.Linear(WIDTH, FRAME), MossFormerStack([])
        options: Any = {"causal": True, "convolution": "causal"} if kind == "causal" else {}
        for _ in range(0 if kind == "without layers" else 2):
            self.layers.layers.append(MossFormerFLASH(WIDTH, d_qk=32, chunk_size=64, **options))

    def forward(self, frames: Tensor) -> Tensor:
        """Whole sounds."""
        features = self.encode(frames)
        out: Tensor = self.decode(self.layers(features))
        return out

    def extend(self, frames: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The next frames of streams, and the state after them."""
        out, state = self.layers.extend(self.encode(frames), state)
        return self.decode(out), state


def enhanced(model: Enhancer, noisy: Tensor) -> Tensor:
    """[B, samples] -> [B, samples]."""
    frames: Tensor = model(noisy.unflatten(1, (-1, FRAME)))
    return frames.flatten(1)


def main() -> None:
    """Train the three models, and read the last one as a stream."""
    torch.manual_seed(0)
    clean, noisy = sounds(64)
    print(f"{'':28}SI-SNR, dB\nnoisy                      {si_snr(noisy, clean).mean():10.2f}")
    for kind in ("without layers", "bidirectional", "causal"):
        torch.manual_seed(1)
        model, start = Enhancer(kind), time.process_time()
        optimizer = torch.optim.AdamW(model.parameters(), 4e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
        for _ in range(STEPS):
            target, given = sounds(ROWS)
            (-si_snr(enhanced(model, given), target).mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            out = enhanced(model.eval(), noisy)
        print(f"{kind:27}{si_snr(out, clean).mean():10.2f}   {time.process_time() - start:.0f} s of training")
    state: Any = None
    pieces: list[Tensor] = []
    with torch.no_grad():
        for frame in noisy[:4].unflatten(1, (-1, FRAME)).split(1, 1):
            piece, state = model.extend(frame, state)
            pieces.append(piece)
        streamed, size = torch.cat(pieces, 1).flatten(1), state.nbytes // 4
        print(f"causal, frame by frame     {si_snr(streamed, clean[:4]).mean():10.2f}   of 4 sounds; whole: ", end="")
        print(f"{si_snr(out[:4], clean[:4]).mean():.2f}, largest difference {(streamed - out[:4]).abs().max():.1e}")
        _, long = sounds(1, 600.0)
        state = None
        for piece in long.unflatten(1, (-1, FRAME)).split(1000, 1):
            _, state = model.extend(piece, state)
    print(f"state of a stream: {size:,} bytes after 1 second, {state.nbytes:,} after 10 minutes")


if __name__ == "__main__":
    main()
