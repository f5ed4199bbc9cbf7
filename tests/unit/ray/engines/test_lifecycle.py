"""Every cell of the engine's state table, and a group that follows it.  No cluster: nothing is really started."""

from __future__ import annotations

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.ray.engines import group as group_module
from slime.ray.engines.actor import EngineAddress, PortCursors
from slime.ray.engines.fleet import EngineFleet
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import LIVE, TABLE, Action, EngineEvent, EngineState, next_step, table_as_markdown
from slime.ray.engines.models import RolloutServer, wait_until_serving
from slime.ray.gpus import GpuSlice
from slime.utils.errors import EngineDiedError, EngineError, WeightSyncError
from slime.weights.push.participants import ExcludedEngine

CELLS = list(itertools.product(EngineState, EngineEvent))
EVENT, STATE = EngineEvent, EngineState


class ScriptedGroup(EngineGroup):
    """Records what it would do to processes, without doing it.  Actors are names."""

    def _launch(self, indices, *, register) -> list[Any]:
        self.done += [f"start {index}" + " and register" * register for index in indices]
        for index in indices:
            self.all_engines[index] = f"actor {index} {len(self.done)}"
        return []

    def _kill(self, index: int) -> None:
        self.done.append(f"kill {index}")
        self.is_listed[index] = False
        self.all_engines[index] = None

    def _register(self, index: int) -> None:
        if not self.is_listed[index]:
            self.done.append(f"register {index}")
            self.is_listed[index] = True

    def _shut_down(self, index: int) -> None:
        self.done.append(f"shut down {index}")


class AtOnce:
    """A thread that runs its target in start()."""

    def __init__(self, target, **ignored) -> None:
        self.start = target


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(group_module.threading, "Thread", AtOnce)


def make_group(
    num_engines: int = 1, *, policy: str = "refill", takes_updates: bool = True, name: str = "m", **fields: Any
):
    args = Namespace(
        num_gpus_per_node=8, debug_rollout_only=False, engine_start_timeout_s=1.0, weight_push_failure=policy,
        offload_rollout=False, use_fault_tolerance=False, rollout_stall_timeout_s=0.0, actor_num_nodes=1,
        actor_num_gpus_per_node=1, debug_train_only=False, rollout_external=False, colocate=False,
        rollout_num_gpus=num_engines, use_critic=False, critic_num_nodes=0, critic_num_gpus_per_node=0,
        weight_update_timeout_s=1.0, weight_loaders=[], engine_settings={}, sglang_dtype=None, sglang_dp_size=1,
        bf16=True, fp16=False, fp32=False,
    )  # fmt: skip
    config = ServerGroupConfig(worker_type="regular", num_gpus=num_engines, num_gpus_per_engine=1)
    model = ModelConfig(name=name, model_path="/none", update_weights=takes_updates, server_groups=(config,))
    gpus = GpuSlice(None, list(range(num_engines)), list(range(num_engines)))
    group = ScriptedGroup(
        args=args, gpus=gpus, model=model, config=config, gpu_offset=0, rank_offset=0, router=None,
        needs_offload=False, cursors=PortCursors(), **fields,
    )  # fmt: skip
    group.done = []
    group.start()
    wait_until_serving([group], 1.0)
    group.done.clear()
    return group


def make_fleet(num_engines: int, policy: str) -> tuple[EngineFleet, EngineGroup]:
    group = make_group(num_engines, policy=policy)
    return EngineFleet(group.args, [RolloutServer(group.model, None, [group])]), group


