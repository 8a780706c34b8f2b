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
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Sums(Cache):
    def __init__(self):
        super().__init__(layers=[])
        self.total, self.length = 0, 0

    def get_seq_length(self, layer_idx=0):
        return self.length


class Config(PreTrainedConfig):
    model_type = "sums"
    vocab_size = 64
    num_hidden_layers = 1


class Model(PreTrainedModel, GenerationMixin):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.post_init()

    def _prepare_cache_for_generation(self, config, model_kwargs, *args, **kwargs):
        name = "past_key_values" if transformers.__version__ < "5.24" else "cache"
        model_kwargs[name] = Sums()

    def forward(self, input_ids, past_key_values=None, **kwargs):
        sums = Sums() if past_key_values is None else past_key_values
        totals = sums.total + input_ids.cumsum(1)
        sums.total, sums.length = totals[:, -1:], sums.length + input_ids.shape[1]
        logits = torch.nn.functional.one_hot(totals % 64, 64).float()
        return CausalLMOutputWithPast(logits=logits, past_key_values=sums)


transformers.logging.set_verbosity_error()
model = Model(Config()).eval()
print(transformers.__version__, model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist())
PY
done
diff "$tmp/out" - <<'EXPECTED'
5.23.0 [1, 2, 3, 6, 12, 24]
5.24.0 [1, 2, 3, 6, 6, 6]
EXPECTED
