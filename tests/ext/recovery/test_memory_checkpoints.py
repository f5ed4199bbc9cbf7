"""Copies of ranks in the memory of keepers, over a real (private) Ray: what is valid after a death, and what is
lost."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from slime.ext.recovery import memory_checkpoints
from slime.ext.recovery.memory_checkpoints import COPY_GROUP, CopyingRank, MemoryCheckpoints
from slime.ext.recovery.state_copy import CopyFlags, StateCopy
from slime.ray.waiting import wait_for
from slime.utils.errors import DataError, EngineDiedError

pytestmark = pytest.mark.dist

# Ray's workers cannot import a test module by name, so its classes are sent as code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

CHUNK = memory_checkpoints.CHUNK_BYTES
FLAGS = CopyFlags(state_copy_interval=1, num_critic_only_steps=0, train_timeout_s=120.0)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def tensors_after(rank: int, rollout_id: int) -> dict[str, torch.Tensor]:
    """More than one chunk, and a number, different for every rank and rollout."""
    generator = torch.Generator().manual_seed(100 * rank + rollout_id)
    many = torch.randint(0, 255, (CHUNK + 1000,), generator=generator, dtype=torch.uint8)
    return {"many": many, "one": torch.tensor(rank + rollout_id / 10), "none": torch.zeros(0, 3)}


class _Rank(CopyingRank):
    """A rank whose state is the number of the last rollout."""

    def __init__(self, rank: int) -> None:
        self.worker, self.dies_in_copy = Namespace(rank=rank, state_copy=None), False

    def train(self, rollout_id: int) -> None:
        last = self.worker.state_copy
        tensors = tensors_after(self.worker.rank, rollout_id)
        self.worker.state_copy = StateCopy.take(
            rollout_id, tensors, {"steps": rollout_id}, room=last.data if last is not None else None
        )

    def die_in_the_next_copy(self) -> None:
        self.dies_in_copy = True

    @ray.method(concurrency_group=COPY_GROUP)
    def send_copy(self, number: int, keepers: Any, counting: int | None, timeout_s: float) -> list[bool]:
        if self.dies_in_copy:
            whole = self.worker.state_copy
            begun = keepers[0].begin.remote(number, whole.rollout_id, whole.header, whole.data.numel(), counting)
            ray.get([begun, keepers[0].write.remote(number, 0, whole.data.numpy()[:CHUNK])], timeout=60)
            os._exit(1)
        return super().send_copy(number, keepers, counting, timeout_s)

    def holds(self, rollout_id: int) -> bool:
        """Whether the state is the one after a rollout, bit for bit."""
        expected = tensors_after(self.worker.rank, rollout_id)
        tensors, values = self.worker.state_copy.read()
        is_same = all(tensors[name].equal(tensor) for name, tensor in expected.items())
        return is_same and tensors.keys() == expected.keys() and values == {"steps": rollout_id}


Rank = ray.remote(num_cpus=0, concurrency_groups={COPY_GROUP: 1})(_Rank)


def ask(refs: Any) -> Any:
    return wait_for(refs, what="the test's actors", timeout_s=120)


def train(copies: MemoryCheckpoints, ranks: list[Any], *rollouts: int) -> None:
    for rollout_id in rollouts:
        copies.finish_before(rollout_id)
        ask([rank.train.remote(rollout_id) for rank in ranks])
        copies.begin(rollout_id, ranks)


@pytest.fixture(scope="module")
def living(cluster) -> list[Any]:
    return [Rank.remote(0), Rank.remote(1)]


@pytest.fixture
def ranks(living) -> list[Any]:
    """Two ranks without a state, like new ones."""
    return anew(living)


def anew(ranks: list[Any]) -> list[Any]:
    ask([rank.drop_copy.remote() for rank in ranks])
    return ranks


@pytest.fixture
def copies():
    made = MemoryCheckpoints(FLAGS)
    yield made
    for keeper in made._keepers.values():
        ray.kill(keeper)


def test_new_ranks_get_the_last_state_of_those_before_them(ranks, copies):
    train(copies, ranks, 0, 1, 2)
    copies.finish_before(3)
    anew(ranks)
    assert copies.fetch(ranks) == 2
    assert ask([rank.holds.remote(2) for rank in ranks]) == [True, True]
    # They continue, and the keeper stores the next copy beside the valid one.
    train(copies, ranks, 3)
    copies.finish_before(4)
    assert copies.newest == 3


def test_an_actor_and_its_critic_go_back_to_the_last_rollout_that_both_were_copied_after(ranks, copies):
    """The critic, which trains first, is one rollout ahead when the actor dies."""
    actor, critic = ranks
    train(copies, [actor, critic], 0)
    copies.finish_before(1)
    ask(critic.train.remote(1))
    anew(ranks)
    assert (copies.fetch([actor]), copies.fetch([critic], first=1)) == (0, 0)
    assert ask([rank.holds.remote(0) for rank in ranks]) == [True, True]
    (keeper,) = copies._keepers.values()
    damage(keeper)  # of the critic's, noticed after the actor has loaded its own
    anew(ranks)
    assert (copies.fetch([actor]), copies.fetch([critic], first=1)) == (0, None)
    assert copies.fetch([actor]) is None


def test_a_death_in_the_middle_of_a_copy_leaves_every_rank_with_the_one_before(ranks, copies):
    ranks = [ranks[0], Rank.remote(1)]
    train(copies, ranks, 0)
    copies.finish_before(1)
    ask(ranks[1].die_in_the_next_copy.remote())
    train(copies, ranks, 1)
    with pytest.raises(EngineDiedError):
        copies.finish_before(2)
    ranks = [ranks[0], Rank.remote(1)]
    assert copies.fetch(anew(ranks)) == 0
    assert ask([rank.holds.remote(0) for rank in ranks]) == [True, True]
    # The first rank had sent all of the lost copy; it does not replace the valid one.
    train(copies, ranks, 1)
    assert copies.fetch(anew(ranks)) in (0, 1)
    assert ask([rank.holds.remote(copies.newest) for rank in ranks]) == [True, True]


def damage(keeper: Any) -> None:
    """Flip one bit of the second rank's copy."""

    def flip(held: Any) -> None:
        held._copies[1][-1].data[CHUNK + 17] ^= 1

    ask(keeper.__ray_call__.remote(flip))


