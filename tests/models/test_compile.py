"""Layers, blocks, models and steps of decoding by torch.compile."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.definitions import assert_same_with_gradients
from torch import Tensor
from torch._dynamo.utils import counters

import lineartime
from lineartime.layers import FLASH, GAU, set_backend
from lineartime.models import CausalLM
from lineartime.models.language_model import read_token
from lineartime.native import why_not_native
from lineartime.ops import mixed_chunk
from lineartime.ops.state import State

# PyTorch's own, within torch.compile, where a user does not see them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
nightly = pytest.mark.nightly


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small(preset: str, **options: Any) -> CausalLM:
    sizes = {"n_heads": 2} if preset.startswith(("transformer", "performer")) else {"d_qk": 8}
    model: CausalLM = lineartime.build(preset, **{"d_model": 16, "n_blocks": 1, "vocab_size": 30, **sizes, **options}).eval()
    return model


# Layers ---------------------------------------------------------------------------------------------------------------

LAYERS: dict[str, Any] = {
    "flash with a token shift": lambda: FLASH(16, d_qk=8, chunk_size=16, causal=True, token_shift=True),
    "gau": lambda: GAU(16, d_qk=8, causal=True),
    "gau with a table": lambda: GAU(16, d_qk=8, max_length=36),  # shorter than the packs
}
PACKS = [[0, 5, 40], [0, 17, 20, 45], [0, 0, 30, 31, 52], [0, 35, 70, 75]]


def read(layer: Any, x: Tensor, *rest: Any, vary: dict[int, list[int]] | None = None) -> tuple[Tensor, Tensor]:
    """The outputs, and the gradient of the sum of their squares; `vary` are the dimensions of arguments that will change."""
    x = x.detach().requires_grad_()
    for argument, dimensions in (vary or {}).items():
        torch._dynamo.maybe_mark_dynamic([x, *rest][argument], dimensions)
    out = layer(x, *rest)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out, gradient


@nightly
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layer_reads_other_packs_without_a_graph_break_or_compiling_again(name: str, masked: bool) -> None:
    layer, reference = LAYERS[name]().double(), LAYERS[name]().double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    reference.load_state_dict(layer.state_dict())
    set_backend(reference, "oracle")
    for index, ends in enumerate(PACKS):
        x, cu_seqlens = torch.randn(1, ends[-1], 16, dtype=torch.float64), torch.tensor(ends)
        mask = torch.rand(1, ends[-1]) > 0.4 * (1 + index // 2) if masked else None  # at last, all of it is padding
        # FLASH compiles once more at the second pack, where the number of chunks passes a power of two.
        with torch._dynamo.config.patch(error_on_recompile=index > int("flash" in name)):
            fast = read(compiled, x, mask, cu_seqlens, vary={0: [1], 2: [0], **({1: [1]} if masked else {})})
        torch.testing.assert_close(fast, read(reference, x, mask, cu_seqlens), atol=1e-9, rtol=0)
    with pytest.raises(RuntimeError, match="cu_seqlens must be nondecreasing from 0 to the number of tokens of the row"):
        compiled(torch.randn(1, 50, 16, dtype=torch.float64), None, torch.tensor([0, 30, 20, 50]))
    if not masked and name == "gau with a table":
        with pytest.raises(RuntimeError, match=r"max_length is 36, .* but a sequence has more tokens"):
            compiled(torch.randn(1, 50, 16, dtype=torch.float64), None, torch.tensor([0, 40, 45, 50]))


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"normalization": "paper"}, {"activation": "softmax"}, {"max_length": 25}],  # its longest document
    ids=str,
)
@pytest.mark.parametrize("prefixes", [False, True])
def test_compiled_pack_of_a_gau_has_the_scores_of_one_row(options: dict[str, Any], prefixes: bool) -> None:
    layer, sizes = GAU(16, d_qk=8, **{"causal": prefixes, **options}).double(), list[int]()

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made = (node.meta.get("example_value") for node in graph.graph.nodes)
        sizes.extend(value.numel() for value in made if isinstance(value, Tensor))
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=compiler)
    mask, ends = torch.arange(60)[None] % 7 > 0, torch.tensor([0, 0, 12, 31, 60])
    arguments = torch.randn(1, 60, 16, dtype=torch.float64), mask, ends, torch.tensor([0, 3, 16, 0]) if prefixes else None
    torch.testing.assert_close(read(compiled, *arguments), read(layer, *arguments), atol=1e-12, rtol=0)
    assert max(sizes) <= 2 * 60 * 60


@nightly
@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("name", ["flash with a token shift", "gau"])
def test_compiled_layer_reads_other_masks_and_prefixes_without_compiling_again(name: str, prefixes: bool) -> None:
    layer = LAYERS[name]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for index, (batch, length) in enumerate([(2, 40), (3, 45), (4, 52)]):
        x, mask = torch.randn(batch, length, 16), (torch.rand(batch, length) > 0.4).long()
        rest, vary = ((None, mask.sum(1) // 2), {0: [0, 1], 1: [0, 1], 3: [0]}) if prefixes else ((), {0: [0, 1], 1: [0, 1]})
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            fast = read(compiled, x, mask, *rest, vary=vary)
        torch.testing.assert_close(fast, read(layer, x, mask.bool(), *rest), atol=1e-5, rtol=0)
    with pytest.raises(RuntimeError, match="mask has values other than 0 and 1"):
        compiled(torch.randn(2, 41, 16), 2 * torch.ones(2, 41, dtype=torch.long))


@pytest.mark.parametrize("causal", [pytest.param(False, marks=nightly), True])
@torch.no_grad()
def test_compiled_flash_reads_other_lengths_without_compiling_again(causal: bool) -> None:
    layer = FLASH(16, d_qk=8, chunk_size=16, causal=causal)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for index, (batch, length) in enumerate([(2, 40), (3, 48), (4, 33), (5, 64)]):  # whole chunks, and others; two, and more
        x = torch.randn(batch, length, 16)
        torch._dynamo.maybe_mark_dynamic(x, [0, 1])
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=0)


COMPILED: dict[str, Any] = {
    "flash": lambda **options: FLASH(16, chunk_size=16, **options),
    "gau": lambda **options: GAU(16, **options),
    "gau that norms otherwise": lambda **options: GAU(16, **options),
    "gau by rmsnorm": lambda **options: GAU(16, norm="rmsnorm", **options),
    "flash by scalenorm": lambda **options: FLASH(16, chunk_size=16, norm="scalenorm", **options),
    "flash with a token shift": lambda **options: FLASH(16, chunk_size=16, token_shift=True, **options),
    "gau with a hook": lambda **options: GAU(16, **options),
    "gau with a hook on its norm": lambda **options: GAU(16, **options),
}


@pytest.mark.parametrize("name", [*list(COMPILED)[:3], *(pytest.param(name, marks=nightly) for name in list(COMPILED)[3:])])
def test_compiled_training_of_plain_attention_has_the_values_and_gradients_of_eager_code(name: str) -> None:
    """Compiled, the norm is a part of the projection, and the sums over chunks are products, but not where a hook is called."""
    layer = COMPILED[name](d_qk=8, causal=True, dtype=torch.float64)
    set_backend(layer, "torch")
    if name.endswith("hook"):
        layer.to_gate_value_base.register_forward_hook(lambda module, inputs, out: 2 * out)
    if name.endswith("norm") and "hook" in name:
        layer.norm.register_forward_hook(lambda module, inputs, out: 2 * out)
    if name.endswith("otherwise"):
        layer.before = lambda x: 2 * x
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    assert_same_with_gradients(compiled(x), layer(x), [x, *layer.parameters()], atol=1e-10, rtol=1e-10)


@nightly
@pytest.mark.parametrize("most", [1, 3])
def test_compiled_training_of_rows_of_more_chunks_adds_their_sums_in_linear_time(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has three chunks: a product with ones, whose time is quadratic, has 3 * 3 of them where it is used."""
    monkeypatch.setattr(mixed_chunk, "MOST_SUMS", most)
    layer, sizes = FLASH(16, d_qk=8, chunk_size=16, causal=True, dtype=torch.float64), list[tuple[int, ...]]()
    set_backend(layer, "torch")

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        sizes.extend(tuple(node.meta["example_value"].shape) for node in graph.graph.nodes if node.target == "tril")
        return graph

    x = torch.randn(2, 40, 16, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=compiler)
    torch.testing.assert_close(read(compiled, x), read(layer, x), atol=1e-12, rtol=0)
    assert sizes == [(3, 3)] * (most >= 3)


