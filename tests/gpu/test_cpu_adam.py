"""Adam on the host (``--optimizer-cpu-offload``): the same training, the same checkpoints, less GPU memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.checkpoint import load_checkpoint, publish_checkpoint, save_checkpoint
from tests.dist.checkpoint_case import build, parse, take_step, tensors_in

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ON_HOST = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / f"store-{os.getpid()}"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", world_size=1, rank=0)


def train(flags: str, folder: Path, steps: range, load: Path | None = None) -> tuple[dict[str, torch.Tensor], Any]:
    """Everything a checkpoint holds after ``steps``, and the optimizer."""
    args = parse(*flags.split(), folder=str(folder))
    state = build(args)
    if load is not None:
        args.load = str(load)
        assert load_checkpoint(args, *state) == 1
    for index in steps:
        take_step(*state, seed=index)
    tensors = tensors_in(save_checkpoint(args, 1, *state))
    publish_checkpoint(folder, 1)
    return tensors, state[1]


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """fp32 states differ by another kernel's rounding; bf16 weights by their last bit, or more near zero."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        is_fp32 = tensor.dtype == torch.float32
        tolerance = {"rtol": 2e-5, "atol": 1e-7} if is_fp32 else {"rtol": 2**-7, "atol": 1e-6}
        torch.testing.assert_close(actual[name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("precision", "fraction"), [("--bf16", 1.0), ("--bf16", 0.5), ("--fp32", 1.0)], ids=["bf16", "half", "fp32"]
)
def test_adam_on_the_host_trains_and_resumes_like_adam_on_the_card(tmp_path, precision, fraction):
    host_flags = f"{precision} {ON_HOST} --optimizer-offload-fraction {fraction}"
    on_card, _ = train(precision, tmp_path / "card", range(3))
    on_host, optimizer = train(host_flags, tmp_path / "host", range(3))
    assert_close(on_host, on_card)
    masters = [tensor for name, tensor in on_host.items() if name.startswith("optimizer.state.param.")]
    assert masters and all(tensor.dtype == torch.float32 for tensor in masters)

    inner = optimizer.chained_optimizers[0].optimizer
    states = [state for part in inner.cpu_optimizers for state in part.state.values()]
    assert states and all(not state["exp_avg"].is_cuda and not state["exp_avg_sq"].is_cuda for state in states)
    if fraction == 1.0:
        assert inner.gpu_optimizer is None

    # Both kinds load both kinds' saves, bit for bit, and continue alike.
    for name, saved in (("card", on_card), ("host", on_host)):
        continued, _ = train(precision, tmp_path / "next", range(3, 4), load=tmp_path / name)
        for flags in (precision, host_flags):
            loaded, _ = train(flags, tmp_path / "again", range(0), load=tmp_path / name)
            assert [key for key, tensor in saved.items() if not loaded[key].equal(tensor)] == []
            resumed, _ = train(flags, tmp_path / "again", range(3, 4), load=tmp_path / name)
            assert_close(resumed, continued)


def test_weights_loaded_without_the_optimizer_reach_the_masters_on_the_host(tmp_path):
    saved, _ = train("--bf16", tmp_path / "card", range(2))
    loaded, _ = train(f"--bf16 {ON_HOST} --no-load-optim", tmp_path / "fresh", range(0), load=tmp_path / "card")
    masters = [name for name in loaded if name.startswith("optimizer.state.param.")]
    for name in masters:
        weight = saved[name.removeprefix("optimizer.state.param.")]
        assert loaded[name].equal(weight.float()), name


def test_the_card_holds_neither_masters_nor_moments(tmp_path):
    def bytes_per_parameter(flags: str) -> float:
        args = parse("--bf16", "--hidden-size", "768", *flags.split(), folder=str(tmp_path))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        state = build(args)
        take_step(*state, seed=0)
        used = torch.cuda.memory_allocated() - before
        numel = sum(p.numel() for chunk in state[0] for p in chunk.parameters() if p.requires_grad)
        return used / numel

    # Weights and gradients, 2 and 4 bytes per parameter, stay; master weights (4) and moments (8) go.
    assert bytes_per_parameter("") - bytes_per_parameter(ON_HOST) > 10
