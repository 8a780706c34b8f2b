"""Muon: orthogonalised momentum for the linear maps inside the layers of a network.

For a map W [n, m] with the gradient G and the running mean of gradients M,

    M <- mu M + (1 - mu) G        N = mu M + (1 - mu) G        (Nesterov's momentum)
    W <- (1 - rate * decay) W - rate * 0.2 sqrt(max(n, m)) orthogonal(N)

The factor gives the update a root mean square of about 0.2, like an update of AdamW. `torch.optim.Muon` with
adjust_lr_fn="match_rms_adamw" computes the same, but always in bf16, with one map per matrix, and not for all matrices that
FSDP has sharded.
Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is Scalable for LLM
Training" (arXiv 2502.16982), for the factor and the decay.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

RMS = 0.2
"""The approximate root mean square of an update at a learning rate of 1."""
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""From Jordan et al.: small singular values rise fastest; large ones end between 0.7 and 1.2, close enough to 1."""


def orthogonal(x: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix, U V^T of x = U S V^T [n, m], by Newton-Schulz in the precision of x."""
    a, b, c = COEFFICIENTS
    wide = x.mT if x.shape[0] > x.shape[1] else x  # so that the products x x^T are small
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        squares = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(squares, squares, squares, beta=b, alpha=c), wide, beta=a)
    return wide.mT if x.shape[0] > x.shape[1] else wide


class Muon(torch.optim.Optimizer):
    """Muon for matrices, each of which may hold several maps, stacked by rows. Every map is orthogonalised separately.

    For the update, every process gathers the matrices that FSDP has sharded, one after another; the momentum stays sharded.

    Args:
        maps: the matrices, and the numbers of rows of the maps in each.
        lr: the learning rate.
        momentum: mu.
        weight_decay: the decay, as a share of the weights at a learning rate of 1.
        bf16: whether to orthogonalise updates in bf16 instead of the precision of the weights.
    """

    def __init__(
        self, maps: Mapping[Tensor, Sequence[int]], *, lr: float, momentum: float, weight_decay: float, bf16: bool
    ) -> None:
        super().__init__(list(maps), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._rows = {parameter: list(rows) for parameter, rows in maps.items()}
        self._bf16 = bf16

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: the gradient is there
        """Update the matrices from their gradients."""
        [group] = self.param_groups
        rate, momentum = group["lr"], group["momentum"]
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = self._direction(gradient.lerp(mean, momentum), self._rows[parameter])
            parameter.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)

    def _direction(self, mean: Tensor, rows: list[int]) -> Tensor:
        """The update at a learning rate of 1, sharded like the mean gradient."""
        whole = mean.full_tensor() if isinstance(mean, DTensor) else mean
        scaled = []
        for part in whole.split(rows):
            direction = orthogonal(part.bfloat16() if self._bf16 else part).to(part.dtype)
            scaled.append(direction * (RMS * max(part.shape) ** 0.5))
        update = torch.cat(scaled)
        if isinstance(mean, DTensor):  # every process has the same update, and keeps its own part
            return distribute_tensor(update, mean.device_mesh, mean.placements, src_data_rank=None)
        return update
