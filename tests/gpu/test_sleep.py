"""A model on a GPU that releases its memory: how much, and what is restored."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.model import setup_model_and_optimizer
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.backends.megatron_utils.sleep import OffloadedState
from slime.weights.pinned_memory import host_bytes
from tests.dist.trainer_case import make_args, write_model
from tests.unit.backends.megatron_utils.megatron_case import start_single_process
from tests.unit.backends.megatron_utils.test_sleep import gradients_of, state
from tests.unit.backends.megatron_utils.test_train_step import train

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WIDE = {"hidden_size": 1024, "intermediate_size": 8192}
"""About 100 million parameters, so that weights, gradients and moments get separate allocator segments."""


FALL_ASLEEP = """
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from slime.backends.sglang_utils import sglang_plugin

sglang_plugin.register()
HookRegistry.apply_hooks()
memory = TorchMemorySaverAdapter.create(enable=True)
with memory.region("weights", enable_cpu_backup=False):
    buffer = torch.full((2**28,), 3.0, device="cuda")
torch.cuda._sleep(2_000_000_000)
kept = buffer.clone()
memory.pause("weights")
assert kept.eq(3.0).all()
"""
"""What SGLang does with a model buffer, on a GPU that is a second behind."""


def test_an_engine_falls_asleep_behind_its_queued_kernels() -> None:
    spec = find_spec("torch_memory_saver")
    assert spec is not None and spec.origin is not None
    (library,) = Path(spec.origin).parents[1].glob("torch_memory_saver_hook_mode_preload*.so")
    run = subprocess.run(
        [sys.executable, "-c", FALL_ASLEEP],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_sleeping_model_leaves_the_card_and_comes_back(tmp_path: Path) -> None:
    write_model(tmp_path, **WIDE)
    args = make_args(tmp_path, "--actor-num-gpus-per-node", 1, "--bf16")
    start_single_process(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args)
    switch = ModelSwitch(model)
    offloaded = OffloadedState(model, optimizer, chunk_bytes=2**24)
    for rollout_id in range(2):
        train(args, model, optimizer, scheduler, rollout_id)
        switch.backup("actor")
        before = state(model, optimizer)
        kept = [tensor.cpu() for tensor in before]
        del before
        awake = torch.cuda.memory_allocated()
        offloaded.offload(switch.current_copies())
        assert all(chunk.is_pinned() for chunk in offloaded.arena.chunks)
        assert torch.cuda.memory_allocated() < awake / 10  # cuBLAS keeps its workspace
        assert torch.cuda.memory_reserved() < awake / 5
        offloaded.onload()
        assert all(torch.equal(one, other.cpu()) for one, other in zip(kept, state(model, optimizer), strict=True))
        assert not any(gradient.any() for gradient in gradients_of(model))


def test_pinned_memory_is_zero_and_is_released_with_its_last_tensor() -> None:
    size = 2**21 + 4096
    for _ in range(8):  # addresses are reused, and pinned memory cannot be pinned a second time
        room = host_bytes(size, is_pinned=True)
        view = room[4096:]
        assert room.is_pinned() and view.is_pinned() and not room.any()
        del room
        view.copy_(torch.full([view.numel()], 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert view.unique().tolist() == [7]
        del view
