#!/usr/bin/env bash
# flash-linear-attention (fla-core) 0.6.0: references of sibling operators, and of one operator and its kernel, read another axis as time.
# Expected: the plain functions beside the kernels take what the kernels take: [B, T, H, D], as the kernels' docstrings say.
# Seen: those of GLA, gated DeltaNet, KDA and linear attention do. Those of DeltaNet, RWKV-6, IPLR and retention take [B, H, T, D],
# and nothing is refused: with [B, T, H, D], they mix the heads of each token in place of tokens, and return the expected shape.
# DeltaNet's and retention's have no argument for the scale, which is always D^-1/2.
# Source: fla/ops/*/naive.py, fla/ops/rwkv6/recurrent_naive.py, fla/ops/generalized_delta_rule/iplr/naive.py.
# Output seen: see the end of this script.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet torch==2.13.0
"$tmp/venv/bin/pip" install --quiet einops==0.8.2 packaging==26.0 triton==3.9.0
"$tmp/venv/bin/pip" install --quiet --no-deps fla-core==0.6.0
"$tmp/venv/bin/python" -W ignore - 2>/dev/null <<'PY' | tee "$tmp/out"
import torch
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule.iplr.naive import iplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from fla.ops.retention.naive import naive_retention
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

torch.manual_seed(0)
shape = 1, 3, 3, 4  # as many heads as tokens, which fits either layout
q, k, v = torch.nn.functional.normalize(torch.randn(3, *shape), dim=-1)
gate, weight = torch.full(shape, -0.1), torch.full(shape[:3], 0.5)
functions = {
    "gla": lambda v: naive_recurrent_gla(q, k, v, gate),
    "gated_delta_rule": lambda v: naive_recurrent_gated_delta_rule(q, k, v, weight, -weight),
    "kda": lambda v: naive_recurrent_kda(q, k, v, gate, weight),
    "linear_attn": lambda v: naive_recurrent_linear_attn(q, k, v),
    "delta_rule": lambda v: delta_rule_recurrence(q, k, v, weight),
    "iplr": lambda v: iplr_recurrence(q, k, v, -k, k),
    "rwkv6": lambda v: naive_recurrent_rwkv6(q, k, v, gate, torch.ones(3, 4)),
    "retention": lambda v: naive_retention(q, k, v),
}
for name, function in functions.items():
    first = lambda v: (out[0] if isinstance(out := function(v), tuple) else out)
    changed = v.clone()
    changed[0, 0, 0] += 1  # the first value along both axes: what changes beyond it lies along the axis of time
    difference = (first(changed) - first(v)).abs().amax(-1)[0]
    axes = {"[B, T, H, D]": difference[1:, 0].max(), "[B, H, T, D]": difference[0, 1:].max()}
    print(f"{name}: {', '.join(layout for layout, change in axes.items() if change > 1e-6)}")
PY
diff "$tmp/out" - <<'EXPECTED'
gla: [B, T, H, D]
gated_delta_rule: [B, T, H, D]
kda: [B, T, H, D]
linear_attn: [B, T, H, D]
delta_rule: [B, H, T, D]
iplr: [B, H, T, D]
rwkv6: [B, H, T, D]
retention: [B, H, T, D]
EXPECTED
