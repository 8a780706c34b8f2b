#!/usr/bin/env bash
# torch 2.13.0, on a CPU with one thread: the gradients of LayerNorm's bias, of an embedding and of an index are summed over all tokens in bfloat16.
# Expected: sums in float32, rounded once, as Tensor.sum and the gradient of a linear layer's bias have them.
# Seen: a sum of equal parts stops growing at 256. Of 32,768 tokens, 256 arrive. With more threads, LayerNorm has one such sum for each thread.
# Output seen, torch 2.13.0+cpu:
#   sum 32768.0, linear bias 32768.0, layer_norm bias 256.0, embedding row 256.0, index 256.0
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
indexed = torch.zeros(4, dtype=dtype, requires_grad=True)
indexed[torch.zeros(tokens, dtype=torch.long)].backward(ones[:, 0])
print(f"sum {ones.sum(0)[0]:.1f}, linear bias {linear.bias.grad[0]:.1f}, layer_norm bias {norm.bias.grad[0]:.1f}, "
      f"embedding row {table.grad[0, 0]:.1f}, index {indexed.grad[0]:.1f}")
PY
grep -qx "sum 32768.0, linear bias 32768.0, layer_norm bias 256.0, embedding row 256.0, index 256.0" "$tmp/out"
