"""The optimiser of a run: AdamW, or Muon for the linear maps inside layers and AdamW for the rest.

Muon orthogonalises the momentum of linear maps. For a map W [n, m] with the gradient G and the running mean of gradients M,

    M <- mu M + (1 - mu) G        N = mu M + (1 - mu) G        (Nesterov's momentum)
    W <- (1 - rate * decay) W - rate * 0.2 sqrt(max(n, m)) orthogonal(N)

The factor gives the update a root mean square of about 0.2, like an update of AdamW. `torch.optim.Muon` with
adjust_lr_fn="match_rms_adamw" computes the same, but always in bf16, with one map per matrix, and not for all matrices that
FSDP has sharded.
Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is Scalable for LLM
Training" (arXiv 2502.16982), for the factor and the decay.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lineartime.layers.dense import Dense
from lineartime.layers.residual import ResidualLayer
from lineartime.training.config import TrainConfig

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
    `maps` holds the matrices, and the numbers of rows of the maps in each. `bf16` orthogonalises updates in bf16 instead of the
    precision of the weights.
    """

    def __init__(
        self, maps: Mapping[Tensor, Sequence[int]], *, lr: float, momentum: float, weight_decay: float, bf16: bool
    ) -> None:
        super().__init__(list(maps), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ratio": 1.0})
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
        for of_map in whole.split(rows):
            direction = orthogonal(of_map.bfloat16() if self._bf16 else of_map).to(of_map.dtype)
            scaled.append(direction * (RMS * max(of_map.shape) ** 0.5))
        update = torch.cat(scaled)
        if isinstance(mean, DTensor):  # every process has the same update, and keeps its own part
            return distribute_tensor(update, mean.device_mesh, mean.placements, src_data_rank=None)
        return update


class ModelOptimizer:
    """Updates all parameters of a model, each by one of the `optimizers`.

    Each group of parameters has `ratio`, its share of the learning rate of the run.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimisers, as in `torch.optim`."""
        return [group for each in self._optimizers for group in each.param_groups]

    def set_learning_rate(self, rate: float) -> dict[str, float]:
        """Set the learning rates of the next step from the run's rate; return them by their names in metrics.jsonl."""
        for group in self.param_groups:
            group["lr"] = group["ratio"] * rate
        rates = [each.param_groups[0]["lr"] for each in self._optimizers]
        return dict(zip(("learning_rate", "adamw_learning_rate"), rates, strict=False))

    def step(self) -> None:
        """Update the parameters from their gradients."""
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for each in self._optimizers:
            each.zero_grad()

    def moments(self) -> dict[str, Tensor]:
        """The running means that it keeps, by name, in the shapes of the parameters; complete after the first step."""
        return {
            f"{moment}.{name}": value
            for optimizer, name, parameter in self._named()
            for moment, value in optimizer.state.get(parameter, {}).items()
            if moment != "step"
        }

    def start_at(self, step: int) -> None:
        """Enter the state after `step` steps, with zero moments into which those of a checkpoint can be loaded."""
        for optimizer, _, parameter in self._named():
            if isinstance(optimizer, Muon):
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
            else:
                moments = {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **moments}

    def _named(self) -> Iterator[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
        """Each parameter with its optimiser and its name in the model."""
        owners = {p: each for each in self._optimizers for group in each.param_groups for p in group["params"]}
        for name, parameter in self._model.named_parameters():
            yield owners[parameter], name, parameter


def build_optimizer(model: nn.Module, config: TrainConfig) -> ModelOptimizer:
    """Build the optimiser that the options describe. Weight decay applies only to the matrices of the model."""
    rate, decay = config.learning_rate, config.weight_decay
    maps = hidden_maps(model) if config.optimizer == "muon" else {}
    others = [parameter for parameter in model.parameters() if parameter not in maps]
    matrices = {id(parameter) for parameter in matrices_of(model)}
    ratio = config.adamw_ratio if config.optimizer == "muon" else 1.0
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if id(p) in matrices], "weight_decay": decay, "ratio": ratio},
            {"params": [p for p in others if id(p) not in matrices], "weight_decay": 0.0, "ratio": ratio},
        ],
        lr=ratio * rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=all(p.device.type != "mps" for p in others),  # the fused kernels for MPS are untested
    )
    if config.optimizer == "adamw":
        return ModelOptimizer(model, adamw)
    muon = Muon(maps, lr=rate, momentum=config.momentum, weight_decay=decay, bf16=config.precision == "bf16")
    return ModelOptimizer(model, muon, adamw)


def matrices_of(model: nn.Module) -> Iterator[Tensor]:
    """All maps and tables: weights of linear layers and embeddings, and what modules name. Only these get weight decay.

    The shape alone does not tell: the scales of a gated unit are several vectors in one tensor. A module names its own matrices
    in two class attributes: `maps`, which multiply vectors or sequences, and `tables`, whose rows are independent vectors.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            yield module.weight
        for name in (*getattr(module, "maps", ()), *getattr(module, "tables", ())):
            yield module.get_parameter(name)


def hidden_maps(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The matrices of linear maps inside layers, each with the numbers of rows of its maps.

    Embeddings and the output layer are not included. One matrix can hold several maps, such as those to queries, keys and
    values. Maps of more than two dimensions are left out.
    """
    found: dict[Tensor, tuple[int, ...]] = {}
    for layer in model.modules():
        if not isinstance(layer, ResidualLayer):
            continue
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                found[module.weight] = module.widths if isinstance(module, Dense) else (module.out_features,)
            for name in getattr(module, "maps", ()):
                parameter = module.get_parameter(name)
                found[parameter] = (len(parameter),)
    return {parameter: rows for parameter, rows in found.items() if parameter.dim() == 2}
