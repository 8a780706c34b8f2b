#!/usr/bin/env bash
# torch 2.13.0: inside an outer torch.autocast(enabled=False), an inner autocast keeps the bf16 copies of weights of its first use.
# Expected: a disabled context changes nothing; each inner context casts the weights anew, as it does without an outer one.
# Seen (on a CPU): the cache of casts is cleared only where the outermost context ends, enabled or not. After an optimiser's step, the next
# inner context multiplies by the weights before the step, and training goes on with them, without a warning.
# cache_enabled=False on the inner context, or torch.clear_autocast_cache(), cures it.
# Output seen, torch 2.13.0+cpu:
#   no outer context: 1 then 5
#   outer, disabled: 1 then 1
#   outer, enabled: 1 then 1
#   outer, disabled, inner without a cache: 1 then 5
#   outer, disabled, cache cleared each time: 1 then 5
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/env"
"$tmp/env/bin/pip" install --quiet numpy==2.4.6 torch==2.13.0
"$tmp/env/bin/python" - <<'PY' | tee "$tmp/out"
import contextlib
import torch


def outputs(outer, clear=False, **options):
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    seen = []
    with outer:
        for _ in range(2):
            if clear:
                torch.clear_autocast_cache()
            with torch.autocast("cpu", dtype=torch.bfloat16, **options):
                seen.append(int(layer(torch.ones(1, 1))))
            with torch.no_grad():
                layer.weight.add_(4)  # as an optimiser does
    return f"{seen[0]} then {seen[1]}"


disabled = lambda: torch.autocast("cpu", enabled=False)
print("no outer context:", outputs(contextlib.nullcontext()))
print("outer, disabled:", outputs(disabled()))
print("outer, enabled:", outputs(torch.autocast("cpu", dtype=torch.bfloat16)))
print("outer, disabled, inner without a cache:", outputs(disabled(), cache_enabled=False))
print("outer, disabled, cache cleared each time:", outputs(disabled(), clear=True))
PY
diff "$tmp/out" - <<'EXPECTED'
no outer context: 1 then 5
outer, disabled: 1 then 1
outer, enabled: 1 then 1
outer, disabled, inner without a cache: 1 then 5
outer, disabled, cache cleared each time: 1 then 5
EXPECTED
