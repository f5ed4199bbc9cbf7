from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.cpu_shim import StubFinder
from slime.utils import env
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO


@pytest.fixture
def stubs(monkeypatch):
    finder = StubFinder(frozenset({"absent_kernels"}))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield
    for name in [n for n in sys.modules if n.startswith("absent_kernels")]:
        del sys.modules[name]


def test_every_name_of_a_stubbed_package_imports(stubs):
    module = importlib.import_module("absent_kernels.deep.er")
    assert module.Anything.at.all is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_elsewhere")


def test_calling_a_stub_says_what_is_missing(stubs):
    from absent_kernels import rmsnorm

    with pytest.raises(NotImplementedError, match="absent_kernels.rmsnorm was called"):
        rmsnorm(1)


def test_another_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_shim.importlib.metadata, "version", lambda name: "0.5.99")
    with pytest.raises(ConfigError, match="sglang 0.5.99 is installed"):
        cpu_shim._check_version()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_a_child_process_gets_the_waiting_hook_and_one_thread():
    variables = cpu_shim.child_environment()
    first, second, *_ = variables["PYTHONPATH"].split(":")
    assert (Path(first) / "sitecustomize.py").exists()
    assert Path(second) == REPO
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"


def run_alone(code: str) -> None:
    """Run it in a process that does not know slime."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env.copy() | cpu_shim.child_environment(), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_sglang_imports_in_a_process_that_knows_nothing_of_slime():
    code = (
        "import sys\n"
        "assert 'torch' not in sys.modules\n"
        "from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket\n"
        "from transformers import Qwen3ForCausalLM\n"
    )
    run_alone(code)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_latent_attention_turns_keys_by_plain_positions_where_nothing_stretches_them():
    """On a CPU SGLang supports only DeepSeek's YaRN: GLM-4.7-Flash and GLM-5 would not start."""
    code = (
        "import torch\n"
        "from sglang.srt.layers.rotary_embedding.factory import get_rope_cpu\n"
        "from sglang.srt.runtime_context import get_context\n"
        "from types import SimpleNamespace\n"
        "get_context().set_server_args(SimpleNamespace(rl_on_policy_target=None))\n"
        "from slime.backends.sglang_utils.cpu_shim.native_layers import positions\n"
        "sizes = (4, 4, 8, 10000, False, None, torch.float32, 1.0, 'cpu')\n"
        "queries = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]).expand(2, 1, 4)\n"
        "turned, _ = positions(get_rope_cpu, *sizes).forward_native(torch.tensor([0, 1]), queries, queries)\n"
        "expected = torch.tensor([[1.0, 0.0, 0.0, 0.0], [torch.tensor(1.0).cos(), torch.tensor(1.0).sin(), 0, 0]])\n"
        "torch.testing.assert_close(turned.view(2, 4), expected)\n"
    )
    run_alone(code)