def test_a_keeper_on_another_node_serves_where_the_first_one_is_damaged(ranks):
    keepers = [memory_checkpoints.Keeper.remote() for _ in range(3)]
    ask([rank.train.remote(5) for rank in ranks])
    copies = [rank.send_copy.remote(number, keepers, None, 60.0) for number, rank in enumerate(ranks)]
    assert ask(copies) == [[True] * 3] * 2
    damage(keepers[0])
    ray.kill(keepers[1])
    anew(ranks)
    ask([rank.fetch_copy.remote(number, 5, keepers, 60.0) for number, rank in enumerate(ranks)])
    assert ask([rank.holds.remote(5) for rank in ranks]) == [True, True]
    with pytest.raises(DataError, match="digest.*died"):
        ask(ranks[1].fetch_copy.remote(1, 5, keepers[:2], 60.0))
    with pytest.raises(DataError, match="has no copy after rollout 4"):
        ask(ranks[1].fetch_copy.remote(1, 4, keepers, 60.0))


def test_a_dead_keeper_means_the_checkpoint(ranks, copies, caplog):
    train(copies, ranks, 0)
    copies.finish_before(1)
    (keeper,) = copies._keepers.values()
    ray.kill(keeper)
    anew(ranks)
    assert copies.fetch(ranks) is None
    assert "resumes from its last checkpoint" in caplog.text


def test_the_place_of_a_dead_keeper_is_taken_at_the_next_copy(ranks, copies, caplog):
    train(copies, ranks, 0)
    copies.finish_before(1)
    ray.kill(next(iter(copies._keepers.values())))
    train(copies, ranks, 1, 2)
    copies.finish_before(3)
    assert "is lost; the next copy starts another" in caplog.text
    anew(ranks)
    assert copies.fetch(ranks) == 2


def test_nothing_is_copied_between_intervals_or_without_memory():
    every_third = MemoryCheckpoints(replace(FLAGS, state_copy_interval=3))
    off = MemoryCheckpoints(replace(FLAGS, state_copy_interval=None))
    critic_first = MemoryCheckpoints(replace(FLAGS, num_critic_only_steps=2))
    for copies, rollouts in ((every_third, (0, 1, 3)), (off, (0, 1)), (critic_first, (0, 1))):
        for rollout_id in rollouts:
            copies.begin(rollout_id, ["a rank that nobody asks"])
        assert copies._under_way is None and copies.fetch([]) is None
