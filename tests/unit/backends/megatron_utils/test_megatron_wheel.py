"""A Megatron-LM checkout on PYTHONPATH, as recipes have it, does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[4]


def make_checkout(folder: Path, *, is_package: bool, has_metadata: bool) -> Path:
    """A folder like a checkout of Megatron-LM of another version."""
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
    (folder / "megatron/core/__init__.py").write_text("raise ImportError('the core of the checkout')")
    (folder / "megatron/training/__init__.py").write_text("WHERE = 'checkout'")
    if is_package:
        (folder / "megatron/__init__.py").write_text("")
    if has_metadata:
        info = folder / "megatron_core.egg-info"
        info.mkdir()
        (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.9.9\n")
    return folder


def run(code: str, checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{REPO}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("is_package", "has_metadata"), [(False, False), (True, True)])
def test_the_core_is_the_wheels_and_the_rest_of_the_checkout_is_there(tmp_path, is_package, has_metadata):
    checkout = make_checkout(tmp_path / "Megatron-LM", is_package=is_package, has_metadata=has_metadata)
    code = """
import logging
logging.basicConfig(level="INFO")
from slime.backends.megatron_utils import cpu_platform, megatron_wheel
import megatron.core, megatron.core.utils, megatron.training
print(megatron.core.__version__, megatron.core.utils.__file__, megatron.training.WHERE)
"""
    result = run(code, checkout)
    assert result.returncode == 0, result.stderr
    version, file, where = result.stdout.split()
    assert (version, where) == ("0.16.1", "checkout")
    assert "site-packages" in file
    assert f"not from the checkout in {checkout}/megatron" in result.stderr


def test_a_core_imported_from_the_checkout_before_is_an_error_that_says_what_to_do(tmp_path):
    checkout = make_checkout(tmp_path / "Megatron-LM", is_package=False, has_metadata=False)
    (checkout / "megatron/core/__init__.py").write_text("")
    result = run("import megatron.core; from slime.backends.megatron_utils import cpu_platform", checkout)
    assert "ConfigError: megatron.core was imported from " in result.stderr
    assert "take the Megatron-LM checkout off PYTHONPATH" in result.stderr
