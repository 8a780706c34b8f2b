#!/usr/bin/env bash
# flash-linear-attention (fla-core) 0.6.0: the conjugate gradients of MesaNet's reference do not arrive at the solution of the exact
# reference beside it, and their output is not proportional to the query.
# Expected: d conjugate gradient steps solve a d x d system up to rounding, about 1e-6 in float32; a query a thousandth as long has
# an output a thousandth as large, because the layer is linear in its queries.
# Seen: both denominators of a step have 1e-5 added, which stops progress once the squared residual is about as small. With queries
# of length 1, d = 16 and 30 steps, the relative error is 3e-4, of length 0.1 3e-3, of length 0.001 more than a quarter; 200 steps
# do not help much. So normalise queries before this function, as its layer does, and compare other code with the exact one.
# Source: fla/ops/mesa_net/naive.py, naive_mesa_net_CG and naive_mesa_net_exact.
# Output seen: see the end of this script.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet torch==2.13.0
"$tmp/venv/bin/pip" install --quiet einops==0.8.2 packaging==26.0 triton==3.9.0
"$tmp/venv/bin/pip" install --quiet --no-deps fla-core==0.6.0
"$tmp/venv/bin/python" -W ignore - 2>/dev/null <<'PY' | tee "$tmp/out"
import torch
from fla.ops.mesa_net.naive import naive_mesa_net_CG, naive_mesa_net_exact

torch.manual_seed(0)
shape = 1, 64, 1, 16
q, k = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for _ in range(2))
v, g, beta, ridge = torch.randn(shape), torch.full(shape[:3], -0.01), torch.full(shape[:3], 0.9), torch.ones(1, 16)
for length in 1, 0.1, 0.01, 0.001:
    exact = naive_mesa_net_exact(length * q, k, v, g, ridge, beta)[0]
    errors = []
    for steps in 30, 200:
        found = naive_mesa_net_CG(length * q, k, v, g, ridge, beta, 16, steps)[0]
        errors.append(float((found - exact).norm() / exact.norm()))
    print(f"queries of length {length}: relative error {errors[0]:.0e} after 30 steps, {errors[1]:.0e} after 200")
PY
diff "$tmp/out" - <<'EXPECTED'
queries of length 1: relative error 3e-04 after 30 steps, 1e-04 after 200
queries of length 0.1: relative error 3e-03 after 30 steps, 1e-03 after 200
queries of length 0.01: relative error 3e-02 after 30 steps, 1e-02 after 200
queries of length 0.001: relative error 3e-01 after 30 steps, 1e-01 after 200
EXPECTED
