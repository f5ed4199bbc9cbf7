"""How long and how often an engine is restarted; tests/dist/test_engine_replacement does it with processes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.ray.engines import actor as actor_module
from slime.ray.engines import group as group_module
from slime.ray.engines.actor import PortCursors, allocate_addresses
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import EngineEvent, EngineState
from slime.utils.errors import DeadlineError, EngineDiedError

FLAGS = {"num_gpus_per_node": 1, "engine_start_timeout_s": 50.0, "debug_rollout_only": False}


class Ray:
    """Records waits and kills; never answers a call."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(refs)
        self.events.append((refs, timeout))
        return [], refs

    def kill(self, actor: Any) -> None:
        self.events.append(actor.name)


@pytest.fixture
def fake(monkeypatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(actor_module, "ray", made)
    return made


def make_group() -> EngineGroup:
    config = ServerGroupConfig(worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides={})
    group = EngineGroup(
        args=Namespace(**FLAGS), gpus=Namespace(bundle_indices=[0]),  # type: ignore[arg-type]
        model=ModelConfig(name="m", model_path="/none", update_weights=True, server_groups=(config,)), config=config,
        gpu_offset=0, rank_offset=0, router=None, needs_offload=False, cursors=PortCursors(),
    )  # fmt: skip
    group.states = [EngineState.SERVING]
    return group


def put_engine(group: EngineGroup, name: str) -> None:
    group.all_engines = [Namespace(name=name, kill_server=Namespace(remote=lambda: f"end of {name}"))]


def test_three_starts_have_the_flag_and_two_minutes_each_and_the_run_ends_with_the_first_death(monkeypatch, fake):
    group, given = make_group(), []
    put_engine(group, "first")

    def launch(indices: list[int], *, register: bool) -> list[str]:
        put_engine(group, f"replacement {len(given) + 1}")
        return ["ref"]

    def wait_for(refs: Any, *, what: str, timeout_s: float) -> None:
        given.append(timeout_s)
        raise DeadlineError(what)

    monkeypatch.setattr(group, "_launch", launch)
    monkeypatch.setattr(group_module, "wait_for", wait_for)
    group.report(0, EngineEvent.DIED, "it was killed by signal 9")
    with pytest.raises(EngineDiedError, match="killed by signal 9.*3 replacements did not start: DeadlineError"):
        group.wait_settled(60)
    assert given == pytest.approx([50 + 120] * 3, abs=1) and group.states == [EngineState.RETIRED]
    # Each may take 15 s to end, does not end, and is killed before the next one starts.
    names = ["first", "replacement 1", "replacement 2", "replacement 3"]
    assert fake.events == [event for name in names for event in (([f"end of {name}"], 15), name)]


def test_an_engine_is_started_again_five_times_in_a_rollout(monkeypatch, fake):
    group, starts = make_group(), []
    monkeypatch.setattr(group, "_launch", lambda indices, register: starts.append(indices) or ["ref"])
    monkeypatch.setattr(group_module, "wait_for", lambda refs, what, timeout_s: None)
    for death in range(5):
        group.report(0, EngineEvent.DIED, f"death {death}")
        group.wait_settled(60)
        assert group.states == [EngineState.UPDATING] and len(starts) == death + 1
    group.report(0, EngineEvent.DIED, "death 5")
    with pytest.raises(EngineDiedError, match="died 6 times within one rollout or evaluation, last: death 5"):
        group.wait_settled(60)
    assert len(starts) == 5


def test_an_engine_that_cannot_be_killed_is_started_again_all_the_same(monkeypatch, fake):
    group, starts = make_group(), []
    put_engine(group, "first")
    monkeypatch.setattr(fake, "kill", lambda actor: {}[actor.name])
    monkeypatch.setattr(group, "_launch", lambda indices, register: starts.append(indices) or ["ref"])
    monkeypatch.setattr(group_module, "wait_for", lambda refs, what, timeout_s: None)
    group.report(0, EngineEvent.DIED, "it was killed by signal 9")
    group.wait_settled(60)
    assert group.states == [EngineState.UPDATING] and starts == [[0]]


def test_an_engine_that_dies_while_it_is_registered_is_not_taken_for_listed(monkeypatch, fake):
    group = make_group()
    group.all_engines = [Namespace(register=Namespace(remote=lambda: "registered"), kill_server=None)]
    group.states = [EngineState.UPDATING]

    def wait_for(ref: Any, *, what: str, timeout_s: float) -> None:
        if ref == "registered":
            group.report(0, EngineEvent.DIED, "it was killed by signal 9")
            group.wait_settled(10)

    monkeypatch.setattr(group_module, "wait_for", wait_for)
    monkeypatch.setattr(group, "_launch", lambda indices, register: ["ref"])
    group.report(0, EngineEvent.PUSH_DONE)
    assert group.states == [EngineState.UPDATING] and group.is_listed == [False]


def test_ports_that_an_actor_does_not_name_cost_the_attempt_no_more_than_a_start_may_take(monkeypatch):
    given: list[float] = []
    answers: list[Any] = [("10.0.0.1", 21000)]

    def wait_for(ref: Any, *, what: str, timeout_s: float) -> Any:
        given.append(timeout_s)
        if not answers:
            raise DeadlineError(what)
        return answers.pop()

    monkeypatch.setattr(actor_module, "wait_for", wait_for)
    engine = Namespace(_get_current_node_ip_and_free_port=Namespace(remote=lambda start, count: "ref"))
    with pytest.raises(DeadlineError, match="name a free port"):
        allocate_addresses([engine], nodes_per_engine=1, worker_type="regular", cursors=PortCursors(), timeout_s=50.0)
    assert given == pytest.approx([50] * 2, abs=1)


def test_the_ports_of_engines_that_start_again_and_again_stay_below_those_of_the_kernel(monkeypatch):
    monkeypatch.setattr(actor_module, "wait_for", lambda ref, **_: ref)
    engine = Namespace(_get_current_node_ip_and_free_port=Namespace(remote=lambda start, count: ("10.0.0.1", start)))
    sizes = {"nodes_per_engine": 1, "worker_type": "regular", "cursors": PortCursors(), "dp_size": 8}
    for _ in range(1000):
        [address] = allocate_addresses([engine], **sizes, timeout_s=50.0)
        meeting = int((address.dist_init_addr or "").rpartition(":")[2])
        assert all(21000 <= port < 32768 for port in (address.port, address.nccl_port, meeting + 37))


def test_a_router_is_revived_before_an_engine_that_registers_there_starts(monkeypatch, fake):
    group, events = make_group(), []
    group.takes_updates = False
    group.revive_router = lambda: events.append("router")
    monkeypatch.setattr(group, "_launch", lambda indices, register: events.append(register) or ["ref"])
    monkeypatch.setattr(group_module, "wait_for", lambda refs, what, timeout_s: None)
    group.report(0, EngineEvent.DIED, "it was killed by signal 9")
    group.wait_settled(60)
    assert group.states == [EngineState.SERVING] and events == ["router", True]


def test_what_dies_of_a_start_beside_the_servers_that_are_waited_for_ends_it(monkeypatch):
    """A router, and nodes of an engine without a server, whose calls return at once."""
    group = make_group()
    group.all_engines = [
        Namespace(name=f"node {node}", describe_exit=Namespace(remote=lambda node=node: node)) for node in range(2)
    ]
    group.args.num_gpus_per_node, group.starting = 1, {0: ["waited for", "returned"]}
    group.nodes_per_engine = 2
    monkeypatch.setattr(group_module, "ray", Namespace(wait=lambda refs, **_: (["returned"], ["waited for"])))
    asked: list[Any] = []
    monkeypatch.setattr(group_module, "exits_of", lambda actors, timeout_s: asked.append(actors) or {})
    group.raise_if_startup_failed()
    assert asked == [{0: [group.all_engines[1]]}]
    monkeypatch.setattr(group_module, "exits_of", lambda actors, timeout_s: {0: "its log"})
    with pytest.raises(
        EngineDiedError, match=r"engine 0 \(regular\) of model 'm' ended while others started: its log"
    ):
        group.raise_if_startup_failed()
    group.router = Namespace(process=Namespace(describe_end=lambda: "router ended with status 1"))
    with pytest.raises(
        EngineDiedError, match="router ended with status 1\nThe router ended while the engines started"
    ):
        group.raise_if_startup_failed()
