"""Which parameters of a model are matrices: maps of vectors, or tables of vectors. Only these are decayed."""

from collections.abc import Iterator

from torch import Tensor, nn


def matrices_of(model: nn.Module) -> Iterator[Tensor]:
    """The weights of linear maps and embeddings, and the parameters that a module names in a class attribute `matrices`.

    The shape does not tell: the scales of a gated unit are several vectors in one tensor.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            yield module.weight
        for name in getattr(module, "matrices", ()):
            yield module.get_parameter(name)
