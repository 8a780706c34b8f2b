#!/usr/bin/env bash
# datasets 5.0.0: an IterableDataset.from_generator that is resumed twice by its state_dict starts again from the first example.
# Expected: state_dict after a resume holds the position from the beginning, so that a second resume continues.
# Seen: the state after a resume has lost it: the second resume gives examples again that were read before. 5.2.0 is right.
# A training run that is interrupted twice therefore reads the beginning of its text once more, without a word.
# Output seen, datasets 5.0.0 and 5.2.0: see the end of this script.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
for version in 5.0.0 5.2.0; do
    python3 -m venv "$tmp/$version"
    "$tmp/$version/bin/pip" install --quiet "datasets==$version"
    HF_HUB_OFFLINE=1 "$tmp/$version/bin/python" - <<'PY' | tee -a "$tmp/out"
import datasets


def numbers():
    yield from ({"n": n} for n in range(100))


def read(count, state):
    data = datasets.IterableDataset.from_generator(numbers)
    if state is not None:
        data.load_state_dict(state)
    seen = []
    for example in data:
        seen.append(example["n"])
        state = data.state_dict()
        if len(seen) == count:
            return seen, state


first, state = read(3, None)
second, state = read(3, state)
third, _ = read(3, state)
print(datasets.__version__, first, second, third)
PY
done
diff "$tmp/out" - <<'EXPECTED'
5.0.0 [0, 1, 2] [3, 4, 5] [0, 1, 2]
5.2.0 [0, 1, 2] [3, 4, 5] [6, 7, 8]
EXPECTED
