"""Engines that die, hang or return nonsense are replaced: real Ray actors, a real router, scripted servers."""

from __future__ import annotations

import os
import signal
import socket
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import ray
import requests

from slime.backends.sglang_utils.router_process import RouterHandle, start_router
from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.ray.engines import actor as engine_actor
from slime.ray.engines import group as group_module
from slime.ray.engines.actor import PortCursors
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import EngineEvent, EngineState
from slime.ray.engines.models import wait_until_serving
from slime.ray.engines.monitor import HealthMonitor, StallMonitor
from slime.ray.gpus import GpuSlice
from slime.ray.waiting import WATCH_GROUP
from slime.utils.errors import EngineDiedError, EngineError, PortTakenError
from slime.utils.net import get_free_port
from tests.dist.scripted_server import ScriptedEngineActor, engine_flags, logical_gpus
from tests.eventually import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

ARGS = engine_flags(hf_checkpoint="/none", debug_rollout_only=False)
WAITS = {"interval_s": 1.0, "timeout_s": 3.0}
FOUND_WITHIN_S = sum(WAITS.values())
STALL_S = 4.0
SLACK_S = 120.0
"""Seconds, for a machine with a load of ten; the monitor's own deadlines are ten times shorter."""


@pytest.fixture(scope="module")
def gpus() -> GpuSlice:
    with logical_gpus(4) as reserved:
        yield reserved


@pytest.fixture(scope="module")
def router() -> RouterHandle:
    handle = start_router(
        ARGS, host="127.0.0.1", port=get_free_port(26800), prometheus_port=get_free_port(27800), timeout_s=300
    )
    yield handle
    handle.stop()


@pytest.fixture
def make_group(gpus, router, monkeypatch):
    monkeypatch.setattr(
        engine_actor, "RemoteEngine", ray.remote(concurrency_groups={WATCH_GROUP: 1})(ScriptedEngineActor)
    )
    groups: list[EngineGroup] = []

    def make(
        num_gpus: int = 2,
        *,
        per_engine: int = 1,
        takes_updates: bool = True,
        rank_offset: int = 0,
        restarts: bool = True,
        **overrides,
    ):
        config = ServerGroupConfig(
            worker_type="regular", num_gpus=num_gpus, num_gpus_per_engine=per_engine, overrides=overrides
        )
        model = ModelConfig(name="m", model_path="/none", update_weights=takes_updates, server_groups=(config,))
        group = EngineGroup(
            args=ARGS, gpus=gpus, model=model, config=config, gpu_offset=0, rank_offset=rank_offset, router=router,
            needs_offload=False, cursors=PortCursors(), restarts=restarts,
        )  # fmt: skip
        groups.append(group)
        group.start()
        wait_until_serving([group], 300.0)
        return group

    yield make
    for group in groups:
        for index in range(len(group.engines)):
            group._kill(index)


@pytest.fixture
def watched(make_group):
    group = make_group(2)
    monitor = HealthMonitor(group, **WAITS, first_wait_s=0.0)
    monitor.resume()
    yield group
    monitor.stop()


def facts(group: EngineGroup) -> list[dict]:
    return ray.get([actor.facts.remote() for actor in group.all_engines], timeout=120)


def listed(router: RouterHandle) -> set[str]:
    return {worker["url"] for worker in ServerControl(router.url).get("/workers")["workers"]}


def kill(group: EngineGroup) -> None:
    os.kill(facts(group)[0]["pid"], signal.SIGKILL)


def hang(group: EngineGroup) -> None:
    os.kill(facts(group)[0]["pid"], signal.SIGSTOP)


def garble(group: EngineGroup) -> None:
    requests.post(f"{group.urls[0]}/script", json={"is_garbled": True}, timeout=10).raise_for_status()


def kill_actor(group: EngineGroup) -> None:
    ray.kill(group.all_engines[0])


@pytest.mark.parametrize("fault", [kill, hang, garble, kill_actor], ids=lambda fault: fault.__name__)
def test_a_faulty_engine_is_evicted_and_restarted_on_the_same_gpu_without_touching_the_other(watched, router, fault):
    before, old_url, other_url = facts(watched), watched.urls[0], watched.urls[1]
    assert listed(router) >= {old_url, other_url}
    fault(watched)
    wait_until(lambda: watched.states[0] is not EngineState.SERVING, "the fault is found", timeout_s=FOUND_WITHIN_S + SLACK_S)
    wait_until(lambda: watched.states[0] is EngineState.UPDATING, "another engine is up", timeout_s=300)
    assert old_url not in listed(router) and other_url in listed(router)
    assert watched.urls[0] not in listed(router)  # it has no weights yet
    after = facts(watched)
    assert after[1] == before[1]
    assert after[0]["base_gpu_id"] == before[0]["base_gpu_id"] and after[0]["rank"] == 0
    assert after[0]["pid"] != before[0]["pid"]
    assert not _is_running(before[0]["pid"])
    watched.report(0, EngineEvent.PUSH_DONE)
    assert watched.urls[0] in listed(router)
    assert watched.states == [EngineState.SERVING] * 2


