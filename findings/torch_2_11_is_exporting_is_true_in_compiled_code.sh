#!/usr/bin/env bash
# torch 2.11.0: torch.compiler.is_exporting() is False in a plain call, and true in code that torch.compile compiles.
# Its documentation says that it tells whether torch.export traces; a branch for exported programs is to be skipped by torch.compile.
# Expected: the compiled function returns what the plain one returns. Seen: it takes the branch of exported programs, without a
# word. In a layer with a form for export that recomputes its forward pass, compiled training on a GPU became slower, and no
# result was wrong enough to notice. 2.13.0 compiles the question correctly.
# Reading the flag behind the function, torch.compiler._is_exporting_flag, is right in both.
# Source: torch, _dynamo/variables/torch.py, the table of functions that are constant while tracing, and compiler/__init__.py.
# Output seen: see the end of this script. The PyPI build of 2.11.0 takes some 3 GB.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
for version in 2.11.0 2.13.0; do
    python3 -m venv "$tmp/$version"
    "$tmp/$version/bin/pip" install --quiet torch==$version numpy==2.4.0
    CUDA_VISIBLE_DEVICES='' "$tmp/$version/bin/python" -W ignore - <<'PY' | tee -a "$tmp/out"
import torch


def told(x):
    return x + (100 if torch.compiler.is_exporting() else 1)


def read(x):
    return x + (100 if torch.compiler._is_exporting_flag else 1)


class Program(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


zero = torch.zeros(1)
for name, function in {"is_exporting()": told, "flag": read}.items():
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    exported = torch.export.export(Program(function), (zero,)).module()
    version = torch.__version__.split("+")[0]
    print(version, name, *(f"{way}={int(f(zero))}" for way, f in (("plain", function), ("compiled", compiled), ("exported", exported))))
PY
done
diff "$tmp/out" - <<'EXPECTED'
2.11.0 is_exporting() plain=1 compiled=100 exported=100
2.11.0 flag plain=1 compiled=1 exported=100
2.13.0 is_exporting() plain=1 compiled=1 exported=100
2.13.0 flag plain=1 compiled=1 exported=100
EXPECTED
