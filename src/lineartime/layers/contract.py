"""What every mixer promises, checked on random tokens: for mixers of your own.

Shapes: B batch, T tokens, C tokens of a chunk, d model width.
"""

import copy
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError, typed_first_line
from lineartime.layers.mixer import Mixer

ROWS = 3
MOST_TOKENS = 600
"""The most tokens in a row, so that a check takes seconds, also of wide layers."""
NO_FUTURE = "outputs do not depend on later tokens"
"""The promise without which losses in training mean nothing."""


class BrokenPromiseError(LineartimeError):
    """A mixer does not do what every mixer promises; `promise` says what, in words."""

    def __init__(self, mixer: Mixer, promise: str, found: str) -> None:
        super().__init__(f"{type(mixer).__name__} breaks a promise of every mixer: {promise}. But {found}.")
        self.promise = promise


def check_mixer(mixer: Mixer) -> tuple[str, ...]:
    """Check on random tokens that a mixer does what every mixer promises.

    A copy of the mixer is checked, on the CPU, in evaluation mode, with weights far from their small initial values. It reads
    two chunks and a few more tokens, or 133 if it has no chunks, but at most 600: what only happens further away is not seen.

    Args:
        mixer: a layer of a class of your own, or of the library. It is not changed.

    Returns:
        The promises that were checked, in words: "rows are independent", ...

    Raises:
        BrokenPromiseError: naming the first promise that is broken, and by how much.
        ArgumentError: if this is not a mixer.
        LineartimeError: if it cannot be checked, for instance because it only computes on a GPU.
    """
    if not isinstance(mixer, Mixer):
        raise ArgumentError("mixer", f"is of type {type(mixer).__name__}, but must be a Mixer of lineartime.layers.")
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.random.default_generator.manual_seed(0)  # not torch.manual_seed, which also seeds GPUs
        try:
            probe = _Probe(mixer)
        except Exception as error:  # whatever a mixer does on the CPU, or without copies
            problem = typed_first_line(error).rstrip(".")
            raise LineartimeError(f"{type(mixer).__name__} cannot be checked, on the CPU: {problem}.") from error
        promises = probe.promises()
        for promise, check in promises.items():
            try:
                check()
            except _DifferenceError as found:
                raise BrokenPromiseError(mixer, promise, str(found)) from None
            except Exception as error:  # whatever a mixer does with input that it did not expect
                raise BrokenPromiseError(mixer, promise, f"it fails ({typed_first_line(error).rstrip('.')})") from error
    return tuple(promises)


class _DifferenceError(Exception):
    """Two results differ that must be equal. The message says where, and how much."""


