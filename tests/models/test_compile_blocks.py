"""Compiling a model block by block."""

import inspect

import pytest
import torch
from torch._dynamo.utils import counters

import lineartime
from lineartime.models.language_model import read_token
from lineartime.ops.state import State

# PyTorch's own, within torch.compile, where a user does not see them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["flash-tiny", pytest.param("transformer++-tiny", marks=pytest.mark.nightly)])
def test_all_blocks_share_one_compilation_and_keep_their_function_and_names(preset: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    sizes = {"n_heads": 2} if preset.startswith("transformer") else {"d_qk": 8, "chunk_size": 16}
    model = lineartime.build(preset, d_model=16, n_blocks=4, vocab_size=30, **sizes)
    ids = torch.randint(0, 30, (2, 41))
    results = []
    names = list(model.state_dict())
    for compiled in (False, True):
        if compiled:
            model.compile_blocks()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)))
    for eager, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, eager, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


def random_packs(count: int) -> list[list[int]]:
    """Boundaries of packs of one document to dozens, of 1 to hundreds of tokens."""
    generator, packs = torch.Generator().manual_seed(0), []
    for _ in range(count):
        lengths = (torch.randn(40, generator=generator) * 1.5 + 3).exp().long().clamp(min=1)
        packs.append([0, *(end for end in lengths.cumsum(0).tolist() if end < 300), 300])
    return packs


PACKS = [[0, 5, 40], [0, 17, 20, 45], [0, 30, 31, 50, 52]]
LONG = [[0, 40, 90], [0, 70, 150, 240], [0, 300, 590], [0, 900, 1800], [0, 2000, 3900]]  # documents of 3 to 125 chunks


@pytest.mark.parametrize(
    ("preset", "packs", "options"),
    [
        pytest.param("flash-tiny", random_packs(12), {"d_qk": 8, "chunk_size": 64}, id="flash"),
        pytest.param("flash-tiny", LONG, {"d_qk": 8, "chunk_size": 16}, id="more chunks", marks=pytest.mark.nightly),
        pytest.param("flash-quad-tiny", PACKS, {"d_qk": 8}, id="flash-quad", marks=pytest.mark.nightly),
        pytest.param("transformer++-tiny", PACKS, {"n_heads": 2}, id="transformer++", marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_block_reads_other_packs_without_a_graph_break_or_compiling_again(
    preset: str, packs: list[list[int]], options: dict[str, int]
) -> None:
    torch._dynamo.reset()
    model = lineartime.build(preset, d_model=16, n_blocks=1, vocab_size=30, **options)
    batches = [(torch.randint(0, 30, (1, ends[-1])), torch.tensor(ends)) for ends in packs]
    expected = [model(ids, cu_seqlens=ends) for ids, ends in batches]
    for block in model.backbone.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for index, ((ids, ends), logits) in enumerate(zip(batches, expected, strict=True)):
        with torch._dynamo.config.patch(error_on_recompile=index > 1):  # the second pack makes lengths dynamic
            torch.testing.assert_close(model(ids, cu_seqlens=ends), logits, atol=1e-5, rtol=0)


def test_compiled_blocks_may_be_compiled_for_every_structure_of_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lineartime.build("transformer++-tiny", d_model=16, n_heads=2, n_blocks=1, vocab_size=30)
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(type(model.backbone.blocks[0]), "compile", lambda _, **options: asked.append(options))
    model.compile_blocks()
    known = "recompile_limit" in inspect.signature(torch.compile).parameters
    assert asked == [{"recompile_limit": 32} if known else {}]


@pytest.mark.slow
def test_a_compiled_step_is_one_compilation_for_all_positions() -> None:
    torch._dynamo.reset()
    counters.clear()
    options = {"d_model": 16, "n_blocks": 1, "vocab_size": 30, "d_qk": 8, "chunk_size": 4, "token_shift": True}
    model = lineartime.build("flash-next-tiny", **options).eval()
    ids = torch.randint(0, 30, (2, 14))
    with torch.no_grad():
        begun = State.concatenate([model.extend(ids[row : row + 1, : 2 + row])[1] for row in range(2)])
        texts = []
        for compiled in (False, True):
            if compiled:
                model.compile_step()
            state, logits = begun.clone(), []
            for tokens in ids[:, :9].T:
                after, state = read_token(model, tokens, state)
                logits.append(after)
            texts.append(torch.stack(logits, 1))
    torch.testing.assert_close(texts[1], texts[0], atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0


@pytest.mark.nightly
def test_compiled_steps_of_models_of_different_widths_keep_their_own_sizes() -> None:
    torch._dynamo.reset()
    for d_model in (16, 32):
        model = lineartime.build("flash-tiny", d_model=d_model, n_blocks=1, vocab_size=30, d_qk=8, chunk_size=4).eval()
        with torch.no_grad():
            expected, _ = read_token(model, torch.zeros(1, dtype=torch.long), model.init_state(1))
            model.compile_step()
            found, _ = read_token(model, torch.zeros(1, dtype=torch.long), model.init_state(1))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
