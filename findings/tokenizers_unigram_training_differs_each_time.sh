#!/usr/bin/env bash
# tokenizers 0.23.3: training a Unigram tokenizer on the same texts gives another tokenizer.json each time, in one process and with one thread.
# Expected: the same file, as BPE training gives it: the texts, their order and the options are the same.
# Seen: six trainings give six files, of the same pieces with other scores. What is named or cached by the digest of a trained tokenizer is never found again,
# and two machines cannot agree on a vocabulary by training it; a trained file has to be copied.
# Output seen, tokenizers 0.23.3:
#   bpe: 1 file of 6 trainings, unigram: 6 files of 6 trainings
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet tokenizers==0.23.3
RAYON_NUM_THREADS=1 "$tmp/env/bin/python" - <<'PY'
import json
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

draw = random.Random(0)
words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(400)]
texts = [" ".join(draw.choices(words, k=20)) for _ in range(300)]


def trained(model, trainer):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


bpe = {trained(models.BPE(), trainers.BpeTrainer(vocab_size=200, show_progress=False)) for _ in range(6)}
unigram = {
    trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False))
    for _ in range(6)
}
print(f"bpe: {len(bpe)} file of 6 trainings, unigram: {len(unigram)} files of 6 trainings")
pieces = {tuple(sorted(piece for piece, _ in json.loads(each)["model"]["vocab"])) for each in unigram}
assert len(bpe) == 1 and len(unigram) > 1 and len(pieces) == 1
PY
