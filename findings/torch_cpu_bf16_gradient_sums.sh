#!/usr/bin/env bash
# torch 2.13.0, on a CPU: the gradients of LayerNorm's weight and bias, and of an embedding, are summed over all tokens in bfloat16.
# Expected: sums in float32, rounded once, as in matrix products, in Tensor.sum and in the same functions on CUDA.
# Seen: a sum of equal parts stops growing at 256. Of 32,768 tokens, 256 arrive. RMSNorm, made of elementary operations, is right.
# Source: the kernels layer_norm_backward and embedding_dense_backward for CPUs, which add in the dtype of their input.
# Output seen, torch 2.13.0+cpu:
#   sum 32768.0, linear bias 32768.0, layer_norm bias 256.0, embedding row 256.0
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet numpy==2.4.6 torch==2.13.0
"$tmp/env/bin/python" - <<'PY' | tee "$tmp/out"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
tokens, dtype = 32768, torch.bfloat16
ones = torch.ones(tokens, 8, dtype=dtype)
linear = torch.nn.Linear(8, 8, dtype=dtype)
linear(ones).backward(ones)
norm = torch.nn.LayerNorm(8, dtype=dtype)
norm(torch.randn(tokens, 8, dtype=dtype)).backward(ones)
table = torch.zeros(4, 8, dtype=dtype, requires_grad=True)
F.embedding(torch.zeros(tokens, dtype=torch.long), table).backward(ones)
print(f"sum {ones.sum(0)[0]:.1f}, linear bias {linear.bias.grad[0]:.1f}, layer_norm bias {norm.bias.grad[0]:.1f}, "
      f"embedding row {table.grad[0, 0]:.1f}")
PY
grep -qx "sum 32768.0, linear bias 32768.0, layer_norm bias 256.0, embedding row 256.0" "$tmp/out"
