"""The optimiser of a run: AdamW, or Muon for the linear maps inside layers and AdamW for the rest; the learning rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lineartime.layers.dense import Dense
from lineartime.layers.residual import ResidualLayer
from lineartime.training.config import TrainConfig
from lineartime.training.muon import Muon
from lineartime.training.schedule import describe_schedule


@dataclass(frozen=True)
class OptimizerPart:
    """An optimiser for some of a model's parameters.

    Attributes:
        name: the name of the algorithm for users.
        rate_name: the name of its learning rate in metrics.jsonl.
        ratio: its learning rate, as a share of the run's.
        optimizer: the optimiser that updates the parameters.
        moments: the names of the tensors that it keeps for each parameter, in the parameter's shape.
    """

    name: str
    rate_name: str
    ratio: float
    optimizer: torch.optim.Optimizer
    moments: tuple[str, ...]


class ModelOptimizer:
    """Updates all parameters of a model, each by one of its parts."""

    def __init__(self, model: nn.Module, *parts: OptimizerPart) -> None:
        self._model = model
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, as in `torch.optim`."""
        return [group for part in self._parts for group in part.optimizer.param_groups]

    def set_learning_rate(self, rate: float) -> dict[str, float]:
        """Set the learning rates of the next step from the run's rate; return them by their names in metrics.jsonl."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = part.ratio * rate
        return {part.rate_name: part.ratio * rate for part in self._parts}

    def step(self) -> None:
        """Update the parameters from their gradients."""
        for part in self._parts:
            part.optimizer.step()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for part in self._parts:
            part.optimizer.zero_grad()

    def moments(self) -> dict[str, Tensor]:
        """The running means that it keeps, by name; complete after the first step."""
        return {
            f"{moment}.{name}": state[moment]
            for part, name, parameter in self._named()
            for state in [part.optimizer.state.get(parameter, {})]
            for moment in part.moments
            if moment in state
        }

    def start_at(self, step: int) -> None:
        """Enter the state after `step` steps, with zero moments into which those of a checkpoint can be loaded."""
        for part, _, parameter in self._named():
            state = part.optimizer.state[parameter] = {moment: torch.zeros_like(parameter) for moment in part.moments}
            if isinstance(part.optimizer, torch.optim.AdamW):
                state["step"] = torch.tensor(float(step), device=parameter.device)

    def summary(self, config: TrainConfig) -> str:
        """One line that states what each part updates, and at which learning rate."""
        texts = []
        for part in self._parts:
            count = sum(parameter.numel() for group in part.optimizer.param_groups for parameter in group["params"])
            texts.append(f"{part.name}: {count:,} parameters, peak learning rate {part.ratio * config.learning_rate:g}")
        return f"{'; '.join(texts)}; {describe_schedule(config)}"

    def _named(self) -> Iterator[tuple[OptimizerPart, str, nn.Parameter]]:
        """Each parameter with its part and its name in the model."""
        owners = {p: part for part in self._parts for group in part.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._model.named_parameters():
            yield owners[parameter], name, parameter


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


def build_optimizer(model: nn.Module, config: TrainConfig) -> ModelOptimizer:
    """Build the optimiser that the options describe. Weight decay applies only to the matrices of the model."""
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adamw":
        return ModelOptimizer(model, _adamw(model, list(model.parameters()), config, "learning_rate", 1.0))
    maps = hidden_maps(model)
    muon = Muon(maps, lr=rate, momentum=config.momentum, weight_decay=decay, bf16=config.precision == "bf16")
    others = [parameter for parameter in model.parameters() if parameter not in maps]
    return ModelOptimizer(
        model,
        OptimizerPart("Muon", "learning_rate", 1.0, muon, ("momentum_buffer",)),
        _adamw(model, others, config, "adamw_learning_rate", config.adamw_ratio),
    )


def _adamw(
    model: nn.Module, parameters: list[nn.Parameter], config: TrainConfig, rate_name: str, ratio: float
) -> OptimizerPart:
    """AdamW for some parameters of a model, in two groups: matrices, and the rest."""
    matrices = {id(parameter) for parameter in matrices_of(model)}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if id(p) in matrices], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
        ],
        lr=ratio * config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=all(p.device.type != "mps" for p in parameters),  # the fused kernels for MPS are untested
    )
    return OptimizerPart("AdamW", rate_name, ratio, adamw, ("exp_avg", "exp_avg_sq"))
