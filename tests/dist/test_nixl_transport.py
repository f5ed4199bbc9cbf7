"""Rollout data from the manager's memory to the trainer's by NIXL, over loopback, if its package is installed."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest
import ray
import torch

from slime.ray.train_actor import remote_class
from slime.ray.utils import ray_transport
from slime.ray.waiting import WATCH_GROUP, Watched
from slime.train_data.columns import RankBatch
from slime.utils.misc import Box

pytest.importorskip("nixl", reason="the package is not installed; --rollout-data-transport nixl is refused then")

pytestmark = pytest.mark.dist

# Ray's workers cannot import a test module by name, so its classes are sent as code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ARGS = Namespace(rollout_data_transport="nixl")


class _Manager(Watched):
    def generate(self) -> list[Box]:
        tokens = [torch.arange(5), torch.arange(70_000)]
        columns = {
            "tokens": tokens, "loss_masks": [torch.ones(2), torch.ones(3)], "response_lengths": torch.tensor([2, 3]),
            "rewards": torch.tensor([0.5, 1.0]), "rollout_ids": [0, 1], "partition": [1, 0], "raw_reward": [1, 2],
            "total_lengths": [5, 70_000], "micro_batch_indices": [[0, 1]], "num_microbatches": [1],
            "global_batch_sizes": [2],
        }  # fmt: skip
        data = RankBatch.from_dict(columns)
        return [Box(ray.put(data, _tensor_transport=ray_transport(ARGS.rollout_data_transport)))]


class _Trainer:
    def get_parallel_config(self) -> dict[str, int]:
        return {"dp_rank": 0}

    def train(self, rollout_id: int, rank_batch: Any, external_data: Any = None) -> dict[str, Any]:
        batch = rank_batch.to_dict()
        return {
            "sums": [int(tokens.sum()) for tokens in batch["tokens"]],
            "rewards": batch["rewards"].tolist(),
            "raw_reward": batch["raw_reward"],
        }


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_train_data_arrives_as_it_was_put_as_often_as_it_is_asked_for():
    options = {"num_cpus": 0, "enable_tensor_transport": ray_transport(ARGS.rollout_data_transport) is not None}
    manager = ray.remote(concurrency_groups={WATCH_GROUP: 1})(_Manager).options(**options).remote()
    trainers = [remote_class(_Trainer).options(**options).remote(_Trainer) for _ in range(2)]  # type: ignore[arg-type]
    boxes = ray.get(manager.generate.remote(), timeout=60)
    wanted = {"sums": [10, 69_999 * 35_000], "rewards": [0.5, 1.0], "raw_reward": [1, 2]}
    for _ in range(2):
        answers = ray.get([trainer.train_boxed.remote(0, boxes) for trainer in trainers], timeout=120)
        assert answers == [wanted, wanted]
