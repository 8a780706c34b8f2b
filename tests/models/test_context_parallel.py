"""Sequences split over processes, which compute the whole sequence as well, and compare slices and summed gradients with it."""

import datetime
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.layers import set_backend
from lineartime.models import LanguageModel, LayerConfig, ModelConfig, build_model
from lineartime.ops.context import ContextGroup, context_group

CHUNK, LENGTH, VOCABULARY, D_QK, D_VALUE = 4, 24, 30, 6, 16


def make_model(task: Any, dtype: torch.dtype = torch.float64, position: Any = "none", **mixer: Any) -> LanguageModel:
    """Parameters are large, so that nothing that a token reads is lost beside the residual."""
    torch.manual_seed(0)
    config = ModelConfig(
        task=task,
        vocab_size=VOCABULARY,
        d_model=8,
        n_blocks=2,
        mixer=LayerConfig("flash", d_qk=D_QK, chunk_size=CHUNK, **mixer),
        absolute_position=position,
        max_positions=LENGTH if position == "learned" else None,
    )
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.to(dtype)


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    return ids, targets.masked_fill(torch.rand(2, LENGTH, generator=generator) < 0.3, -100)


def logits_loss_gradients(
    model: LanguageModel, ids: Tensor, targets: Tensor, context: ContextGroup | None = None
) -> list[Tensor]:
    with torch.no_grad():
        logits = model(ids, context=context)
    loss = model.total_loss(ids, targets, context=context)
    return [logits, loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def world() -> ContextGroup:
    return context_group(dist.group.WORLD)


def slice_of(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def assert_split_is_whole(model: LanguageModel, tolerance: float, prepare: Callable[[], None] = lambda: None) -> None:
    """`prepare` is called between the whole and the split computation."""
    ids, targets = make_batch()
    logits, *whole = logits_loss_gradients(model, ids, targets)
    prepare()
    own_logits, *split = logits_loss_gradients(model, slice_of(ids), slice_of(targets), world())
    split = [gradient.contiguous() for gradient in split]  # of compiled code, some are views, which gloo sums wrongly
    for gradient in split:
        dist.all_reduce(gradient)
    for one, other in zip([own_logits, *split], [slice_of(logits), *whole], strict=True):
        error, largest = (one - other).abs().max(), other.abs().max()
        assert error <= tolerance * (1 + largest), f"{error} beside {largest}"


def split_is_whole() -> None:
    for task, backend, normalization, rope in (  # every two values meet
        ("clm", "torch", "count", False),
        ("clm", "auto", "paper", True),
        ("clm", "torch", "paper_sum", True),
        ("mlm", "auto", "count", True),
        ("mlm", "torch", "paper", False),
        ("mlm", "auto", "paper_sum", False),
    ):
        position = "scaled_sin" if rope else "learned"
        model = make_model(task, position=position, normalization=normalization, rope=rope)
        set_backend(model, backend)
        assert_split_is_whole(model, 1e-10)
    for task in ("clm", "mlm"):
        model = make_model(task)
        assert_split_is_whole(model, 1e-10, model.recompute_blocks)
        assert_split_is_whole(make_model(task, activation="softmax"), 1e-10)
        assert_split_is_whole(make_model(task, token_shift=True), 1e-10)
        assert_split_is_whole(make_model(task, torch.float32), 1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_split_is_whole(make_model(task, torch.float32), 5e-2)


def compiled_is_whole() -> None:
    for task, recompute in (("clm", True), ("mlm", False)):
        model = make_model(task, torch.float32, token_shift=recompute)

        def prepare(model: LanguageModel = model, recompute: bool = recompute) -> None:
            if recompute:
                model.recompute_blocks()
            model.compile_blocks()

        assert_split_is_whole(model, 1e-4, prepare)


def only_states_cross() -> None:
    sent: list[int] = []

    def noted(send: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **options: sent.append(given[-1].numel()) or send(*given, **options)

    ids, targets = make_batch()
    state, half_token = 2 * D_QK * D_VALUE, 2 * 4  # batch x s x e, and batch x half of d
    for task, token_shift in itertools.product(("clm", "mlm"), (False, True)):
        model = make_model(task, token_shift=token_shift)
        with patch.multiple(dist, all_gather=noted(dist.all_gather), all_reduce=noted(dist.all_reduce)):
            loss = model.total_loss(slice_of(ids), slice_of(targets), context=world())
            forward = 2 * [*([half_token] if token_shift else []), state]  # of two layers
            assert sent == [2, *forward], sent  # and the shape of the slices
            loss.backward()
        assert sent == [2, *forward, *reversed(forward)], sent
        sent.clear()


def what_cannot_be_split_is_refused() -> None:
    rank, context = dist.get_rank(), world()
    model = make_model("clm")
    ids = torch.zeros(1, 2 * CHUNK, dtype=torch.long)
    with pytest.raises(
        ArgumentError, match=rf"ids has the shapes \[1, {CHUNK}\], \[1, {2 * CHUNK}\].*must have the same in all"
    ):
        model(ids[:, : CHUNK if rank == 0 else 2 * CHUNK], context=context)
    for length in (0, CHUNK + 1):
        with pytest.raises(ArgumentError, match=rf"x has {length} tokens .* chunk_size = {CHUNK}"):
            model(ids[:, :length], context=context)
    with pytest.raises(ValueError, match="mask is given, but sequences that are split"):
        model(ids, mask=ids == 0, context=context)
    with pytest.raises(ValueError, match="cu_seqlens is given, but sequences that are split"):
        model(ids, cu_seqlens=torch.tensor([0, 2 * CHUNK]), context=context)

    for mixer in (LayerConfig("gau"), LayerConfig("flash-local")):
        other = build_model(make_model("clm").config.override(mixer=mixer))
        assert not other.splits_context
        with pytest.raises(ValueError, match="needs its whole sequence in one process"):
            other(ids, context=context)
    first_alone = dist.new_group([0])
    if rank > 0:
        with pytest.raises(ArgumentError, match="group does not contain this process"):
            context_group(first_alone)


def run(rank: int, size: int, store: str, cases: list[str]) -> None:
    """Run cases, functions of this file, in one of `size` processes, which meet in the file `store`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    for case in cases:
        globals()[case]()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ["only_states_cross", "what_cannot_be_split_is_refused"]),
        (3, ["split_is_whole"]),
        pytest.param(2, ["compiled_is_whole"], marks=pytest.mark.nightly),
    ],
)
def test_sequence_that_is_split_over_processes_is_the_whole(
    size: int, cases: list[str], fork: Callable[[str], Any], tmp_path: Path
) -> None:
    own = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from {__name__} import run; "
    processes = [fork(f"{own}run({rank}, {size}, {str(tmp_path / 'store')!r}, {cases!r})") for rank in range(size)]
    codes = [process.wait() for process in processes]
    assert codes == [0] * size, "\n".join(process.output for process in processes)
