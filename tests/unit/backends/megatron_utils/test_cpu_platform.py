"""megatron-core runs on CPU tensors, and nothing outside of it is deceived."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform, megatron_wheel

# isort: split
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer.moe import moe_utils

from slime.utils.errors import ConfigError

REPO = Path(__file__).parents[4]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the replacements are for machines without CUDA")


def test_it_is_installed_once_however_often_it_is_asked() -> None:
    finders = [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"]
    assert cpu_platform.install() and cpu_platform.IS_INSTALLED
    assert [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"] == finders
    assert len(finders) == 1


def test_megatron_core_sees_a_cpu_where_it_asks_for_the_current_cuda_device() -> None:
    assert layers.torch.cuda.current_device() == torch.device("cpu")
    assert layers.torch.zeros(2, device="cuda").device.type == "cpu"
    assert layers.torch.empty(2, device=torch.device("cuda"), pin_memory=True).device.type == "cpu"


def test_everything_else_of_torch_is_the_real_thing_to_megatron_core() -> None:
    assert layers.torch.Tensor is torch.Tensor
    assert layers.torch.nn.functional is torch.nn.functional
    assert layers.torch.cuda.is_available() is False


def test_code_outside_of_megatron_core_still_learns_that_there_is_no_cuda() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_the_name_of_a_tensor_type_equals_its_cuda_name_too() -> None:
    name = torch.zeros(1).type()
    assert name == "torch.FloatTensor" and name == "torch.cuda.FloatTensor"
    assert name != "torch.cuda.HalfTensor"
    assert torch.zeros(1).type(torch.int32).dtype == torch.int32


def test_a_stream_does_nothing_and_ends_every_chain() -> None:
    stream = layers.torch.cuda.current_stream()
    with layers.torch.cuda.stream(stream):
        stream.wait_stream(layers.torch.cuda.Stream()).synchronize()
    assert stream == layers.torch.cuda.default_stream()


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


def test_split_sizes_become_plain_arrays() -> None:
    sizes = moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert type(sizes).__name__ == "ndarray" and sizes.tolist() == [1, 2]


def test_another_version_of_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_wheel, "find_wheel", lambda: SimpleNamespace(version="0.17.0"))
    with pytest.raises(ConfigError, match="0.17.0.*0.16.1.*pip install megatron-core==0.16.1"):
        cpu_platform._check_version()


def imports_of(path: Path) -> list[str]:
    """Module-level imports in order; ``from a import b`` as ``a.b``."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize(
    "path",
    sorted((REPO / "slime/backends/megatron_utils").rglob("*.py")),
    ids=lambda path: str(path.relative_to(REPO / "slime/backends/megatron_utils")),
)
def test_whoever_imports_megatron_core_imports_the_platform_first(path: Path) -> None:
    names = imports_of(path)
    ours = "slime.backends.megatron_utils."
    for name in names:
        if name.startswith("megatron"):
            pytest.fail(f"{path.name} imports {name} before slime.backends.megatron_utils.cpu_platform")
        if name == ours + "cpu_platform":
            return


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
    """In 400 processes: MKL alone is wrong in 2 to 12 of so many."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FIRST_CALLS, "400"]
    subprocess.run(command, cwd=REPO, env=environment, check=True, timeout=300)
