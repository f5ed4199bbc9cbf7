"""megatron-core runs on CPU tensors, and other code still sees a machine without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers, random

from slime.backends.megatron_utils import cpu_platform
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the replacements are for machines without CUDA")


def test_megatron_core_sees_a_cpu_where_it_asks_for_the_current_cuda_device() -> None:
    assert layers.torch.cuda.current_device() == torch.device("cpu")
    assert layers.torch.zeros(2, device="cuda").device.type == "cpu"
    assert layers.torch.empty(2, device=torch.device("cuda"), pin_memory=True).device.type == "cpu"


def test_code_outside_of_megatron_core_still_learns_that_there_is_no_cuda() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_random_states_of_parallel_regions_are_those_of_the_cpu_generator() -> None:
    tracker = random.CudaRNGStatesTracker()
    tracker.add("region", 11)
    before = torch.get_rng_state()
    with tracker.fork("region"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(3), first)
    assert tensor_parallel.get_cuda_rng_tracker is not None


def test_another_version_of_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_platform, "_find_wheel", lambda: SimpleNamespace(version="0.17.0"))
    monkeypatch.setattr(cpu_platform, "_PROBLEM", cpu_platform._version_problem())
    with pytest.raises(ConfigError, match="0.17.0.*0.16.1.*pip install megatron-core==0.16.1"):
        cpu_platform.check()


FIRST_CALLS = """
import os, sys
import torch
from slime.backends.megatron_utils import cpu_platform

x = torch.linspace(0, 60, 12800)
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(x.cos(), x.cos()) else 3)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit("the first cosines of a process differ from the second ones")
"""


def test_the_first_cosines_that_two_threads_compute_are_as_exact_as_later_ones() -> None:
    """Run in 400 processes: MKL alone is wrong in 2 to 12 of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FIRST_CALLS, "400"]
    subprocess.run(command, cwd=REPO, env=environment, check=True, timeout=300)


def make_checkout(folder: Path, *, is_package: bool, has_metadata: bool) -> Path:
    """A folder that looks like a Megatron-LM checkout of another version."""
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


def run_beside(code: str, checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{REPO}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("is_package", "has_metadata"), [(False, False), (True, True)])
def test_the_core_is_the_wheels_and_the_rest_of_the_checkout_is_there(tmp_path, is_package, has_metadata):
    checkout = make_checkout(tmp_path / "Megatron-LM", is_package=is_package, has_metadata=has_metadata)
    code = """
import logging
logging.basicConfig(level="INFO")
from slime.backends.megatron_utils import cpu_platform
import megatron.core, megatron.core.utils, megatron.training
print(megatron.core.__version__, megatron.core.utils.__file__, megatron.training.WHERE)
"""
    result = run_beside(code, checkout)
    assert result.returncode == 0, result.stderr
    version, file, where = result.stdout.split()
    assert (version, where) == ("0.16.1", "checkout")
    assert "site-packages" in file
    assert f"not from the checkout in {checkout}/megatron" in result.stderr


def test_a_core_imported_from_the_checkout_before_is_an_error_that_says_what_to_do(tmp_path):
    checkout = make_checkout(tmp_path / "Megatron-LM", is_package=False, has_metadata=False)
    (checkout / "megatron/core/__init__.py").write_text("")
    result = run_beside(
        "import megatron.core; from slime.backends.megatron_utils import cpu_platform; cpu_platform.check()", checkout
    )
    assert "ConfigError: megatron.core was imported from " in result.stderr
    assert "take the Megatron-LM checkout off PYTHONPATH" in result.stderr