def _is_running(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_fault_tolerance_an_engine_that_hangs_is_named_and_nothing_is_restarted(make_group):
    group = make_group(2, restarts=False)
    monitor = StallMonitor(group, **WAITS, stall_timeout_s=STALL_S)
    monitor.resume()
    time.sleep(2 * STALL_S)
    assert group.given_up is None
    before = facts(group)
    hang(group)
    wait_until(lambda: group.given_up is not None, "the group is given up", timeout_s=STALL_S + FOUND_WITHIN_S + SLACK_S)
    assert group.given_up.startswith(group.name_of(0))
    assert "no sign of life" in group.given_up and "--rollout-stall-timeout-s 4" in group.given_up
    monitor.stop()
    os.kill(before[0]["pid"], signal.SIGCONT)
    assert group.states == [EngineState.RETIRED, EngineState.SERVING] and facts(group) == before


@pytest.mark.parametrize("taken_times", [1, 3])
def test_an_engine_whose_port_was_taken_starts_at_others(make_group, monkeypatch, taken_times):
    allocate = group_module.allocate_addresses
    with socket.create_server(("127.0.0.1", 0)) as other:
        allocated = []

        def first_are_taken(engines, **rest):
            addresses = allocate(engines, **rest)
            if len(allocated) < taken_times:
                addresses[0] = replace(addresses[0], host="127.0.0.1", port=other.getsockname()[1])
            allocated.append(len(engines))
            return addresses

        monkeypatch.setattr(group_module, "allocate_addresses", first_are_taken)
        if taken_times == 3:
            with pytest.raises(PortTakenError, match="[Aa]ddress already in use"):
                make_group(2)
            return
        group = make_group(2)
    assert allocated == [2, 1]  # the other engine kept running
    assert group.states == [EngineState.SERVING] * 2
    assert all(requests.get(f"{url}/health", timeout=10).ok for url in group.urls)
    assert len(set(group.urls)) == 2


def test_an_engine_that_cannot_start_again_ends_the_run_with_the_first_cause(make_group, monkeypatch):
    group = make_group(1)
    monkeypatch.setattr(group_module, "MAX_START_ATTEMPTS", 2)

    def refuse(*arguments, **keywords):
        raise EngineError("no memory is left on the GPU")

    monkeypatch.setattr(group_module, "start_engine_actor", refuse)
    group.report(0, EngineEvent.DIED, "it was killed by signal 9")
    with pytest.raises(EngineDiedError, match="killed by signal 9.*2 replacements did not start.*no memory is left"):
        group.wait_settled(300)
    assert group.states == [EngineState.RETIRED]


def test_an_engine_over_two_nodes_has_an_actor_on_each_and_one_rendezvous(make_group):
    # A rank offset that is not a multiple of the nodes: the group before this one had a single actor.
    group = make_group(4, per_engine=4, rank_offset=1)
    first, second = facts(group)
    assert (group.nodes_per_engine, len(group.engines)) == (2, 1)
    assert (first["node_rank"], second["node_rank"]) == (0, 1)
    assert (first["rank"], second["rank"]) == (1, 2)
    assert (first["base_gpu_id"], second["base_gpu_id"]) == (0, 2)
    assert first["dist_init_addr"] == second["dist_init_addr"] is not None
    assert first["port"] != second["port"]
    # The second node's process serves no HTTP for us, but without it the engine is dead.
    os.kill(second["pid"], signal.SIGKILL)
    wait_until(lambda: group.find_exited(5.0), "the exit is found", timeout_s=SLACK_S)
    assert list(group.find_exited(5.0)) == [0]
    group.report(0, EngineEvent.DIED, "a node")
    group.wait_settled(300)
    again = facts(group)
    assert {fact["pid"] for fact in again}.isdisjoint({first["pid"], second["pid"]})
    assert again[0]["dist_init_addr"] == again[1]["dist_init_addr"]