@pytest.mark.parametrize(("state", "event"), CELLS, ids=lambda value: value.value)
def test_every_cell_leads_to_its_state_or_is_refused_by_name(state, event, monkeypatch):
    group = make_group()
    group.states[0] = state
    taken: list[Action] = []
    for name, action in {"_register": Action.REGISTER, "_evict": Action.EVICT, "_restart": Action.RESTART,
                         "_shut_down": Action.SHUT_DOWN}.items():  # fmt: skip
        monkeypatch.setattr(group, name, lambda *arguments, action=action: taken.append(action))
    step = TABLE[state].get(event)
    if step is None:
        with pytest.raises(RuntimeError, match=rf"engine 0 .* is {state.value}, where {event.value} cannot happen"):
            group.report(0, event)
        assert group.states == [state]
        return
    group.report(0, event, "why")
    assert group.states == [step.state]
    assert taken == ([] if step.action in (Action.NOTHING, Action.AWAIT_WEIGHTS, Action.END_RUN) else [step.action])
    assert group.given_up == ("why" if step.action is Action.END_RUN else None)


def test_the_table_is_whole():
    assert set(TABLE) == set(STATE)
    assert {step.action for row in TABLE.values() for step in row.values()} == set(Action)
    reached = {step.state for state, row in TABLE.items() for step in row.values() if step.state is not state}
    assert reached == set(STATE) - {STATE.STARTING}, "every state but the first is entered from another"
    assert all(next_step(state, EVENT.STOP, "e").state is STATE.RETIRED for state in STATE)
    assert {state for state in STATE if next_step_is_evict(state)} == set(LIVE)


def next_step_is_evict(state: EngineState) -> bool:
    step = TABLE[state].get(EVENT.DIED)
    return step is not None and step.action is Action.EVICT


def test_the_page_prints_the_table_that_runs():
    page = (Path(__file__).parents[4] / "docs/engines.md").read_text(encoding="utf-8")
    assert table_as_markdown() in page


def test_from_a_start_to_the_second_death():
    group = make_group()
    group.report(0, EVENT.FAILED_PROBE, "slow")
    assert group.states == [STATE.SUSPECT]
    group.report(0, EVENT.HEALTHY)
    assert group.states == [STATE.SERVING] and group.done == []
    group.report(0, EVENT.DIED, "killed")
    assert (group.states, group.done) == ([STATE.UPDATING], ["kill 0", "start 0"])
    group.report(0, EVENT.PUSH_DONE)
    assert (group.states, group.done[2:]) == ([STATE.SERVING], ["register 0"])
    group.report(0, EVENT.DIED, "killed again")
    assert (group.states, group.done[3:]) == ([STATE.UPDATING], ["kill 0", "start 0"])


def test_an_engine_of_a_model_without_updates_serves_as_soon_as_it_has_started_again():
    group = make_group(takes_updates=False)
    group.report(0, EVENT.DIED, "killed")
    assert (group.states, group.done) == ([STATE.SERVING], ["kill 0", "start 0 and register"])


def test_a_group_that_is_not_restarted_gives_up_and_touches_nothing():
    group = make_group(restarts=False)
    group.report(0, EVENT.FAILED, "no sign of life")
    assert (group.states, group.done) == ([STATE.RETIRED], [])
    assert group.given_up == "engine 0 (regular) of model 'm': no sign of life"
    with pytest.raises(EngineDiedError, match="no sign of life"):
        group.wait_settled(1.0)


def test_what_started_after_the_job_has_ended_is_shut_down():
    group = make_group()
    group.states[0] = STATE.RESTARTING
    group.report(0, EVENT.STOP)
    group.report(0, EVENT.STARTED)
    assert (group.states, group.done) == ([STATE.RETIRED], ["shut down 0", "shut down 0"])


def test_no_rollout_begins_while_the_router_lists_an_engine_that_is_evicted(monkeypatch):
    group, delisted = make_group(3), []
    not_yet = Namespace(start=lambda: None)
    monkeypatch.setattr(group_module.threading, "Thread", lambda **_: not_yet)
    monkeypatch.setattr(group, "delist", delisted.append)
    group.report(1, EVENT.DIED, "its actor was killed; its server still answers")
    group.report(2, EVENT.PUSH_STARTED)
    group.report(2, EVENT.PUSH_REFUSED, "it did not take the weights")
    group.begin_rollout()
    assert delisted == [1, 2]
    group.report(1, EVENT.SLOT_FREE)
    group.begin_rollout()
    assert delisted == [1, 2, 2]


REFUSAL = ExcludedEngine(1, "it holds other bytes")


