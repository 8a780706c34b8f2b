#!/usr/bin/env bash
# PEFT 0.21.2: with ensure_weight_tying=True, merging LoRA on the tied embedding of a Llama adds the update twice.
# Expected: the merged model gives the logits of the trained one. The option is what PEFT's own warning advises for tied layers.
# Seen: one update is shared by embedding and output layer, whose weight is one tensor, and merge_and_unload() adds it once for each of the two names.
# Output seen, PEFT 0.21.2, transformers 5.23.0:
#   the update is added 2.000 times
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet numpy==2.4.6 torch==2.13.0 accelerate==1.15.0 transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$tmp/env/bin/python" -W ignore - <<'PY' | tee "$tmp/out"
import peft
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=True, **sizes))
before = base.model.embed_tokens.weight.detach().clone()
options = {"r": 2, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True, "init_lora_weights": False}
model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
with torch.no_grad():
    update = model.base_model.model.model.embed_tokens.get_delta_weight("default").clone()
    change = model.merge_and_unload().model.embed_tokens.weight - before
    print(f"the update is added {float((change * update).sum() / update.square().sum()):.3f} times")
PY
grep -qx "the update is added 2.000 times" "$tmp/out"
