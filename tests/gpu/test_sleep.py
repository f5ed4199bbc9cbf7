"""A model on a GPU that gives its memory back: how much of it, and what comes back."""

from __future__ import annotations

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
"""Some 100 million parameters: segments of the allocator's own for weights, gradients and moments."""


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
        assert torch.cuda.memory_allocated() < awake / 10  # cuBLAS keeps its work space
        assert torch.cuda.memory_reserved() < awake / 5
        offloaded.onload()
        assert all(torch.equal(one, other.cpu()) for one, other in zip(kept, state(model, optimizer), strict=True))
        assert not any(gradient.any() for gradient in gradients_of(model))


def test_pinned_memory_is_zero_and_is_released_with_its_last_tensor() -> None:
    size = 2**21 + 4096
    for _ in range(8):  # the same addresses come again, and what is pinned cannot be pinned a second time
        room = host_bytes(size, is_pinned=True)
        view = room[4096:]
        assert room.is_pinned() and view.is_pinned() and not room.any()
        del room
        view.copy_(torch.full([view.numel()], 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert view.unique().tolist() == [7]
        del view
