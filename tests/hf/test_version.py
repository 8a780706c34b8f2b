"""What has to be installed, and what is imported."""

import subprocess
import sys
from importlib import reload

import pytest

from lineartime import hf, host
from lineartime.errors import LineartimeError


def test_other_versions_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("5.20.0", "5.23.0.dev0", "5.99.1"):
        monkeypatch.setattr(host, "installed_version", lambda _, found=found: found)
        reload(hf)
    for found in ("4.57.1", "5.19.9", "6.0.0", "unknown"):
        monkeypatch.setattr(host, "installed_version", lambda _, found=found: found)
        with pytest.raises(LineartimeError, match=f"5.20 or newer and below 6, but version {found} is installed"):
            reload(hf)
    monkeypatch.setattr(host, "installed_version", lambda _: None)
    for started, error in (("a.py", LineartimeError), ("-m", SystemExit)):  # a script, and `python -m lineartime.hf`
        monkeypatch.setattr(sys, "argv", [started])
        with pytest.raises(error, match=r"lineartime.hf needs transformers, which is not .*: pip install 'lineartime\[hf\]'"):
            reload(hf)


SCRIPT = """
import pkgutil, sys
from importlib import import_module
import lineartime
sys.modules["transformers"] = None  # importing it fails
needing = ("lineartime.hf", "lineartime.finetuning.", "lineartime.__main__")
for module in pkgutil.walk_packages(lineartime.__path__, "lineartime.", onerror=lambda name: None):
    if not module.name.startswith(needing):
        import_module(module.name)
"""


@pytest.mark.nightly
def test_transformers_is_imported_by_hf_and_fine_tuning_alone() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
