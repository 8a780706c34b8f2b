#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: generate() of a Llama with prompt tuning gives other tokens than the model's own logits.
# Expected: the greedy tokens that the model gives when it reads the whole text at each step, as with transformers 5.23.0. PEFT allows 5.24.0.
# Seen: PEFT looks at model_kwargs["past_key_values"] to tell the first call of generate() from the later ones. 5.24.0 calls the cache `cache`, so that
# every call seems to be the first, and the learned prompt is put in front of every new token. Nothing is said.
# Output seen, PEFT 0.21.2 (reads the whole text each time | generate):
#   5.23.0 [32, 17, 38, 37, 38, 7] [32, 17, 38, 37, 38, 7]
#   5.24.0 [32, 17, 38, 37, 38, 7] [32, 3, 32, 32, 17, 3]
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet numpy==2.4.6 torch==2.13.0 accelerate==1.15.0 peft==0.21.2
for version in 5.23.0 5.24.0; do
    "$tmp/env/bin/pip" install --quiet "transformers==$version" peft==0.21.2
    HF_HUB_OFFLINE=1 "$tmp/env/bin/python" -W ignore - <<'PY' | tee -a "$tmp/out"
import peft
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, initializer_range=0.5, **sizes))
model = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
ids = whole = torch.tensor([[1, 2, 3]])
with torch.no_grad():
    for _ in range(6):
        whole = torch.cat([whole, model(input_ids=whole).logits[:, -1].argmax(-1, keepdim=True)], 1)
generated = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
print(transformers.__version__, whole[0, 3:].tolist(), generated[0, 3:].tolist())
PY
done
awk '{ split($0, part, "] "); same = part[1] "]" == $1 " " part[2]; print $1, same ? "same" : "different" }' "$tmp/out" | diff - <(printf '5.23.0 same\n5.24.0 different\n')
