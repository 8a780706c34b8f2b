from itertools import pairwise
from typing import Any

import pytest
import torch

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM, presets
from lineartime.models.systems import SYSTEMS

TINY = {"d_model": 16, "n_blocks": 2, "vocab_size": 50}
FLASH = {**TINY, "d_qk": 8, "chunk_size": 8}
# Every mixer is held to the contract of mixers; these differ in what surrounds it.
some_systems = pytest.mark.parametrize("name", ["flash", "transformer", "performer"])


@some_systems
def test_masked_model_looks_both_ways(tiny: Any, name: str) -> None:
    model, ids = tiny(name, "mlm", noise=0.1, vocab_size=50).eval(), torch.randint(0, 50, (1, 30))
    changed = ids.clone()
    changed[:, 29] = (changed[:, 29] + 1) % 50
    assert model(ids).shape == (1, 30, 50)
    assert not torch.equal(model(ids)[:, :29], model(changed)[:, :29])


@some_systems
def test_extend_is_the_forward_pass(tiny: Any, name: str) -> None:
    model, ids = tiny(name, noise=0.1, vocab_size=50).eval(), torch.randint(0, 50, (2, 30))
    state, pieces = None, []
    for start, stop in pairwise([0, 1, 9, 10, 27, 30]):
        logits, state = model.extend(ids[:, start:stop], state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids), atol=1e-5, rtol=0)


@some_systems
def test_padding_and_packing_change_no_logits(tiny: Any, name: str) -> None:
    model, ids = tiny(name, noise=0.1, vocab_size=50).eval(), torch.randint(0, 50, (1, 20))
    mask = torch.arange(20)[None] >= 7
    torch.testing.assert_close(model(ids, mask=mask)[:, 7:], model(ids[:, 7:]), atol=1e-5, rtol=0)
    packed = model(ids, cu_seqlens=torch.tensor([0, 7, 20]))
    torch.testing.assert_close(packed[:, 7:], model(ids[:, 7:]), atol=1e-5, rtol=0)


def test_every_parameter_gets_a_gradient(tiny: Any) -> None:
    for name in {row.mixer: system for system, row in SYSTEMS.items()}.values():
        model = tiny(name, "clm" if f"{name}-tiny" in presets("clm") else "mlm", noise=0.1, vocab_size=50).eval()
        model(torch.randint(0, 50, (2, 19))).square().mean().backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{parameter_name} of {name}"
            assert parameter.grad.any(), f"{parameter_name} of {name}"


def test_weights_start_as_the_paper_says() -> None:
    model = lineartime.build("flash-tiny")
    block = model.backbone.blocks[0].mixer  # type: ignore[index]
    for weight in (model.backbone.embedding.weight, block.to_output.weight, block.to_gate_value_base.weight):
        assert abs(weight.std().item() - 0.02) < 0.001
    assert not block.to_output.bias.any()
    assert not block.beta.any()
    assert model.backbone.position is not None
    assert model.backbone.position.scale.item() == pytest.approx(256**-0.5)


@some_systems
def test_prompts_that_are_padded_on_the_left_are_read_as_each_alone(tiny: Any, name: str) -> None:
    model, ids = tiny(name, noise=0.1, vocab_size=50).eval(), torch.randint(0, 50, (3, 12))
    padded, state = model.extend(ids, mask=torch.arange(12) >= torch.tensor([[5], [0], [11]]))
    more, state = model.extend(ids[:, :4], state)
    assert state.position.tolist() == [11, 16, 5]
    for row, missing in enumerate((5, 0, 11)):
        alone = model(torch.cat([ids[row, missing:], ids[row, :4]])[None])[0]
        torch.testing.assert_close(torch.cat([padded[row, missing:], more[row]]), alone, atol=1e-5, rtol=0)


