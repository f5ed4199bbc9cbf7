"""The trainer's GPUs after a node has died, with a table in place of Ray: its own, spare ones, none."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ext.recovery import trainer_gpus
from slime.ext.recovery.trainer_gpus import TrainerGpus, choose
from slime.ray.gpus import GpuSlice
from slime.utils.errors import ProcessError

GROUP: Any = "the placement group"


class Cluster:
    """Ray's table of bundles; time passes while somebody waits."""

    def __init__(self) -> None:
        self.table = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
        self.silent: set[str] = set()
        self.now_s = 0.0
        self.events: dict[float, Any] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True} for name in "abcd"]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [at_s for at_s in self.events if at_s <= self.now_s]:
            self.table |= self.events.pop(at_s)


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(trainer_gpus, "placement_group_table", lambda group: {"bundles_to_node_id": made.table})
    here = Namespace(get_node_id=lambda: "the driver's")
    monkeypatch.setattr(trainer_gpus, "ray", Namespace(nodes=made.nodes, get_runtime_context=lambda: here))
    monkeypatch.setattr(trainer_gpus, "answers", lambda node: node["NodeID"] not in made.silent)
    monkeypatch.setattr(trainer_gpus, "time", Namespace(monotonic=lambda: made.now_s, sleep=made.sleep))
    found = lambda group, bundles, share: [("address", 7 - bundle) for bundle in bundles]  # noqa: E731
    monkeypatch.setattr(trainer_gpus, "bundle_identities", found)
    return made


def gpus(spare_nodes: int) -> TrainerGpus:
    """Two ranks on node a, an engine on b, and c as spare, or unused."""
    args = Namespace(
        actor_num_nodes=1, actor_num_gpus_per_node=2, spare_nodes=spare_nodes, cluster_wait_timeout_s=60.0
    )
    everything = GpuSlice(GROUP, [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1])
    return TrainerGpus(args, {"actor": everything, "spare": everything.from_offset(6 - 2 * spare_nodes)})


def test_ranks_whose_node_lives_start_where_they_were_at_once(cluster):
    assert gpus(1).find_again() == GpuSlice(GROUP, [0, 1], [0, 1])
    assert cluster.now_s == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_node_that_does_not_come_back_is_left_for_the_reserve_and_is_the_reserve_then(cluster, is_known):
    """Whether Ray knows of the death, or the node refuses connections."""
    found = gpus(1)
    if is_known:
        cluster.table |= {0: "", 1: ""}
    else:
        cluster.silent.add("a")
    assert found.find_again() == GpuSlice(GROUP, [4, 5], [0, 1])
    assert cluster.now_s == trainer_gpus.NODE_RETURN_S
    cluster.silent.add("c")
    cluster.events = {12.0: {0: "d", 1: "d"}}
    assert found.find_again() == GpuSlice(GROUP, [0, 1], [7, 6])  # according to the tasks on the new node


def test_a_node_that_comes_back_in_time_is_taken_in(cluster):
    found = gpus(1)
    cluster.table |= {0: "", 1: ""}
    cluster.events = {3.0: {0: "d", 1: "d"}}
    assert found.find_again() == GpuSlice(GROUP, [0, 1], [7, 6])
    assert cluster.now_s == 3.0


@pytest.mark.parametrize("spare_nodes", [0, 1])
def test_a_node_that_is_to_go_is_left_at_once_for_the_reserve_and_else_waited_for(cluster, spare_nodes):
    found = gpus(spare_nodes)
    assert found.is_elsewhere(0)
    cluster.events = {6.0: {0: "", 1: ""}, 9.0: {0: "d", 1: "d"}}
    found.avoid([0], 30.0)
    moved = GpuSlice(GROUP, [4, 5], [0, 1]) if spare_nodes else GpuSlice(GROUP, [0, 1], [7, 6])
    assert found.find_again() == moved
    assert cluster.now_s == (0.0 if spare_nodes else 9.0)


def test_without_a_node_the_run_ends_with_what_is_missing(cluster):
    found = gpus(0)
    cluster.table |= {0: "", 1: ""}
    with pytest.raises(ProcessError, match=r"2 of the trainer's 2 GPUs .* within 60 s .* of 0 spare GPUs 0 "):
        found.find_again()


@pytest.mark.parametrize(
    ("reserve", "placed", "chosen"),
    [
        ([8, 9], {0, 1, 2, 3, 8, 9}, [0, 1, 2, 3]),
        ([8, 9], {0, 1, 8, 9}, [0, 1, 8, 9]),
        ([8, 9], {1, 2, 3, 8, 9}, [8, 1, 2, 3]),
        ([8, 9], {0, 1, 9}, None),  # the spare node died as well, except for one GPU
        ([], {0, 1}, None),
        ([], {0, 1, 2, 3}, [0, 1, 2, 3]),
    ],
)
def test_a_rank_keeps_its_gpu_or_gets_one_in_reserve(reserve, placed, chosen):
    assert choose([0, 1, 2, 3], reserve, dict.fromkeys(placed, "a node")) == chosen
