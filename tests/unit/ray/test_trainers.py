"""Actor and critic together: which actor rank gets which critic rank's values, and what a save writes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ray.trainers import Trainers, scatter_values
from slime.utils.errors import ConfigError


def ranks(dp: int, cp: int, tp: int, pp: int) -> list[dict[str, int]]:
    """Layouts of a group in Megatron's order: tensor fastest, then context, data, pipeline."""
    return [
        {"dp_size": dp, "cp_size": cp, "dp_rank": d, "cp_rank": c, "is_last_stage": int(p == pp - 1)}
        for p in range(pp)
        for d in range(dp)
        for c in range(cp)
        for _ in range(tp)
    ]


@pytest.mark.parametrize(
    ("values", "critic", "actor", "dealt"),
    [
        (["a", "b"], ranks(2, 1, 1, 1), ranks(2, 1, 1, 1), ["a", "b"]),
        ([None, None, "a", "b"], ranks(2, 1, 1, 2), ranks(2, 1, 1, 2), [None, None, "a", "b"]),
        (["00", "00", "10", "10"], ranks(2, 1, 2, 1), ranks(2, 1, 1, 2), [None, None, "00", "10"]),
        (["00", "01", "10", "11"], ranks(2, 2, 1, 1), ranks(2, 2, 1, 1), ["00", "01", "10", "11"]),
    ],
    ids=["equal layouts", "the last stage alone has values", "other tensor and pipeline sizes", "context parallelism"],
)
def test_a_rank_gets_the_values_of_its_samples(values, critic, actor, dealt):
    assert scatter_values(values, critic, actor) == dealt


def test_other_data_parallel_sizes_are_refused():
    with pytest.raises(ConfigError, match="must be equal"):
        scatter_values(["a", "b"], ranks(2, 1, 1, 1), ranks(1, 1, 2, 1))


def test_a_checkpoint_that_counts_is_not_written_again() -> None:
    """A rank died after the tracker was written, and the save is repeated."""
    done: list[str] = []

    class Trainer:
        checkpoints = Namespace(last=3)

        def write_checkpoint(self, rollout_id: int, force_sync: bool) -> None:
            done.append(f"write {rollout_id}")

        def publish_checkpoint(self, rollout_id: int) -> None:
            done.append(f"publish {rollout_id}")

    actor: Any = Trainer()
    for rollout_id in (3, 4):
        Trainers(actor, None).save(rollout_id, lambda: done.append("position"), force_sync=False)
    assert done == ["write 4", "position", "publish 4"]
