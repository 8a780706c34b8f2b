"""Linear attention with features elu(x) + 1.

Source: "Transformers are RNNs" (arXiv 2006.16236), eq. 7.

    features(x) = elu(x) + 1
"""

import torch.nn.functional as F
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention


def elu_features(x: Tensor) -> Tensor:
    """The features of queries or keys, [..., h] -> [..., h]."""
    return F.elu(x) + 1


class LinearELU(KernelAttention):
    """Linear attention with features elu + 1."""

    name = "linear-elu"

    def features(self, x: Tensor) -> Tensor:
        return elu_features(x)
