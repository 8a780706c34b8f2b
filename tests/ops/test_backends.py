"""Which implementation runs, and what is said when one cannot."""

import pytest
import torch

import lineartime
from lineartime.ops import backends
from lineartime.ops.backends import choose_backend

ALL = ("torch", "tiled", "triton", "oracle")


def test_processor_takes_the_tiled_form_where_there_is_one_and_other_devices_plain_pytorch() -> None:
    like = torch.empty(1)
    assert choose_backend("auto", ALL, torch.empty(1, device="meta"), torch.float32, "relu2") == "torch"
    assert choose_backend("auto", ALL, like, torch.float32, "relu2") == "tiled"
    assert choose_backend("auto", ALL, like, torch.float32, "softmax") == "torch"
    assert choose_backend("auto", ("torch", "triton"), like, torch.float32, "relu2") == "torch"


def test_gpu_takes_the_kernels_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        device = torch.device("cuda")

    monkeypatch.setattr(backends, "_has_triton", lambda: True)
    choices = [
        choose_backend("auto", ALL, OnGPU(), dtype, activation)  # type: ignore[arg-type]
        for dtype, activation in ((torch.bfloat16, "relu2"), (torch.float64, "relu2"), (torch.float32, "softmax"))
    ]
    assert choices == ["triton", "torch", "torch"]


@pytest.mark.parametrize(
    ("installed", "reason"),
    [(True, "it needs a GPU, and the tensors are on cpu"), (False, "the package triton is not installed")],
)
def test_kernels_that_cannot_run_say_why(installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_has_triton", lambda: installed)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"backend is 'triton', which cannot run here: {reason}; use 'auto' or 'torch'"):
        choose_backend("triton", ALL, torch.empty(1), torch.float32, "relu2")


def test_backend_that_the_op_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="backend is 'tiled', but must be one of 'auto', 'torch'"):
        choose_backend("tiled", ("torch",), torch.empty(1), torch.float32, "relu2")
    with pytest.raises(ValueError, match="backend is 'tiled', which cannot run here: it has no activation 'softmax'"):
        choose_backend("tiled", ALL, torch.empty(1), torch.float32, "softmax")


@pytest.mark.parametrize("name", ["gamma", "beta"])
@pytest.mark.usefixtures("compiler")
def test_weight_on_another_device_is_an_error_and_not_a_result_of_memory_that_nothing_wrote(name: str) -> None:
    """A tensor on the meta device makes PyTorch call the function that only makes the shapes of the results."""
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8)
    mixer = model.backbone.blocks[0].mixer
    setattr(mixer, name, torch.nn.Parameter(getattr(mixer, name).to("meta")))
    with pytest.raises(RuntimeError, match="inputs of an attention or loss are on cpu and meta: move the model and its inputs"):
        model(torch.zeros(1, 300, dtype=torch.long))