class _Probe:
    """A mixer to check, and the tokens [B, T, d] that it reads."""

    def __init__(self, mixer: Mixer) -> None:
        self.as_it_is, self.mixer = (copy.deepcopy(mixer).cpu().eval() for _ in range(2))
        with torch.no_grad():  # weights that let everything in it have a say
            for parameter in self.mixer.requires_grad_().parameters():
                deviation = max(1, parameter.shape[-1]) ** -0.5 if parameter.dim() > 1 else 0.3
                parameter.add_(deviation * torch.randn_like(parameter))
        self.mixer.double()
        chunk_size = getattr(self.mixer, "chunk_size", None) or 64
        self.length = min(2 * chunk_size + 5, MOST_TOKENS, self.mixer.longest_sequence or MOST_TOKENS)
        self.x = torch.randn(ROWS, self.length, self.mixer.d_model, dtype=torch.float64)
        self.tolerance = 1e-6  # a part of the mixer may compute in float32
        try:
            self.read(self.x[:1])
        except Exception:  # all of it does
            self.mixer, self.x, self.tolerance = self.mixer.float(), self.x.float(), 1e-4
            self.read(self.x[:1])
        self.as_it_is = self.as_it_is.to(self.x.dtype)

    def promises(self) -> dict[str, Callable[[], None]]:
        """The check of each promise, by the promise in words."""
        checks = {
            "it maps [B, T, d] to finite [B, T, d]": self.check_shape,
            NO_FUTURE: self.check_causal,
            "rows of a batch are independent": self.check_rows,
            "padding changes nothing, and its outputs are zero": self.check_padding,
            "the documents of a pack are independent": self.check_pack,
            "all gradients are finite": self.check_gradients,
            "streams continue in any pieces as the whole text is read": self.check_streams,
            "streams at different positions continue together as each does alone": self.check_positions,
            "streams can begin with a prefix": self.check_prefix,
        }
        if not self.mixer.causal:
            return {promise: check for promise, check in checks.items() if promise != NO_FUTURE and "streams" not in promise}
        if not self.mixer.reads_prefix:
            del checks["streams can begin with a prefix"]
        return checks

    @torch.no_grad()
    def read(self, x: Tensor, mixer: Mixer | None = None, **options: Any) -> Tensor:
        torch.random.default_generator.manual_seed(0)  # a mixer that draws numbers draws the same
        out: Tensor = (mixer or self.mixer)(x, **options)
        return out

    @cached_property
    def whole(self) -> Tensor:
        return self.read(self.x)

    def equal(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Raise _DifferenceError, naming the first token, unless two outputs [..., T, d] are equal up to rounding.

        Each token is compared with its own size: a mixer may amplify later ones.
        """
        difference, sizes = (found - expected).abs().amax(-1), expected.abs().amax(-1).clamp(min=1e-3)
        wrong = (~(difference <= self.tolerance * sizes)).nonzero()
        if len(wrong):
            first = tuple(wrong[wrong[:, -1].argmin()])
            by, size = difference[first].item(), sizes[first].item()
            others = f", and {len(wrong) - 1} others differ, too" if len(wrong) > 1 else ""
            raise _DifferenceError(f"{what}: token {int(first[-1])} by {by:.2g}, where its output is up to {size:.2g}{others}")

    def check_shape(self) -> None:
        if self.whole.shape != self.x.shape:
            raise _DifferenceError(f"it maps {list(self.x.shape)} to {list(self.whole.shape)}")
        if not bool(self.whole.isfinite().all()):
            raise _DifferenceError("some outputs of random tokens are not finite")

    def check_causal(self) -> None:
        for mixer in (self.mixer, self.as_it_is):  # its own weights, too: others may amplify, and hide what is small
            whole = self.read(self.x, mixer)
            for cut in sorted({1, self.length // 3, self.length // 2, self.length - 1} - {0}):
                changed = torch.cat([self.x[:, :cut], torch.randn_like(self.x[:, cut:])], 1)
                what = f"if the tokens from {cut} on change, earlier outputs do, too"
                self.equal(self.read(changed, mixer)[:, :cut], whole[:, :cut], what)

    def check_rows(self) -> None:
        alone = torch.cat([self.read(row) for row in self.x.split(1)])
        self.equal(alone, self.whole, "a row alone has other outputs than in a batch")

    def check_padding(self) -> None:
        lengths = torch.tensor([self.length, max(1, self.length // 2), 1])
        after = torch.arange(self.length) < lengths[:, None]
        between = torch.rand(ROWS, self.length) < 0.7
        for where, mask in (("after", after), ("before", after.flip(1)), ("within", between)):
            found = self.read(self.x.masked_fill(~mask[..., None], torch.nan), mask=mask)
            if bool(found[~mask].ne(0).any()):
                raise _DifferenceError(f"padding {where} a text has outputs other than zero")
            for row, real in enumerate(mask):
                alone = self.read(self.x[row, real][None])
                self.equal(found[row, real], alone[0], f"with padding {where} it, a row has other outputs than alone")

    def check_pack(self) -> None:
        lengths = [self.length // 2, 1, min(3, self.length), 0, self.length - self.length // 2]
        pack = self.x.flatten(0, 1)[None, : sum(lengths)]
        ends = list(accumulate(lengths, initial=0))
        found = self.read(pack, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
        alone = torch.cat([self.read(pack[:, start:stop]) for start, stop in pairwise(ends) if stop > start], 1)
        self.equal(found, alone, f"documents of {lengths} tokens in a pack have other outputs than alone")

    def check_gradients(self) -> None:
        x = self.x.clone().requires_grad_()
        self.mixer.zero_grad()
        self.mixer(x).square().sum().backward()
        for name, tensor in [("the tokens", x), *self.mixer.named_parameters()]:
            if tensor.grad is not None and not bool(tensor.grad.isfinite().all()):
                raise _DifferenceError(f"the gradient of {name} is not")

    @torch.no_grad()
    def check_streams(self) -> None:
        first, half = min(3, self.length), self.length // 2
        few = min(4, self.length - first)
        for counts in ([first] + [1] * few + [self.length - first - few], [half, self.length - half]):
            outputs: list[Tensor] = []
            state: Any = None
            for piece in self.x.split(counts, dim=1):
                branch = None if state is None else state.clone()
                out, state = self.mixer.extend(piece, state)
                outputs.append(out)
                if branch is not None:
                    again, _ = self.mixer.extend(piece, branch)
                    self.equal(again, out, f"with pieces of {counts} tokens, a clone of the state is continued differently")
            self.equal(torch.cat(outputs, 1), self.whole, f"read in pieces of {counts} tokens, outputs differ")

    @torch.no_grad()
    def check_positions(self) -> None:
        lengths = [max(0, self.length - 4), max(0, self.length // 2 - 1), 0]
        longest, rest = lengths[0], self.length - lengths[0]
        mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
        begun = torch.full_like(self.x[:, :longest], torch.nan)
        begun[mask] = self.x[:, :longest][mask.flip(1)]
        out, state = self.mixer.extend(begun, None, mask)
        outputs = [out]
        following = torch.stack([row[length : length + rest] for row, length in zip(self.x, lengths, strict=True)])
        for piece in following.split([1, 1, rest - 2] if rest > 2 else 1, dim=1):
            out, state = self.mixer.extend(piece, state)
            outputs.append(out)
        together = torch.cat(outputs, 1)
        for row, length in enumerate(lengths):
            found, expected = together[row, longest - length :], self.whole[row, : length + rest]
            self.equal(found, expected, f"streams that begin with {lengths} tokens have other outputs")

    @torch.no_grad()
    def check_prefix(self) -> None:
        count = max(1, self.length // 2)
        whole = self.read(self.x, prefix_lengths=torch.full((ROWS,), count))
        begun, state = self.mixer.read_prefix(self.x[:, :count])
        rest, _ = self.mixer.extend(self.x[:, count:], state)
        changed = torch.cat([self.x[:, : count - 1], torch.randn_like(self.x[:, count - 1 :])], 1)
        if count > 1 and torch.equal(self.mixer.read_prefix(changed[:, :count])[0][:, :-1], begun[:, :-1]):
            raise _DifferenceError("no token of a prefix reads a later one")
        self.equal(torch.cat([begun, rest], 1), whole, f"with a prefix of {count} tokens, a stream has other outputs")
