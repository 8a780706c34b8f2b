"""Linear attention with similarity 1 + cos(q, k), the first two terms of the exponential's series.

Source: Su, "Exploring linear attention" (2020), https://kexue.fm/archives/7546.

    features(x) = (1, x / |x|), so that features(q).features(k) = 1 + cos(q, k)
"""

import torch.nn.functional as F
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.ops.packing import Packing


class LinearTaylor(KernelAttention):
    """Linear attention with similarity 1 + cos(q, k).

    Its features are (1, x / |x|).
    """

    name = "linear-taylor"

    def features(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h + 1]."""
        # The square of this eps is not zero in float32, so the gradients of empty slots are finite.
        return F.pad(F.normalize(x, dim=-1, eps=1e-6), (1, 0), value=1.0)

    def rotate_features(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Rotate all features except the constant one by their positions."""
        turned = super().rotate_features(q[..., 1:], k[..., 1:], packing)
        return F.pad(turned[0], (1, 0), value=1.0), F.pad(turned[1], (1, 0), value=1.0)
