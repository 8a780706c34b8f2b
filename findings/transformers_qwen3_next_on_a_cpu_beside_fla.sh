#!/usr/bin/env bash
# transformers 5.23.0: Qwen3-Next runs on a CPU, until flash-linear-attention 0.6.0 and triton are installed beside it.
# Without that package, transformers warns that its reference is "correct but much slower", and advises to install it.
# Expected: on a CPU, the model goes on with its reference in PyTorch, or the package brings something faster.
# Seen: where fla can be imported, even the functions named torch_* call its Triton kernels, also for tensors on a CPU, and the
# forward pass raises an error about Triton's drivers. Following the advice ends what worked.
# Source: transformers, models/qwen3_next/modeling_qwen3_next.py and integrations/hub_kernels.py.
# Output seen: see the end of this script.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet torch==2.13.0
"$tmp/venv/bin/pip" install --quiet transformers==5.23.0 triton==3.9.0
run() {
    HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES='' "$tmp/venv/bin/python" -W ignore - 2>/dev/null <<'PY'
import importlib.util

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
model = Qwen3NextForCausalLM(config).eval()
fla = "with fla" if importlib.util.find_spec("fla") else "without fla"
try:
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits
    print(fla, list(logits.shape))
except Exception as error:
    print(fla, type(error).__name__, "active drivers" in str(error))
PY
}
run | tee "$tmp/out"
"$tmp/venv/bin/pip" install --quiet flash-linear-attention==0.6.0
run | tee -a "$tmp/out"
diff "$tmp/out" - <<'EXPECTED'
without fla [1, 8, 32]
with fla RuntimeError True
EXPECTED
