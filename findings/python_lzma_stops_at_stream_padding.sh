#!/usr/bin/env bash
# Python 3.11.7 (the version is printed), module lzma; datasets 5.2.0, which reads .xz with it: an .xz file of two streams with padding between them ends at the padding.
# Expected: both streams. The .xz format (section 2.2, Stream Padding) allows zero bytes, a multiple of four, after each stream, and `xz -dc` reads on.
# Seen: LZMAFile returns the first stream alone, without an error, so that a corpus is cut in half in silence. With the same padding at the end of a
# file, it raises EOFError instead, so that a valid file is taken for one that is cut off.
# Output seen, datasets 5.2.0:
#   xz: 4 lines, lzma: 2 lines, datasets: 2 rows; padding at the end: EOFError
set -euo pipefail
command -v xz > /dev/null || { echo "needs the program xz"; exit 1; }
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet datasets==5.2.0
printf '{"text": "one"}\n{"text": "two"}\n' | xz > "$tmp/a.xz"
{ cat "$tmp/a.xz"; printf '\0\0\0\0\0\0\0\0'; cat "$tmp/a.xz"; } > "$tmp/data.jsonl.xz"
{ cat "$tmp/a.xz"; printf '\0\0\0\0\0\0\0\0'; } > "$tmp/end.xz"
cd "$tmp"
HF_HUB_OFFLINE=1 HF_HOME="$tmp/home" "$tmp/env/bin/python" - "$(xz -dc data.jsonl.xz | wc -l)" <<'PY' | tee out
import lzma
import sys

import datasets

rows = datasets.load_dataset("json", data_files="data.jsonl.xz", split="train", streaming=True)
lines = lzma.open("data.jsonl.xz").read().count(b"\n")
try:
    end = len(lzma.open("end.xz").read())
except EOFError as error:
    end = type(error).__name__
print(sys.version.split()[0])
print(f"xz: {sys.argv[1].strip()} lines, lzma: {lines} lines, datasets: {sum(1 for _ in rows)} rows; padding at the end: {end}")
PY
grep -qx "xz: 4 lines, lzma: 2 lines, datasets: 2 rows; padding at the end: EOFError" out
