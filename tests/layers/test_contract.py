import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.baselines.kernel_attention import LinearState
from lineartime.errors import LineartimeError
from lineartime.layers import FLASH, GAU, check_mixer
from lineartime.layers.contract import BrokenPromiseError
from lineartime.layers.mixer import Mixer
from lineartime.ops.packing import Packing


class Average(Mixer):
    """Adds the mean of all tokens of the row, or of those so far, through a linear map."""

    name = "average"

    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__(d_model, **options)
        self.map = nn.Linear(d_model, d_model)

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        if state is None:
            return self.map(packing.by_row(self.of_rows, x)), None
        (grid,) = packing.grids(None, causal=True)
        sums = state.summary[:, None] + grid.queries(x).cumsum(1)
        counts = torch.arange(1, packing.longest + 1)[:, None] + (packing.common_start or 0)
        last = sums[:, -1] if packing.longest else state.summary
        return self.map(grid.tokens(sums / counts)), LinearState(state.position + packing.new, last)

    def of_rows(self, rows: Tensor, real: Tensor | None) -> Tensor:
        shown = torch.ones_like(rows[..., :1]) if real is None else real[..., None].to(rows.dtype)
        sums, counts = (rows * shown).cumsum(1), shown.cumsum(1)
        return sums / counts.clamp(min=1) if self.causal else (sums[:, -1:] / counts[:, -1:].clamp(min=1)).expand_as(rows)

    def init_own_state(self, batch_size: int) -> LinearState:
        return LinearState(torch.zeros(batch_size, dtype=torch.long), self.map.weight.new_zeros(batch_size, self.d_model))


def reading(read: Callable[[Tensor, Tensor | None, Callable[..., Tensor]], Tensor]) -> type[Average]:
    """An average whose rows are read by `read(rows, real, average)`."""

    class Other(Average):
        def of_rows(self, rows: Tensor, real: Tensor | None) -> Tensor:
            return read(rows, real, super().of_rows)

    return Other


LooksAhead = reading(lambda rows, real, average: average(rows, real).roll(-1, 1))
InSingle = reading(lambda rows, real, average: average(rows, real).float())  # as code with `dtype=torch.float32` does
IgnoresPadding = reading(lambda rows, real, average: average(rows, None))
HasInfiniteGradients = reading(lambda rows, real, average: average(rows, real) + (0 * rows).sqrt())
IsInfinite = reading(lambda rows, real, average: average(rows, real) / 0)
SeesFarAhead = reading(  # 64 tokens
    lambda rows, real, average: average(rows, real) + F.pad(rows, (0, 0, 0, 64))[:, 64:]
)


class MixesRows(Average):
    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        return super().read(x - x.mean(0), packing, state)


class CrossesDocuments(Average):
    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        if state is not None or packing.shape[0] > 1:  # rows with padding, which are documents, too
            return super().read(x, packing, state)
        return self.map(self.of_rows(x[None], None)[0]), None


class ForgetsItsState(Average):
    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        forgotten = None if state is None else LinearState(state.position, torch.zeros_like(state.summary))
        return super().read(x, packing, forgotten)


class RemembersBesideItsState(Average):
    """Its outputs depend on what it read before, whatever state it is given."""

    calls = 0

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        self.calls += state is not None
        out, after = super().read(x, packing, state)
        return out if state is None else out * self.calls, after


class MixesStreams(Average):
    """Takes streams at different positions for streams at that of the first."""

    any_positions = True

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        return super().read(x, replace(packing, starts=(packing.starts or [])[:1]), state)


class CannotStream(Average):
    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        if state is not None:
            raise NotImplementedError
        return super().read(x, packing)


class HasCausalPrefixes(GAU):
    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        return super().read(x, replace(packing, prefix=None), state)


