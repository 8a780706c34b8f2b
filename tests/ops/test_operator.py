"""Operators: what their kernels would read wrongly without an error."""

import pytest
import torch

import lineartime


@pytest.mark.parametrize("name", ["gamma", "beta"])
@pytest.mark.usefixtures("compiler")
def test_weight_on_another_device_is_an_error_and_not_a_result_of_memory_that_nothing_wrote(name: str) -> None:
    """A tensor on the meta device makes PyTorch call the function that only makes the shapes of the results."""
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8)
    mixer = model.backbone.blocks[0].mixer
    setattr(mixer, name, torch.nn.Parameter(getattr(mixer, name).to("meta")))
    with pytest.raises(RuntimeError, match="inputs of an attention or loss are on cpu and meta: move the model and its inputs"):
        model(torch.zeros(1, 300, dtype=torch.long))