def push(fleet: EngineFleet, *excluded: ExcludedEngine) -> None:
    fleet.weights.push_started()
    fleet.weights.push_done(excluded)
    fleet.weights.push_refused(excluded)


def test_no_push_begins_beside_an_engine_that_was_given_up_and_may_serve_on():
    fleet, group = make_fleet(2, "stop")
    group.restarts = False
    group.report(1, EVENT.FAILED, "no sign of life")
    with pytest.raises(EngineDiedError, match="no sign of life"):
        fleet.weights.push_started()


def test_an_engine_that_is_killed_while_it_is_described_is_left_out(monkeypatch):
    fleet, group = make_fleet(2, "refill")

    def actors_of(index: int) -> list[Any]:
        actors = [None if index else "engine"]
        group.all_engines[index] = None
        return actors

    monkeypatch.setattr(group, "actors_of", actors_of)
    assert fleet.weights.updatable().handles == ["engine"]


def test_refill_restarts_the_engine_that_refused_a_push():
    fleet, group = make_fleet(2, "refill")
    push(fleet, REFUSAL)
    assert (group.states, group.done) == ([STATE.SERVING, STATE.UPDATING], ["kill 1", "start 1"])
    assert fleet.weights.without_weights().handles == [group.engines[1]]


def test_engines_that_evaluate_get_weights_when_asked_for_and_take_no_part_in_pushes():
    generating, evaluating = make_group(2), make_group(1, takes_updates=False, name="eval")
    servers = [RolloutServer(group.model, None, [group]) for group in (generating, evaluating)]
    fleet = EngineFleet(generating.args, servers)
    evaluating.all_engines[0] = "evaluator"
    assert fleet.weights.updatable().num_new == 2
    fleet.weights.connected()
    assert fleet.weights.updatable().num_new == 0
    engines = fleet.weights.for_evaluation()
    assert (engines.handles, engines.num_new) == (["evaluator"], 1)
    fleet.weights.connected()
    fleet.weights.push_done()
    assert evaluating.states == [STATE.SERVING]
    after = fleet.weights.push_started()
    assert after.handles == generating.engines and after.num_new, "the trainers connect to the others again"
    evaluating.states[0] = STATE.RESTARTING
    assert fleet.weights.for_evaluation().handles == []


def test_weights_that_no_push_brings_back_are_kept_while_the_memory_is_released(monkeypatch):
    started: list[dict[str, Any]] = []
    engine = Namespace(init=Namespace(remote=lambda **_: "ref"), _actor_id=b"1")
    monkeypatch.setattr(group_module, "start_engine_actor", lambda *_, **given: started.append(given) or engine)
    monkeypatch.setattr(
        group_module, "allocate_addresses", lambda *_, **__: [EngineAddress(host="h", port=1, nccl_port=2)]
    )
    for takes_updates, is_shared, loaders in itertools.product((True, False), (True, False), (("loader",), ())):
        group = make_group(takes_updates=takes_updates)
        group.args.offload_rollout, group.needs_offload, group.weight_loaders = True, is_shared, loaders
        assert EngineGroup._launch(group, [0], register=True) == ["ref"]
    kept = [given["sglang_overrides"].get("enable_weights_cpu_backup") for given in started]
    assert kept == [None, True, None, None, True, True, None, None]


def test_drop_goes_on_without_it_until_none_is_left():
    fleet, group = make_fleet(2, "drop")
    push(fleet, REFUSAL)
    assert (group.states, group.done) == ([STATE.SERVING, STATE.RETIRED], ["kill 1"])
    with pytest.raises(EngineError, match="no engine is left; .*--weight-push-failure drop.* engine 0: late"):
        push(fleet, ExcludedEngine(0, "late"))


def test_stop_ends_the_run_with_the_engine_and_its_reason():
    fleet, group = make_fleet(2, "stop")
    with pytest.raises(WeightSyncError, match="--weight-push-failure stop.*engine 1: it holds other bytes"):
        push(fleet, REFUSAL)
    assert group.done == []