# Blocks and models ----------------------------------------------------------------------------------------------------


@nightly
@pytest.mark.parametrize("preset", ["flash-tiny", "transformer++-tiny"])
def test_all_blocks_share_one_compilation_and_keep_their_function_and_names(preset: str) -> None:
    model, ids = small(preset, n_blocks=4), torch.randint(0, 30, (2, 41))
    expected, names = model.loss(ids[:, :-1], ids[:, 1:]), list(model.state_dict())
    model.compile_blocks()
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert_same_with_gradients(loss, expected, list(model.parameters()), atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(model.state_dict()) == names


def random_packs(count: int) -> list[list[int]]:
    """Boundaries of packs of one document to dozens, of 1 to hundreds of tokens."""
    generator, packs = torch.Generator().manual_seed(0), []
    for _ in range(count):
        lengths = (torch.randn(40, generator=generator) * 1.5 + 3).exp().long().clamp(min=1)
        packs.append([0, *(end for end in lengths.cumsum(0).tolist() if end < 300), 300])
    return packs


LONG = [[0, 40, 90], [0, 70, 150, 240], [0, 300, 590], [0, 900, 1800], [0, 2000, 3900]]  # documents of 3 to 125 chunks


@pytest.mark.parametrize(
    ("preset", "packs", "options"),
    [
        pytest.param("flash-tiny", random_packs(12), {"chunk_size": 64}, id="flash"),
        pytest.param("flash-tiny", LONG, {"chunk_size": 16}, id="more chunks", marks=nightly),
        pytest.param("flash-quad-tiny", PACKS, {}, id="flash-quad", marks=nightly),
        pytest.param("transformer++-tiny", PACKS[:2], {}, id="transformer++", marks=nightly),
    ],
)
@pytest.mark.skipif(why_not_native() is not None, reason="tiles need functions in C++")
def test_compiled_block_reads_other_packs_without_a_graph_break_or_compiling_again(
    preset: str, packs: list[list[int]], options: dict[str, int]
) -> None:
    model = small(preset, **options)
    batches = [(torch.randint(0, 30, (1, ends[-1])), torch.tensor(ends)) for ends in packs]
    expected = [model(ids, cu_seqlens=ends) for ids, ends in batches]
    for block in model.backbone.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for index, ((ids, ends), logits) in enumerate(zip(batches, expected, strict=True)):
        with torch._dynamo.config.patch(error_on_recompile=index > 1):  # the second pack makes lengths dynamic
            torch.testing.assert_close(model(ids, cu_seqlens=ends), logits, atol=1e-5, rtol=0)


def test_compiled_blocks_may_be_compiled_for_every_structure_of_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = small("transformer++-tiny"), list[dict[str, int]]()
    monkeypatch.setattr(type(model.backbone.blocks[0]), "compile", lambda _, **options: asked.append(options))  # type: ignore[index]
    model.compile_blocks()
    known = "recompile_limit" in inspect.signature(torch.compile).parameters
    assert asked == [{"recompile_limit": 32} if known else {}]


# Steps of decoding ----------------------------------------------------------------------------------------------------


def texts_with_and_without(model: CausalLM, begun: State, ids: Tensor) -> list[Tensor]:
    """The logits of a text, read token by token with PyTorch, then with its compiler."""
    texts = []
    for compiled in (False, True):
        if compiled:
            model.compile_step()
        state: Any = begun.clone()
        logits = []
        for tokens in ids.T:
            after, state = read_token(model, tokens, state)
            logits.append(after)
        texts.append(torch.stack(logits, 1))
    return texts


@nightly
@torch.no_grad()
def test_compiled_step_is_one_compilation_for_all_positions() -> None:
    model, ids = small("flash-next-tiny", chunk_size=4, token_shift=True), torch.randint(0, 30, (2, 9))
    begun = State.concatenate([model.extend(ids[row : row + 1, : 2 + row])[1] for row in range(2)])
    plain, compiled = texts_with_and_without(model, begun, ids)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0


@nightly
@torch.no_grad()
def test_compiled_steps_of_models_of_different_widths_keep_their_own_sizes() -> None:
    for d_model in (16, 32):
        model = small("flash-tiny", d_model=d_model, chunk_size=4)
        plain, compiled = texts_with_and_without(model, model.init_state(1), torch.zeros(1, 1, dtype=torch.long))
        torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("rotated", ["inputs", "features"])
@torch.no_grad()
def test_step_of_linear_attention_compiles_as_one_graph(rotated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, fullgraph: compiler(step, fullgraph=fullgraph, backend="aot_eager"))
    model, ids = small("performer-tiny", rotated=rotated).double(), torch.randint(0, 30, (2, 9))
    _, compiled = texts_with_and_without(model, model.extend(ids[:, :5])[1], ids[:, 5:])
    torch.testing.assert_close(compiled, model(ids)[:, 5:], atol=1e-12, rtol=1e-9)


def test_compiled_step_is_neither_copied_nor_made_without_a_constant_state() -> None:
    growing = small("flash-quad-tiny")
    growing.compile_step()
    assert growing.compiled_step is None
    model = small("flash-tiny", chunk_size=4)
    model.compile_step()
    other = pickle.loads(pickle.dumps(model))
    assert other.compiled_step is copy.deepcopy(model).compiled_step is None
    assert model.compiled_step is not None
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
