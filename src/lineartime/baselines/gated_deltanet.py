"""Gated DeltaNet: the delta rule with a decay that each token decides.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464).

    S[t] = alpha[t] S[t - 1] + beta[t] k[t] (v[t] - alpha[t] S[t - 1]^T k[t])^T        alpha = exp(-A softplus(x w + b))
"""

from lineartime.baselines.deltanet import DeltaNet


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet: a decay for each head and token, and a gate on the output.

    The options are those of `DeltaNet`.
    """

    name = "gated-deltanet"
    forgets = True
