"""Copying a rank's state to its host and back: the parts of a checkpoint, bit for bit, without files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, start_worker, write_model
from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist

OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000".split()
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()
PARTS = {
    "DP2": ("--fp32",),
    "DP2, buckets that overlap": ("--bf16", *OVERLAP),
    "TP2": ("--bf16", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "EP2": ("--bf16", "--expert-model-parallel-size", "2"),
    "bf16 moments": ("--bf16", *NARROW),
    "stateless Adam": ("--bf16", "--use-stateless-adam"),
}


def copy_and_go_on(folder: str) -> None:
    import torch

    from slime.ext.recovery.memory_copy import copy_state, restore_state
    from tests.dist.checkpoint_case import build, parse, take_step

    def numbers(parts: Any) -> dict[str, Any]:
        """Everything that training changes, and the next random number."""
        from slime.backends.megatron_utils.checkpoints.optimizer_state import own_tensors
        from slime.ext.recovery.memory_copy import own_settings

        model, optimizer, scheduler = parts
        tensors = {f"{i} {n}": t for i, chunk in enumerate(model) for n, t in chunk.state_dict().items()}
        tensors |= own_tensors(optimizer)
        found = {name: tensor.detach().clone() for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        return found | {"settings": [own_settings(optimizer), scheduler.state_dict()], "drawn": torch.rand(3)}

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        assert one.keys() == other.keys()
        return all(v.equal(other[n]) if isinstance(v, torch.Tensor) else v == other[n] for n, v in one.items())

    for name, flags in PARTS.items():
        args = parse(*flags, folder=folder)
        parts = build(args)
        take_step(*parts, seed=1)
        for chunk in parts[0]:
            for buffer_name, buffer in chunk.named_buffers():
                if "expert_bias" in buffer_name:
                    buffer.add_(0.25)  # as training changes it
            for frozen in chunk.parameters():
                if not frozen.requires_grad:
                    frozen.data.add_(0.5)
        copy = copy_state(7, *parts)
        after_one = numbers(parts)
        take_step(*parts, seed=2)
        after_two = numbers(parts)
        assert not same(after_one, after_two), name

        again = build(args)
        assert restore_state(copy, *again) == 7
        assert same(numbers(again), after_one), name
        take_step(*again, seed=2)
        assert same(numbers(again), after_two), name
        reused = copy_state(8, *again, copy)
        assert reused.data.data_ptr() == copy.data.data_ptr()


def test_all_that_training_changes_comes_back_to_the_bit(tmp_path):
    run_ranks(copy_and_go_on, 2, str(tmp_path / "never_made"))
    assert not (tmp_path / "never_made").exists()


def train_die_and_go_on(rank: int, world_size: int, port: int, hf: str, save: str) -> None:
    import torch.distributed as dist

    from slime.backends.megatron_utils.checkpoints.optimizer_state import own_tensors
    from slime.ext.recovery.copying_worker import CopyingTrainRayActor
    from slime.ext.recovery.state_copy import StateCopy
    from slime.flags.parse import args_to_resume

    weights = Path(hf) / "model.safetensors"
    for name, layout in {"DP2": (), "TP2": ("--tensor-model-parallel-size", "2")}.items():
        flags = ("--actor-num-gpus-per-node", world_size, *layout, "--save", f"{save}/{name}", "--save-interval", 100)
        args = make_args(Path(hf), *flags)
        args.state_copy_interval = 2
        worker = start_worker(args, rank, world_size, port, kind=CopyingTrainRayActor)
        parallel = worker.get_parallel_config()
        data = cut(args, make_train_data(), parallel)[parallel["dp_rank"]]
        worker.train(0, data)
        assert worker.state_copy is None  # every second rollout
        worker.train(1, data)
        copy: StateCopy = worker.state_copy
        assert copy.rollout_id == 1
        worker.train(2, data)
        assert worker.state_copy is copy
        trained = {name: tensor.clone() for name, tensor in own_tensors(worker.optimizer).items()}

        dist.barrier()
        if rank == 0:
            weights.rename(weights.with_suffix(".away"))
        dist.barrier()
        resumed = args_to_resume(args, weight_version=0, checkpoint=None, copied=1)
        again = start_worker(resumed, rank, world_size, port, kind=CopyingTrainRayActor, state_copy=copy)
        assert again._start_rollout_id == 2
        again.train(2, data)
        assert all(tensor.equal(trained[name]) for name, tensor in own_tensors(again.optimizer).items())
        dist.barrier()
        if rank == 0:
            weights.with_suffix(".away").rename(weights)
        dist.barrier()


def test_a_trainer_goes_on_from_its_copy_without_its_files(tmp_path):
    write_model(tmp_path / "hf")
    run_workers(train_die_and_go_on, 2, str(tmp_path / "hf"), str(tmp_path / "save"), timeout_s=250)
