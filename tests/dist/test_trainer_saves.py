"""The trainer's save, resume and change of weights, with experts sharded over two ranks and over two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, start_worker, write_model

pytestmark = pytest.mark.dist

LAYOUTS = {
    "EP2": ("--expert-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"),
}


def weights_of(worker: Any) -> dict[str, Any]:
    """Copies of this rank's parameters and expert biases."""
    from slime.backends.megatron_utils.parameters import iter_shards

    return {f"{shard.key} {shard.expert_index}": shard.tensor.detach().clone() for shard in iter_shards(worker.model)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def train_save_resume(rank: int, world_size: int, port: int, hf: str, save: str) -> None:
    from slime.flags.checkpoint import TRACKER, read_tracker

    for name, layout in LAYOUTS.items():
        folder = Path(save) / name
        flags = ("--actor-num-gpus-per-node", world_size, *layout, "--save", folder, "--save-interval", 1)
        flags += ("--async-save", "--kl-coef", 0.1, "--ref-update-interval", 2)
        args = make_args(Path(hf), *flags)
        worker = start_worker(args, rank, world_size, port, with_ref=True)
        parallel = worker.get_parallel_config()
        data = cut(args, make_train_data(), parallel)[parallel["dp_rank"]]
        loaded = weights_of(worker)
        worker.train(0, data)
        worker.save_model(0)
        worker.publish_checkpoint(0)
        once = weights_of(worker)
        worker.train(1, data)
        twice = weights_of(worker)
        assert not same(loaded, once) and not same(once, twice)
        worker.save_model(1, force_sync=True)
        # On disk already, but rollout 1's data position is not saved yet; rank 0 publishes it next.
        assert rank or read_tracker(folder / TRACKER, "--save") == 0
        worker.publish_checkpoint(1)

        # The reference followed the actor after the second rollout; the actor's weights are restored unchanged.
        worker.weights.switch_to("ref")
        assert same(weights_of(worker), twice)
        worker.weights.switch_to("actor")
        assert same(weights_of(worker), twice)

        for step, expected in ((None, twice), (0, once)):
            more = () if step is None else ("--ckpt-step", step)
            again = start_worker(
                make_args(Path(hf), *flags, "--load", folder, *more), rank, world_size, port, with_ref=True
            )
            assert again._start_rollout_id == (2 if step is None else 1)
            assert same(weights_of(again), expected)
            again.weights.switch_to("ref")  # as at that time
            assert same(weights_of(again), twice if step is None else loaded)


def test_a_trainer_saves_behind_training_resumes_and_changes_its_weights(tmp_path):
    write_model(tmp_path / "hf", "qwen3_moe")
    run_workers(train_save_resume, 2, str(tmp_path / "hf"), str(tmp_path / "save"), timeout_s=200)