class BeginsWrongly(GAU):
    def read_prefix(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        out, state = super().read_prefix(x, mask)
        return 0.9 * out, state


class LeaksBesideADecay(Average):
    """A recurrence whose outputs grow if its decay is changed, and hide a leak."""

    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__(d_model, **options)
        self.decay = nn.Parameter(torch.full((d_model,), 0.95))

    def of_rows(self, rows: Tensor, real: Tensor | None) -> Tensor:
        sums, read = torch.zeros_like(rows[:, 0]), []
        for token in rows.unbind(1):
            sums = self.decay * sums + token
            read.append(sums)
        return torch.stack(read, 1) + 0.5 * rows.roll(-1, 1)


BROKEN: list[tuple[type[Mixer], bool, str]] = [
    (LooksAhead, True, "outputs do not depend on later tokens. But if the tokens from 1 on .*: token 0 by "),
    (LeaksBesideADecay, True, "outputs do not depend on later tokens"),
    (SeesFarAhead, True, "outputs do not depend on later tokens"),
    (MixesRows, False, "rows of a batch are independent. But a row alone has other outputs"),
    (IgnoresPadding, False, "padding changes nothing, and its outputs are zero. But with padding after it, a row"),
    (CrossesDocuments, True, r"the documents of a pack are independent. But documents of \[\d+, 1, 3, 0, \d+\] tokens"),
    (ForgetsItsState, True, r"streams continue in any pieces as the whole text is read. But read in pieces of \[3, "),
    (RemembersBesideItsState, True, r"streams continue .* But .*a clone of the state is continued differently"),
    (MixesStreams, True, r"streams at different positions continue together as each does alone"),
    (CannotStream, True, r"streams continue .* But it fails \(NotImplementedError"),
    (HasInfiniteGradients, False, "all gradients are finite. But the gradient of the tokens is not"),
    (IsInfinite, False, "it maps .* to finite .* But some outputs of random tokens are not finite"),
    (HasCausalPrefixes, True, "streams can begin with a prefix. But no token of a prefix reads a later one"),
    (BeginsWrongly, True, r"streams can begin with a prefix. But with a prefix of \d+ tokens, a stream has other outputs"),
]


@pytest.mark.parametrize(("kind", "causal", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_broken_promise_is_named(kind: type[Mixer], causal: bool, message: str) -> None:
    with pytest.raises(BrokenPromiseError, match=f"^{kind.__name__} breaks a promise of every mixer: {message}"):
        check_mixer(kind(8, causal=causal))


def test_promises_depend_on_the_mixer() -> None:
    assert len(check_mixer(Average(8))) == 5
    assert len(check_mixer(Average(8, causal=True))) == 8
    assert len(check_mixer(FLASH(8, d_qk=4, chunk_size=8, causal=True))) == 9


def test_mixer_that_computes_in_float32_is_checked_in_float32() -> None:
    check_mixer(InSingle(8, causal=True))
    with pytest.raises(BrokenPromiseError, match="later tokens"):
        check_mixer(type("Both", (LooksAhead, InSingle), {})(8, causal=True))


def test_mixer_that_does_not_compute_here_is_not_called_broken() -> None:
    def refuses(*_: Any) -> Tensor:
        raise ValueError("needs a GPU")

    with pytest.raises(LineartimeError, match=r"^Other cannot be checked, on the CPU: ValueError: needs a GPU\.$"):
        check_mixer(reading(refuses)(8, causal=True))


def test_short_rows_and_a_caller_without_gradients_are_no_fault_of_a_mixer() -> None:
    check_mixer(type("OfShortRows", (Average,), {"longest_sequence": 2})(8, causal=True))
    with torch.no_grad():
        check_mixer(Average(8, causal=True))
    with torch.inference_mode():
        check_mixer(Average(8))


def test_mixer_and_the_random_numbers_stay_as_they_are() -> None:
    mixer = Average(8, causal=True).bfloat16().train().requires_grad_(False)
    before, state = copy.deepcopy(mixer.state_dict()), torch.get_rng_state()
    check_mixer(mixer)
    assert torch.equal(torch.get_rng_state(), state)
    assert mixer.training
    assert all(torch.equal(value, before[name]) and value.grad is None for name, value in mixer.state_dict().items())


def test_state_of_the_wrong_kind_is_named() -> None:
    class HasADictionary(Average):
        def init_own_state(self, batch_size: int) -> Any:
            return {"sums": torch.zeros(batch_size, self.d_model)}

    with pytest.raises(LineartimeError, match=r"^HasADictionary.init_own_state returned a dict, but must return a State"):
        HasADictionary(8, causal=True).init_state(2)
