"""Models compute what their parts compute, however texts are padded, packed and cut."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import assert_drawn_alike, kept_bytes
from torch import Tensor

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM, LanguageModel, presets
from lineartime.models.systems import SYSTEMS

FLASH = {"d_model": 16, "n_blocks": 2, "vocab_size": 50, "d_qk": 8, "chunk_size": 8}
OTHER_ENDS = {
    "tie_word_embeddings": False,
    "token_types": 2,
    "embedding_norm": True,
    "norm": "scalenorm",
    "norm_eps": 1e-8,
    "norm_position": "post",
    "final_norm": "layernorm",
}
# Every mixer is held to the contract of mixers; these differ in what surrounds it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash": ("flash", {}),
    "learned positions": ("transformer", {}),
    "performer": ("performer", {}),
    "other ends": ("flash", OTHER_ENDS),
    "flash and gau": ("flash", {"pattern": ("flash", "flash", "flash", "gau"), "n_blocks": 5, "feed_forward": "glu"}),
    "flash and attention": ("flash", {"pattern": ("flash", "attention")}),
    "weighted and gau": ("flash", {"pattern": ("flash-weighted", "gau")}),  # it takes streams at one position, in groups
}
every_model = pytest.mark.parametrize("name", MODELS)


def awake(tiny: Any, name: str, task: str = "clm", **options: Any) -> CausalLM:
    """A model in float64 whose mixers change the logits."""
    system, own = MODELS[name]
    model: CausalLM = tiny(system, task, noise=0.3, **{"vocab_size": 40, **own, **options}).double().eval()
    return model


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@every_model
@torch.no_grad()
def test_padding_packs_the_future_and_cuts_of_streams_change_nothing(tiny: Any, name: str) -> None:
    model, lengths = awake(tiny, name), (30, 9, 21)
    rows = [torch.randint(0, 40, (1, length)) for length in lengths]
    alone = [model(row) for row in rows]
    mask = torch.arange(30) >= 30 - torch.tensor(lengths)[:, None]
    padded = torch.zeros(3, 30, dtype=torch.long).masked_scatter(mask, torch.cat(rows, 1))
    close(model(padded, mask)[mask], torch.cat(alone, 1)[0])
    close(model(torch.cat(rows, 1), cu_seqlens=torch.tensor([0, 30, 39, 60])), torch.cat(alone, 1))
    other = rows[0].clone()
    other[:, 17:] = 39 - other[:, 17:]
    assert torch.equal(model(other)[:, :17], alone[0][:, :17])

    for cut in (1, 8, 13):  # streams at different positions go on together, by several tokens and by one
        _, state = model.extend(padded[:, :cut], None, mask[:, :cut])
        logits, state = model.extend(padded[:, cut:28], state, mask[:, cut:28])
        rest = [one[:, max(0, one.shape[1] - 30 + cut) : -2] for one in alone]
        close(logits[mask[:, cut:28]], torch.cat(rest, 1)[0])
        decoder = model.compile_for_decoding()
        for token in (-2, -1):
            step, state = decoder.extend(padded[:, token], state)
            close(step, torch.cat([one[:, token] for one in alone]))
        assert state.position.tolist() == list(lengths)
    close(model.compile_for_decoding().extend(rows[0][:, 0])[0], alone[0][:, 0])  # a stream begins by one token, too


def test_masked_model_looks_both_ways(tiny: Any) -> None:
    for system in ("flash", "transformer", "performer"):
        model, ids = tiny(system, "mlm", noise=0.1, vocab_size=50).eval(), torch.randint(0, 50, (1, 30))
        changed = ids.clone()
        changed[:, 29] = (changed[:, 29] + 1) % 50
        assert model(ids).shape == (1, 30, 50)
        assert not torch.equal(model(ids)[:, :29], model(changed)[:, :29])


@pytest.mark.parametrize("pattern", [("flash", "flash", "gau"), ("flash-weighted", "gau")])
@pytest.mark.parametrize("feed_forward", [None, "glu"])
def test_model_is_the_composition_of_its_blocks(tiny: Any, pattern: tuple[str, ...], feed_forward: str | None) -> None:
    model = awake(tiny, "flash", pattern=pattern, n_blocks=5, feed_forward=feed_forward)
    backbone, boundaries, ids = model.backbone, torch.tensor([0, 21, 50]), torch.randint(0, 40, (1, 50))
    x = backbone.embedding(ids) + backbone.position(torch.cat([torch.arange(21), torch.arange(29)]))  # type: ignore[misc]
    for place, block in enumerate(backbone.blocks):
        x = block.feed_forward(block.mixer(x, cu_seqlens=boundaries))
        assert block.mixer.name == pattern[place % len(pattern)]
        assert (type(block.feed_forward) is torch.nn.Identity) == (feed_forward is None)
    close(model(ids, cu_seqlens=boundaries), model.logits(backbone.norm(x)))


def test_logits_of_their_own_types_and_norms_at_both_ends_are_the_formula(tiny: Any) -> None:
    model = awake(tiny, "other ends", "mlm")
    ids, types, targets = (torch.randint(0, size, (2, 9)) for size in (40, 2, 40))
    backbone, head = model.backbone, model.lm_head
    assert head is not None
    x = backbone.embedding(ids) + backbone.token_types.weight[types] + backbone.position(torch.arange(9))  # type: ignore
    for layer in (backbone.embedding_norm, *(block.mixer for block in backbone.blocks), backbone.norm):
        x = layer(x)
    logits = x @ head.weight.T + head.bias
    close(model(ids, token_types=types), logits, 1e-12)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(model.loss(ids, targets, token_types=types), loss, 1e-12)
    first = torch.zeros_like(types)
    assert torch.equal(model(ids), model(ids, token_types=first))
    assert not torch.allclose(model(ids), model(ids, token_types=first + 1))


def test_padding_on_the_right_needs_no_learned_positions(tiny: Any) -> None:
    model, ids = awake(tiny, "learned positions", max_positions=8), torch.randint(0, 40, (1, 8))
    close(model(F.pad(ids, (0, 2)), torch.arange(10)[None] < 8)[:, :8], model(ids))


# Parts ----------------------------------------------------------------------------------------------------------------


def test_weights_start_as_the_paper_says() -> None:
    model = lineartime.build("flash-tiny")
    block: Any = next(iter(model.backbone.blocks)).mixer
    for weight in (model.backbone.embedding.weight, block.to_output.weight, block.to_gate_value_base.weight):
        assert abs(weight.std().item() - 0.02) < 0.001
    assert not block.to_output.bias.any()
    assert not block.beta.any()
    assert model.backbone.position is not None
    assert model.backbone.position.scale.item() == pytest.approx(256**-0.5)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False, "token_types": 2}])
def test_model_made_without_memory_is_drawn_as_the_constructor_draws_it(options: dict[str, Any]) -> None:
    built = lineartime.build("flash-tiny", **FLASH, **options)
    with torch.device("meta"):
        drawn = lineartime.build("flash-tiny", **FLASH, **options)
    drawn.to_empty(device="cpu")
    for module in drawn.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_drawn_alike(drawn.state_dict(), built.state_dict())


# Losses and gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_are_the_cross_entropy_of_the_logits_summed_and_averaged_over_targets(tiny: Any, recompute: bool) -> None:
    model = tiny(task="prefix-lm", noise=0.1, vocab_size=50)
    if recompute:
        model.recompute_blocks()
    ids, mask, lengths = torch.randint(0, 50, (2, 19)), torch.arange(19) >= torch.tensor([[0], [4]]), torch.tensor([9, 2])
    targets = ids.roll(-1, 1).masked_fill(torch.rand(2, 19) < 0.5, -100)
    logits = model(ids, mask, None, lengths)
    assert not torch.allclose(logits, model(ids, mask))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.total_loss(ids, targets, mask=mask, prefix_lengths=lengths), expected)
    loss = model.loss(ids, targets, mask=mask, prefix_lengths=lengths)
    torch.testing.assert_close(loss, expected / (targets != -100).sum())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.loss(ids, torch.full_like(targets, -100)) == 0
    with pytest.raises(ArgumentError, match=r"targets has shape \[2, 18\], but must have that of ids, \[2, 19\]"):
        model.loss(ids, targets[:, 1:])


def test_every_parameter_gets_a_gradient(tiny: Any) -> None:
    for name in (*{row.mixer: system for system, row in SYSTEMS.items()}.values(), "hybrid-gau", "transformer", "flash-memory"):
        task, blocks = "clm" if f"{name}-tiny" in presets() else "mlm", len(SYSTEMS[name].fields.get("pattern", "12"))
        model = tiny(name, task, noise=0.1, vocab_size=50, n_blocks=blocks).eval()
        model(torch.randint(0, 50, (2, 19))).square().mean().backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{parameter_name} of {name}"
            assert parameter.grad.any(), f"{parameter_name} of {name}"


def test_loss_is_that_of_the_logits_of_an_output_map_with_an_adapter() -> None:
    """The fused loss reads the weights alone, so an adapter would change nothing and learn nothing."""
    model = lineartime.build("flash-tiny", **FLASH, tie_word_embeddings=False).double()
    adapter, head = torch.nn.Linear(16, 50).double(), model.lm_head
    assert head is not None
    head.register_forward_hook(lambda module, inputs, output: output + adapter(inputs[0]))
    ids, targets = torch.randint(0, 50, (2, 2, 9)).unbind(0)
    targets[0, 3] = -100
    loss = model.total_loss(ids, targets)
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected)
    loss.backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.abs().sum() > 0


def test_offloaded_embedding_cannot_compute_logits() -> None:
    model, hidden = lineartime.build("flash-tiny", **FLASH), torch.randn(1, 3, 16)
    model.backbone.embedding.to("meta")  # as accelerate leaves it after its forward pass
    with pytest.raises(
        LineartimeError, match=r"The token embedding is on meta, .* logits, from vectors on cpu: do not offload"
    ):
        model.logits(hidden)


# Blocks that keep only their input for the backward pass --------------------------------------------------------------


def loss_gradients_and_kept_bytes(model: LanguageModel, **options: Any) -> tuple[list[Tensor], int]:
    """The bytes that the graph holds between the passes, parameters aside."""
    torch.manual_seed(1)
    ids = torch.randint(0, 30, (2, 65))
    loss, kept = kept_bytes(lambda: model.loss(ids[:, :-1], ids[:, 1:], **options), but=model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], kept


@pytest.mark.parametrize(
    ("system", "mixer"), [("flash", {}), ("flash", {"activation": "softmax"}), ("flash-quad", {}), ("transformer++", {})]
)
def test_recomputed_gradients_stay_the_same_to_the_bit_with_dropout_and_less_is_kept(
    tiny: Any, system: str, mixer: Any
) -> None:
    model = tiny(system, n_blocks=4, feed_forward="mlp", dropout=0.3, vocab_size=30, **mixer)
    masked = {"mask": torch.arange(64) < torch.tensor([[64], [50]])}
    names, (usual, much) = list(model.state_dict()), loss_gradients_and_kept_bytes(model)
    usual_masked, _ = loss_gradients_and_kept_bytes(model, **masked)
    model.recompute_blocks()
    recomputed, little = loss_gradients_and_kept_bytes(model)
    recomputed_masked, _ = loss_gradients_and_kept_bytes(model, **masked)
    for one, other in zip((*recomputed, *recomputed_masked), (*usual, *usual_masked), strict=True):
        assert torch.equal(one, other)
    assert list(model.state_dict()) == names
    assert little < much / 3


@pytest.mark.nightly
# PyTorch's own, within torch.compile, where a user does not see them.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_can_be_recomputed(tiny: Any) -> None:
    torch._dynamo.reset()
    model = tiny(n_blocks=4, feed_forward="mlp", vocab_size=30)
    usual, much = loss_gradients_and_kept_bytes(model)
    model.recompute_blocks()
    model.compile_blocks()
    recomputed, little = loss_gradients_and_kept_bytes(model)
    torch.testing.assert_close(recomputed, usual, atol=1e-5, rtol=1e-4)
    assert little < much / 3
    torch._dynamo.reset()
