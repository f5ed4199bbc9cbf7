"""A cluster of several nodes on this machine: who gets which GPU, the settings of multi-node engines, the
environment of a recipe's job, and the messages when a node does not come or dies.

``python -m tests.nodes`` does the same with four nodes of eight GPUs.
"""

from __future__ import annotations

import pytest

from slime.ray.gpus import create_placement_groups
from slime.ray.waiting import wait_for
from slime.utils.errors import ConfigError, EngineDiedError
from tests.nodes.cluster import logical_nodes
from tests.nodes.layouts import Layout, arguments, place
from tests.unit.scripts.test_run_scripts import submitted

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

COLOCATED = (
    "--colocate --rollout-num-gpus 4 --actor-num-nodes 2 --actor-num-gpus-per-node 2 --num-gpus-per-node 2 "
    '--rollout-num-gpus-per-engine 4 --no-offload-train --train-env-vars \'{"NCCL_SOCKET_IFNAME": "bond7"}\''
)
APART = (
    "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --num-gpus-per-node 2 "
    "--rollout-num-gpus-per-engine 1"
)


NETWORK = ("NCCL_", "GLOO_", "TP_", "NVSHMEM_", "SGLANG_", "MC_", "NVTE_", "MLP_", "no_proxy", "NO_PROXY")
"""Prefixes of the variables that a multi-node recipe sets for every process."""


@pytest.fixture(scope="module")
def variables(tmp_path_factory) -> dict[str, str]:
    """The variables that GLM-5.2's recipe gives its job."""
    folder = tmp_path_factory.mktemp("recipe")
    _, given = submitted("scripts/run-glm5.2-744B-A40B.sh", folder, SOCKET_IFNAME="bond7")
    # gloo of this test must work here, on the existing interface.
    kept = {name: value for name, value in given.items() if name.startswith(NETWORK)}
    return kept | {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def nodes(variables):
    with logical_nodes(2, 2, variables) as cluster:
        yield cluster


@pytest.fixture
def placed():
    layouts: list[Layout] = []
    yield layouts.append
    for layout in layouts:
        layout.take_down()


def test_colocated_ranks_and_an_engine_over_two_nodes(nodes, variables, tmp_path, placed):
    layout = place(arguments(tmp_path, COLOCATED))
    placed(layout)
    first, second = nodes.addresses
    assert layout.ranks() == [(0, first, 0), (1, first, 1), (2, second, 0), (3, second, 1)]
    head, tail = layout.engines()
    assert [(engine["node"], engine["gpu"], engine["node_rank"]) for engine in (head, tail)] == [
        (first, 0, 0),
        (second, 0, 1),
    ]
    assert {engine["nnodes"] for engine in (head, tail)} == {2}
    assert {engine["tp_size"] for engine in (head, tail)} == {4}
    # Both meet at one address, the first node's; each listens on its own.
    assert head["dist_init_addr"] == tail["dist_init_addr"]
    assert head["dist_init_addr"].startswith(f"{first}:")
    assert [engine["host"] for engine in (head, tail)] == [first, second]
    names = list(variables)
    asked = [actor.ask.remote("variables", names) for actor in layout.trainer.actors]
    asked += [actor.variables.remote(names) for actor in layout.groups[0].all_engines]
    found = wait_for(asked, what="them", timeout_s=60)
    assert found == [variables] * 6
    assert variables["NCCL_SOCKET_IFNAME"] == variables["TP_SOCKET_IFNAME"] == "bond7"
    assert variables["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == "64"


def test_engines_apart_from_the_trainer_follow_it(nodes, tmp_path, placed):
    layout = place(arguments(tmp_path, APART), with_trainer=False)
    placed(layout)
    first, second = nodes.addresses
    engines = [(engine["node"], engine["gpu"], engine["nnodes"], engine["node_rank"]) for engine in layout.engines()]
    assert engines == [(second, 0, 1, 0), (second, 1, 1, 0)]
    actor = layout.gpus["actor"]
    assert actor.gpu_ids == [0, 1, 0, 1] and first != second


def test_a_node_that_never_comes_is_missed_by_name(nodes, tmp_path):
    flags = "--colocate --rollout-num-gpus 6 --actor-num-nodes 3 --actor-num-gpus-per-node 2 --num-gpus-per-node 2"
    args = arguments(tmp_path, f"{flags} --cluster-wait-timeout-s 2 --global-batch-size 240")
    with pytest.raises(ConfigError) as caught:
        create_placement_groups(args)
    first, second = nodes.addresses
    assert "needs 6 GPUs" in str(caught.value)
    assert f"2 nodes: {first} with 2 GPUs, {second} with 2 GPUs" in str(caught.value)
    assert "--actor-num-nodes" in str(caught.value)


def test_a_node_that_leaves_ends_every_wait_with_an_error_that_names_it(nodes, tmp_path, placed):
    layout = place(arguments(tmp_path, COLOCATED))
    placed(layout)
    waiting = [actor.ask.remote("wait_for_ever") for actor in layout.trainer.actors]
    leaver = "127.0.0.2"
    ranks = "01" if nodes.addresses[0] == leaver else "23"
    nodes.remove(leaver)
    with pytest.raises(EngineDiedError, match=rf"actor rank [{ranks}] died"):
        wait_for(waiting, what="a step", timeout_s=300)
