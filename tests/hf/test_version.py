"""What has to be installed, and what is imported."""

import pytest

from lineartime.errors import LineartimeError
from lineartime.hf import version


def test_other_versions_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("5.20.0", "5.23.0.dev0", "5.99.1"):
        monkeypatch.setattr(version, "installed_version", lambda _, found=found: found)
        version.check_transformers()
    for found in ("4.57.1", "5.19.9", "6.0.0", "unknown"):
        monkeypatch.setattr(version, "installed_version", lambda _, found=found: found)
        with pytest.raises(LineartimeError, match=f"5.20 or newer and below 6, but version {found} is installed"):
            version.check_transformers()
    monkeypatch.setattr(version, "installed_version", lambda _: None)
    with pytest.raises(LineartimeError, match=r"needs transformers, which is not installed: pip install 'lineartime\[hf\]'"):
        version.check_transformers()
