"""Layers with the options that only checkpoints of other packages need; the core does not know them.

Importing this module adds their activations to those of `lineartime.ops`.
"""

import math
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.dense import FactoryOptions
from lineartime.layers.flash import FLASH, GAU, PUBLISHED_LENGTH
from lineartime.layers.positions import RelativeBias
from lineartime.layers.residual import ResidualLayer
from lineartime.ops.activations import FUNCTIONS, NORMALIZATIONS, SOFTMAXES
from lineartime.ops.mixed_chunk import Scales
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing

ForeignActivation = Literal["relu2", "softmax", "softmax_plus", "laplace"]
BiasForm = Literal["auto", "buckets"]
NormPosition = Literal["pre", "post"]
_LAPLACE_MEAN = math.sqrt(1 / 2)
_LAPLACE_DEVIATION = math.sqrt(1 / (4 * math.pi))
_SOFTMAX_PLUS_LENGTH = 512
"""The number of visible keys at which "softmax_plus" is a softmax: the length that GAU-alpha was trained with."""
N_BUCKETS, FARTHEST_BUCKET = 32, 128
"""As in T5: the number of buckets, and the distance from which on all keys share one bucket."""


def laplace(scores: Tensor) -> Tensor:
    """The Laplace attention function of Mega (arXiv 2209.10655, eq. 16): a bounded alternative to relu2."""
    return 0.5 * (1 + torch.erf((scores - _LAPLACE_MEAN) / (_LAPLACE_DEVIATION * math.sqrt(2))))


def softmax_plus_factor(count: Tensor) -> Tensor:
    """The factor of the scores of GAU-alpha's softmax, which grows with the number of visible keys."""
    return count.log() / math.log(_SOFTMAX_PLUS_LENGTH)


FUNCTIONS["laplace"] = laplace
SOFTMAXES["softmax_plus"] = softmax_plus_factor


class BucketBias(RelativeBias):
    """A learned relative bias of any length by buckets of distances, as in T5: see `distance_buckets`."""

    def __init__(self, causal: bool, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.causal = causal
        self.values = nn.Parameter(torch.empty(N_BUCKETS, **factory))
        self.reset_parameters()

    def forward(self, n: int, packing: Packing | None = None) -> Tensor:
        """The values for the distances 1 - n, ..., n - 1, [2 n - 1]."""

        def buckets() -> Tensor:
            offsets = torch.arange(max(0, 2 * n - 1), device=self.values.device) + (1 - n)
            return distance_buckets(offsets, self.causal)[:, None] == torch.arange(N_BUCKETS, device=self.values.device)

        # By no index: on a GPU, the gradient of indexing is summed in a different order at each call.
        chosen = buckets() if packing is None else packing.shared(("buckets", self.causal, n), buckets)
        return torch.where(chosen, self.values.to(acc_dtype(self.values)), 0).sum(-1)


def distance_buckets(offsets: Tensor, causal: bool) -> Tensor:
    """The bucket of each offset j - t, int64, as in T5 (arXiv 1910.10683): one for each near distance, then logarithmic.

    If causal, all buckets are for earlier keys, and later keys share the bucket of the token itself. Otherwise, half of the
    buckets are for later keys.
    """
    buckets = N_BUCKETS if causal else N_BUCKETS // 2
    near = buckets // 2
    distance = (-offsets).clamp(min=0) if causal else offsets.abs()
    # The 1e-3 decides at powers of two, where rounding could go either way; no other distance is within 1e-2 of a border.
    octaves = (distance.clamp(min=1).float() / near).log() / math.log(FARTHEST_BUCKET / near)
    far = (near + (octaves * (buckets - near) + 1e-3).long()).clamp(max=buckets - 1)
    bucket = torch.where(distance < near, distance, far)
    return bucket if causal else bucket + (offsets > 0) * buckets


class ForeignUnit(GAU):
    """A gated unit with the options of other packages, the first of the two bases of a layer.

    Args:
        activation: the activation of the scores: also "softmax_plus", the softmax of GAU-alpha, or "laplace", that of Mega.
        bias_form: the form of the relative bias: "auto", that of the layer; or "buckets", which has one value for each of T5's
            32 buckets of distances, for any length.
        rotary_width: the number of the s features of queries and keys that are rotated, half of them in each half of s; None
            for all.
        **options: the options of the layer.
    """

    activations: ClassVar[tuple[str, ...]] = get_args(ForeignActivation)
    bias: RelativeBias | None

    def __init__(
        self,
        d_model: int,
        *,
        activation: ForeignActivation = "relu2",
        bias_form: BiasForm = "auto",
        rotary_width: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, activation=activation, **options)  # type: ignore[arg-type]  # the core lists fewer
        check_choice("bias_form", bias_form, get_args(BiasForm))
        if rotary_width is not None and (rotary_width % 2 or not 2 <= rotary_width <= self.d_qk):
            allowed = f"an even number from 2 to {self.d_qk}, or None for all"
            raise ArgumentError("rotary_width", f"is {rotary_width}, but must be {allowed}.")
        self.bias_form: BiasForm = bias_form
        self.rotary_width, self.rotated_width = rotary_width, (rotary_width or self.d_qk) if self.rope else 0
        if bias_form == "buckets" and self.bias is not None:
            self.bias = BucketBias(self.causal, device=self.gamma.device, dtype=self.gamma.dtype)


class ForeignFLASH(ForeignUnit, FLASH):
    """FLASH with the options of `ForeignUnit`, such as that of FLASH-pytorch."""

    name = "flash-foreign"


class ForeignGAU(ForeignUnit):
    """GAU with the options of `ForeignUnit`, such as that of GAU-alpha.

    Args:
        normalization: also "paper_bias", the relu((q.k + bias) / n)^2 of FLASH-pytorch, which divides the bias, too; and
            "constant", the relu(q.k / max_length + bias)^2 of FLASHQuad_pytorch for documents of any length, causal or not.
        **options: the options of `GAU` and `ForeignUnit`.
    """

    name = "gau-foreign"
    normalizations: ClassVar[tuple[str, ...]] = (*NORMALIZATIONS, "paper_bias", "constant")

    def __init__(
        self,
        d_model: int,
        *,
        normalization: Literal["count", "paper", "paper_bias", "constant"] = "count",
        **options: Any,
    ) -> None:
        super().__init__(d_model, normalization=normalization, **options)

    def scales(self) -> Scales:
        """The divisors of its attention, which may be those of the bias, too."""
        scales, normalization = super().scales(), str(self.normalization)
        if self.activation in SOFTMAXES:
            return scales
        if normalization == "constant":
            return scales._replace(score=1 / (self.max_length or PUBLISHED_LENGTH))
        return scales._replace(of_bias=normalization == "paper_bias")


class PostNorm(ResidualLayer):
    """The norm after the residual, norm(x + dropout(f(x))), for layers whose input is already normalised."""

    def before(self, x: Tensor) -> Tensor:
        """The input of f: x."""
        return x

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        """The output of the layer, given the output of f."""
        normed: Tensor = self.norm(super().after(x, out))
        return normed


_POST_NORM: dict[type[ResidualLayer], type[ResidualLayer]] = {}


def post_norm(layer: type[ResidualLayer]) -> type[ResidualLayer]:
    """The class of the same layer with a norm after its residual: the same one at each call."""
    if layer not in _POST_NORM:
        doc = f"{layer.__name__} with a norm after its residual."
        _POST_NORM[layer] = type(f"PostNorm{layer.__name__}", (PostNorm, layer), {"__doc__": doc})
    return _POST_NORM[layer]