def test_losses_are_the_cross_entropy_of_the_logits_summed_and_averaged_over_targets(tiny: Any) -> None:
    model = tiny(noise=0.1, vocab_size=50).eval()
    ids = torch.randint(0, 50, (2, 20))
    targets = torch.randint(0, 50, (2, 20)).masked_fill(torch.rand(2, 20) < 0.5, -100)
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.total_loss(ids, targets), expected)
    torch.testing.assert_close(model.loss(ids, targets), expected / (targets != -100).sum())
    assert model.loss(ids, torch.full_like(targets, -100)) == 0
    with pytest.raises(ArgumentError, match=r"targets has shape \[2, 19\], but must have that of ids, \[2, 20\]"):
        model.loss(ids, targets[:, 1:])


OTHER_ENDS = {
    "tie_word_embeddings": False,
    "token_types": 2,
    "embedding_norm": True,
    "norm": "scalenorm",
    "norm_eps": 1e-8,
    "norm_position": "post",
    "final_norm": "layernorm",
}


def test_logits_of_their_own_types_and_norms_at_both_ends_are_the_formula() -> None:
    model = lineartime.build("flash-tiny", "mlm", **FLASH, **OTHER_ENDS).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids, types, targets = (torch.randint(0, size, (2, 9)) for size in (50, 2, 50))
    backbone, head = model.backbone, model.lm_head
    assert head is not None
    x = backbone.embedding(ids) + backbone.token_types.weight[types] + backbone.position(torch.arange(9))
    for layer in (backbone.embedding_norm, *(block.mixer for block in backbone.blocks), backbone.norm):
        x = layer(x)
    logits = x @ head.weight.T + head.bias
    torch.testing.assert_close(model(ids, token_types=types), logits, atol=1e-12, rtol=0)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(ids, targets, token_types=types), loss, atol=1e-12, rtol=0)
    first = torch.zeros_like(types)
    assert torch.equal(model(ids), model(ids, token_types=first))
    assert not torch.allclose(model(ids), model(ids, token_types=first + 1))


def test_stream_of_a_model_with_other_ends_is_its_forward_pass() -> None:
    model = lineartime.build("flash-tiny", **FLASH, **OTHER_ENDS).double().eval()
    ids = torch.randint(0, 50, (2, 21))
    state, pieces = None, []
    for start, stop in pairwise((0, 7, 8, 20)):
        logits, state = model.extend(ids[:, start:stop], state)
        pieces.append(logits)
    pieces.append(model.compile_for_decoding().extend(ids[:, 20], state)[0][:, None])
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids), atol=1e-12, rtol=0)


def test_loss_is_that_of_the_logits_of_an_output_map_with_an_adapter() -> None:
    """The fused loss reads the weights alone, so an adapter would change nothing and learn nothing."""
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8, tie_word_embeddings=False).double()
    assert model.lm_head is not None
    adapter = torch.nn.Linear(16, 258).double()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + adapter(inputs[0]))
    ids, targets = torch.randint(0, 258, (2, 2, 9)).unbind(0)
    targets[0, 3] = -100
    loss = model.total_loss(ids, targets)
    logits = model(ids).flatten(0, 1)
    torch.testing.assert_close(loss.double(), torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"))
    loss.backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False, "token_types": 2}])
def test_model_made_without_memory_is_drawn_as_the_constructor_draws_it(options: dict[str, Any]) -> None:
    def build() -> CausalLM:
        return lineartime.build("flash-tiny", **FLASH, **options)

    built = build()
    with torch.device("meta"):
        drawn = build()
    drawn.to_empty(device="cpu")
    for module in drawn.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, weight in drawn.state_dict().items():
        expected = built.state_dict()[name]
        if expected.std(correction=0) > 0:
            assert weight.std(correction=0) == pytest.approx(
                float(expected.std(correction=0)), rel=4 / weight.numel() ** 0.5
            ), name
        else:
            assert torch.equal(weight, expected), name


def test_offloaded_embedding_cannot_compute_logits() -> None:
    model, hidden = lineartime.build("flash-tiny", **FLASH), torch.randn(1, 3, 16)
    model.backbone.embedding.to("meta")  # as accelerate leaves it after its forward pass
    with pytest.raises(
        LineartimeError, match=r"The token embedding is on meta, .* logits, from vectors on cpu: do not offload"
    ):
        model.logits(hidden)
