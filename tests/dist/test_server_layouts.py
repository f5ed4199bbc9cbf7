"""Layouts of engines with real Ray actors and real routers, on logical GPUs, with scripted servers."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace

import psutil
import pytest
import ray

from slime.backends.sglang_utils.server_control import ServerControl
from slime.ray.engines import actor as engine_actor
from slime.ray.engines.fleet import EngineFleet
from slime.ray.engines.models import start_rollout_servers
from slime.ray.gpus import GpuSlice
from slime.ray.waiting import WATCH_GROUP
from slime.utils.errors import EngineDiedError
from slime.utils.http_utils import get_rollout_num_engines
from tests.dist.scripted_server import ScriptedEngineActor, engine_flags, logical_gpus

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

NUM_GPUS = 8


@pytest.fixture(scope="module")
def gpus() -> GpuSlice:
    with logical_gpus(NUM_GPUS) as reserved:
        yield reserved


def arguments(**given) -> Namespace:
    base = {
        "actor_num_gpus_per_node": 1, "rollout_num_gpus": NUM_GPUS, "rollout_external": False,
        "prefill_num_servers": None, "sglang_config": None, "sglang_router_ip": None, "sglang_router_port": None,
        "sglang_model_routers": None, "critic_args": None, "sglang_pp_size": 1,
        "sglang_enable_deterministic_inference": False, "rollout_stall_timeout_s": 0.0, "debug_train_only": False,
        "hf_checkpoint": "/policy", "rollout_health_check_interval": 1.0, "rollout_health_check_timeout": 2.0,
        "weight_loaders": (), "shutdown_timeout_s": 15.0,
    }  # fmt: skip
    return engine_flags(**base | given)


@pytest.fixture
def start(gpus, monkeypatch):
    monkeypatch.setattr(
        engine_actor, "RemoteEngine", ray.remote(concurrency_groups={WATCH_GROUP: 1})(ScriptedEngineActor)
    )
    fleets: list[EngineFleet] = []

    def begin(start_servers=start_rollout_servers, **given) -> EngineFleet:
        args = arguments(**given)
        fleet = EngineFleet(args, start_servers(args, gpus))
        fleets.append(fleet)
        fleet.wait_ready()
        return fleet

    yield begin
    for fleet in fleets:
        fleet.stop()
        for group in fleet.groups:
            for actor in group.all_engines:
                if actor is not None:
                    ray.kill(actor)


def facts(actors) -> list[dict]:
    return ray.get([actor.facts.remote() for actor in actors if actor is not None], timeout=120)


def listed(router) -> dict[str, str]:
    workers = ServerControl(router.url).get("/workers")["workers"]
    return {worker["url"]: worker["worker_type"] for worker in workers}


YAML = """
sglang:
  - name: policy
    server_groups:
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1, overrides: {context-length: 4096}}
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4}
  - name: judge
    model_path: /judge
    server_groups:
      - {worker_type: regular, num_gpus: 1}
"""


def test_two_models_with_groups_of_their_own_a_gap_and_an_engine_over_two_nodes(start, tmp_path):
    (tmp_path / "engines.yaml").write_text(YAML)
    fleet = start(sglang_config=str(tmp_path / "engines.yaml"))
    policy, judge = fleet.servers
    assert get_rollout_num_engines(fleet.args) == 3, "two small ones and a large one; the judge has its own requests"
    small, gap, large = policy.groups
    assert [len(group.all_engines) for group in (small, gap, large)] == [2, 1, 2]
    assert gap.engines == [None]
    told = facts(small.all_engines + large.all_engines + judge.groups[0].all_engines)
    assert [fact["base_gpu_id"] for fact in told] == [0, 1, 3, 5, 7]
    assert [fact["node_rank"] for fact in told] == [0, 0, 0, 1, 0]
    assert len({fact["rank"] for fact in told}) == 5
    assert told[0]["overrides"] == {"context_length": 4096} and told[2]["overrides"] == {}
    assert told[2]["dist_init_addr"] == told[3]["dist_init_addr"] != told[0]["dist_init_addr"]
    # Each model has a router; the large engine's second node is in neither.
    assert set(fleet.args.sglang_model_routers) == {"policy", "judge"}
    assert (fleet.args.sglang_router_ip, fleet.args.sglang_router_port) == fleet.args.sglang_model_routers["policy"]
    assert set(listed(policy.router)) == {*small.urls, *large.urls}
    assert set(listed(judge.router)) == set(judge.groups[0].urls)
    # The judge keeps its weights; offsets count from the first GPU of the placement, after the trainer's.
    engines = fleet.weights.updatable()
    assert [(engine.num_gpus, engine.gpu_offset) for engine in engines.engines] == [(1, 1), (1, 2), (4, 4)]
    assert engines.num_new == 3
    fleet.weights.connected()
    assert fleet.weights.updatable().num_new == 0
    assert fleet.weights.without_weights().handles == []


def test_prefill_and_decode_groups_are_registered_as_such_with_bootstrap_ports(start):
    fleet = start(prefill_num_servers=1, rollout_num_gpus=3)
    prefill, decode = fleet.servers[0].groups
    assert listed(fleet.servers[0].router) == {prefill.urls[0]: "prefill"} | dict.fromkeys(decode.urls, "decode")
    told = facts(prefill.all_engines + decode.all_engines)
    assert told[0]["disaggregation_bootstrap_port"] == prefill.bootstrap_ports[0] is not None
    assert [fact["disaggregation_bootstrap_port"] for fact in told[1:]] == [None, None]


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_router_that_is_gone_comes_back_with_its_address_and_its_list(start, what):
    fleet = start(prefill_num_servers=1, rollout_num_gpus=2)
    server = fleet.servers[0]
    before, list_before = server.router.url, listed(server.router)
    root = psutil.Process(server.router.process.pid)
    for process in [*root.children(recursive=True), root]:
        process.send_signal(what)
    time.sleep(0.5)
    with pytest.raises(EngineDiedError, match="has ended|does not answer within 2 s"):
        fleet.check()
    fleet.args.use_fault_tolerance = True
    fleet._next_router_check_s = 0.0
    fleet.check()
    assert server.router.is_alive() and server.router.url == before and listed(server.router) == list_before


def test_encoders_start_first_and_the_others_are_told_where_they_listen(start, tmp_path):
    (tmp_path / "engines.yaml").write_text(
        "sglang:\n- name: m\n  server_groups:\n"
        "  - {worker_type: regular, num_gpus: 1}\n  - {worker_type: encoder, num_gpus: 2}\n"
    )
    fleet = start(sglang_config=str(tmp_path / "engines.yaml"), rollout_num_gpus=3)
    regular, encoders = fleet.servers[0].groups
    (told,) = facts(regular.all_engines)
    assert told["overrides"] == {"language_only": True, "encoder_urls": encoders.urls}
    assert set(listed(fleet.servers[0].router)) == set(regular.urls)
    assert len(fleet.weights.updatable().handles) == 1


def test_a_router_of_the_user_is_used_and_not_replaced(start):
    owner = start(rollout_num_gpus=1)
    router = owner.servers[0].router
    fleet = start(rollout_num_gpus=1, sglang_router_ip=router.host, sglang_router_port=router.port)
    assert fleet.servers[0].router.process is None
    assert set(listed(router)) == {owner.servers[0].groups[0].urls[0], fleet.servers[0].groups[0].urls[0]}
    fleet.stop()
    assert router.is_alive()
