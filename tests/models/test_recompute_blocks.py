"""Blocks that keep only their input for the backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime.models import LanguageModel, LayerConfig, ModelConfig, build_model

MIXERS = [
    LayerConfig("flash", d_qk=8, chunk_size=8),
    LayerConfig("flash", d_qk=8, chunk_size=8, activation="softmax"),
    LayerConfig("gau", d_qk=8),
    LayerConfig("attention", n_heads=2),
]


def make_model(mixer: LayerConfig, dropout: float = 0.0) -> LanguageModel:
    torch.manual_seed(0)
    return build_model(ModelConfig("clm", 30, 16, 4, mixer, feed_forward=LayerConfig("mlp", expansion=2), dropout=dropout))


def loss_gradients_and_kept_bytes(model: LanguageModel, **options: Any) -> tuple[list[Tensor], int]:
    """The bytes that the graph holds between the passes, parameters aside."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(1)
    ids = torch.randint(0, 30, (2, 65))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.loss(ids[:, :-1], ids[:, 1:], **options)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], sum(kept.values())


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.kind)
def test_gradients_stay_the_same_to_the_bit_with_dropout_and_less_is_kept(mixer: LayerConfig) -> None:
    model = make_model(mixer, dropout=0.3)
    names = list(model.state_dict())
    usual, much = loss_gradients_and_kept_bytes(model)
    model.recompute_blocks()
    recomputed, little = loss_gradients_and_kept_bytes(model)
    for one, other in zip(recomputed, usual, strict=True):
        assert torch.equal(one, other)
    assert list(model.state_dict()) == names
    assert little < much / 3


def test_masks_and_packs_are_recomputed_with_their_blocks() -> None:
    model = make_model(MIXERS[0])
    options = {"mask": torch.arange(64) < torch.tensor([[64], [50]])}
    usual, _ = loss_gradients_and_kept_bytes(model, **options)
    model.recompute_blocks()
    recomputed, _ = loss_gradients_and_kept_bytes(model, **options)
    for one, other in zip(recomputed, usual, strict=True):
        assert torch.equal(one, other)


@pytest.mark.nightly
# PyTorch's own, within torch.compile, where a user does not see them.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_can_be_recomputed() -> None:
    torch._dynamo.reset()
    model = make_model(MIXERS[0])
    usual, much = loss_gradients_and_kept_bytes(model)
    model.recompute_blocks()
    model.compile_blocks()
    recomputed, little = loss_gradients_and_kept_bytes(model)
    for one, other in zip(recomputed, usual, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert little < much / 3
    torch._dynamo.reset()
