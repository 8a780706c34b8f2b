"""Which parameters of a model are matrices, and which of these are linear maps inside its layers.

The shape alone does not tell: the scales of a gated unit are several vectors in one tensor. A module names its own matrices in
two class attributes: `maps`, which multiply vectors or sequences, and `tables`, whose rows are independent vectors.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from lineartime.layers.dense import Dense
from lineartime.layers.residual import ResidualLayer


def matrices_of(model: nn.Module) -> Iterator[Tensor]:
    """All maps and tables: weights of linear layers and embeddings, and what modules name. Only these get weight decay."""
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
