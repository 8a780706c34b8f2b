#!/usr/bin/env bash
# transformers 5.24.0: generate() with a model of one's own whose forward takes past_key_values continues each text from its last token alone.
# Expected: the tokens of 5.23.0, or an error: past_key_values has been the name of the cache for years, and a minor release keeps it.
# Seen: 5.24.0 passes the cache as `cache`. A forward with **kwargs takes it in and ignores it, while generate() feeds one token at a time. The text is
# wrong, and FutureWarnings alone tell of the new name. The model here predicts the sum of the tokens that it has read.
# Output seen:
#   5.23.0 [1, 2, 3, 6, 12, 24]
#   5.24.0 [1, 2, 3, 6, 6, 6]
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet numpy==2.4.6 torch==2.13.0
for version in 5.23.0 5.24.0; do
    "$tmp/env/bin/pip" install --quiet "transformers==$version"
    HF_HUB_OFFLINE=1 "$tmp/env/bin/python" -W ignore - <<'PY' | tee -a "$tmp/out"
import torch
import transformers
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Config(PreTrainedConfig):
    model_type = "sums"
    vocab_size = 64
    hidden_size = num_hidden_layers = num_attention_heads = 1


class Model(PreTrainedModel, GenerationMixin):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.post_init()

    def forward(self, input_ids, past_key_values=None, **kwargs):
        new = input_ids[:, None, :, None].float()
        past_key_values = DynamicCache() if past_key_values is None else past_key_values
        read, _ = past_key_values.update(new, new, 0)  # the tokens read so far, kept as keys
        totals = read.sum((1, 3)).cumsum(1)[:, -input_ids.shape[1] :].long()
        return CausalLMOutputWithPast(logits=torch.nn.functional.one_hot(totals % 64, 64).float(), past_key_values=past_key_values)


transformers.logging.set_verbosity_error()
model = Model(Config()).eval()
print(transformers.__version__, model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist())
PY
done
diff "$tmp/out" - <<'EXPECTED'
5.23.0 [1, 2, 3, 6, 12, 24]
5.24.0 [1, 2, 3, 6, 6, 6]
EXPECTED
