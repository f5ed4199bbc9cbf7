"""The driver's treatment of engines that a push excluded; the fleet acts on its reports."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines.verbs import EngineList
from slime.ray.push import MAX_FAILED_RESENDS, MAX_PUSHES, WeightPush
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, HangError, WeightSyncError
from slime.utils.misc import Box
from slime.weights.push.participants import ExcludedEngine

EXCLUDED = [ExcludedEngine(1, "it holds other bytes")]


class Push(WeightPush):
    """Pushes with scripted outcomes; the manager only records requests."""

    def __init__(self, *outcomes: str, policy: str = "refill", tolerant: bool = True, waiting: int = 0) -> None:
        args = Namespace(
            save=None,
            weight_push_failure=policy,
            use_fault_tolerance=tolerant,
            debug_train_only=False,
            engine_start_timeout_s=1,
            weight_update_timeout_s=1,
        )
        super().__init__(RayTrainGroup(args, 1, 1, pg=None))  # type: ignore[arg-type]
        self.outcomes, self.waiting = list(outcomes), waiting
        self.pushes: list[str] = []
        self.asked: list[tuple[Any, ...]] = []

    def push_once(self, kind: str = "update") -> dict[str, float]:
        self.pushes.append(kind)
        outcome = self.outcomes.pop(0) if self.outcomes else "fine"
        self.excluded = list(EXCLUDED) if outcome in ("excludes one", "excludes all") else []
        if outcome in ("excludes all", "trainer fails"):
            raise WeightSyncError(outcome)
        if outcome == "trainer hangs":
            raise HangError(outcome)
        return {}

    def resend(self, engines: Any) -> None:
        self.push_once("resend")

    def ask_manager(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.asked.append((method, *arguments))
        if method == "describe_engines":
            return Namespace(num=self.waiting)
        return 0


BEFORE = ["health_monitoring_pause", "recover_updatable_engines"]
"""With fault tolerance, a push goes to live engines."""


def asked(push: Push) -> list[str]:
    return [method for method, *_ in push.asked]


def test_a_push_that_all_engines_take_asks_for_nothing_after_it() -> None:
    push = Push("fine")
    push.update()
    assert (asked(push), push.pushes) == (BEFORE, ["update"])
    push = Push("fine", tolerant=False)
    push.update()
    assert (asked(push), push.pushes) == ([], ["update"])


def test_an_engine_that_did_not_take_the_push_is_reported_and_the_run_goes_on() -> None:
    push = Push("excludes one", policy="drop", tolerant=False)
    push.update()
    assert push.asked == [("push_refused", EXCLUDED)]
    assert push.pushes == ["update"]


def test_refill_starts_another_and_gives_it_the_same_version_at_once_where_it_is_up() -> None:
    push = Push("excludes one", waiting=1)
    push.update()
    assert asked(push) == [*BEFORE, "push_refused", "recover_updatable_engines", "describe_engines"]
    assert push.pushes == ["update", "resend"]


def test_when_no_engine_took_it_others_are_started_and_the_push_is_made_again() -> None:
    push = Push("excludes all")
    push.update()
    assert asked(push) == [*BEFORE, "push_refused", "find_dead_engines", "recover_updatable_engines"]
    assert push.pushes == ["update", "update"]


def test_engines_that_die_again_in_the_same_push_are_replaced_again_within_a_bound() -> None:
    push = Push(*["excludes all"] * (MAX_PUSHES - 1))
    push.update()
    assert asked(push).count("recover_updatable_engines") == MAX_PUSHES
    push = Push(*["excludes all"] * MAX_PUSHES)
    with pytest.raises(WeightSyncError, match="excludes all"):
        push.update()
    assert push.pushes == ["update"] * MAX_PUSHES


def test_a_failure_of_the_trainers_own_stays_one() -> None:
    push = Push("trainer fails")
    with pytest.raises(WeightSyncError, match="trainer fails"):
        push.update()
    assert push.pushes == ["update"]


def test_a_trainer_that_hangs_is_not_asked_again() -> None:
    for act in (Push.update, Push.serve_new_engines):
        push = Push("trainer hangs", waiting=1)
        with pytest.raises(HangError, match="trainer hangs"):
            act(push)
        assert len(push.pushes) == 1 and "find_dead_engines" not in asked(push)


def test_a_router_that_does_not_take_a_new_engine_in_ends_no_push(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("the router cannot be reached")

    monkeypatch.setattr(Push, "ask_manager", refuse)
    Push()._report_taken()  # the engine waits until `serve_new_engines` gives it the weights in the next rollout
    with pytest.raises(EngineError, match="cannot be reached"):
        Push(tolerant=False)._report_taken()


def test_a_trainer_without_ranks_has_verbs_that_do_nothing() -> None:
    """The trainer of a driver with ``--debug-rollout-only``."""
    args = Namespace(
        train_timeout_s=1, rollout_global_dataset=True, debug_train_only=False, use_fault_tolerance=True, save=None
    )
    group = RayTrainGroup(args, 0, 0, pg=None)  # type: ignore[arg-type]
    assert group.async_train(0, []) == []
    assert group.update_weights() == {} and not group.push.restarts_engines
    for verb in (group.clear_memory, group.onload, group.offload, group.release):
        verb()
    group.save_model(0, force_sync=True)


class Manager:
    """Records its calls; each returns the call's name as a reference."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def __getattr__(self, name: str) -> Any:
        return Namespace(remote=lambda *arguments: self.notes.append(name) or name)


def test_a_save_of_one_role_has_the_position_in_the_data_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    args = Namespace(train_timeout_s=1, weight_update_timeout_s=1, rollout_global_dataset=True, save=None)
    group = RayTrainGroup(args, 1, 1, pg=None)  # type: ignore[arg-type]
    group.actors, group.push.manager = [Manager(notes)], Manager(notes)
    for module in ("actor_group", "push"):
        monkeypatch.setattr(f"slime.ray.{module}.wait_for", lambda refs, **_: refs)
    group.save_model(3)
    assert notes == ["save_model", "save", "publish_checkpoint", "record_published"]


def test_values_of_a_critic_reach_the_ranks_that_train_on_the_same_samples() -> None:
    group = RayTrainGroup(Namespace(save=None), 1, 2, pg=None)  # type: ignore[arg-type]
    dealt: list[Any] = []

    class Rank:
        train_boxed = Namespace(remote=lambda *_, external_data: dealt.append(external_data))

    group.actors = [Rank(), Rank()]
    group.async_train(0, [], external_data=["a", "b"])
    group.deal_external_data = lambda values: values[::-1]
    group.async_train(0, [], external_data=["a", "b"])
    group.async_train(0, [], external_data={"for": "all"})
    assert dealt == ["a", "b", "b", "a", {"for": "all"}, {"for": "all"}]


def test_ranks_whose_connection_to_other_engines_failed_are_connected_again_before_a_push(monkeypatch) -> None:
    push, verbs = WeightPush(Push().trainer), []
    push.is_connected = True
    generating, evaluating = (EngineList(1, num_new, Box(name)) for name, num_new in (("g", 0), ("e", 1)))

    def on_all(verb: str, *_: Any, **__: Any) -> list[Any]:
        verbs.append(verb)
        if len(verbs) == 1:
            raise EngineError("an engine that evaluates does not answer")
        return [{}]

    monkeypatch.setattr(push.trainer, "on_all", on_all)
    monkeypatch.setattr(push, "ask_manager", lambda method, *_, **__: generating)
    monkeypatch.setattr(push, "_ask_excluded", lambda: [])
    with pytest.raises(EngineError):
        push.resend(evaluating)
    push.push_once()
    assert verbs == ["connect_engines", "connect_engines", "update_weights"]


def test_new_engines_that_a_router_does_not_take_in_have_the_weights_all_the_same(monkeypatch) -> None:
    push = WeightPush(Push().trainer)
    asked: list[str] = []

    def ask(method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        asked.append(method)
        if method == "push_done":
            raise EngineError("the router does not list it")
        return Namespace(num=1)

    monkeypatch.setattr(push, "send", lambda verb, engines: {})
    monkeypatch.setattr(push, "ask_manager", ask)
    for _ in range(MAX_FAILED_RESENDS):
        push.serve_new_engines()
    assert asked == ["describe_engines", "push_done"] * MAX_FAILED_RESENDS


@pytest.mark.parametrize("silence", [DeadlineError("it is in a collective"), EngineDiedError("it died")])
def test_the_error_of_a_rank_that_failed_alone_outlives_the_silence_of_the_main_rank(silence: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise WeightSyncError("layers.3 has no name")

    def wait(*_: Any) -> None:
        raise silence

    push = WeightPush(Push().trainer)
    push.excluded = list(EXCLUDED)
    push.is_connected = True
    main_rank = Namespace(excluded_engines=Namespace(remote=lambda: "ref"))
    vars(push.trainer).update(on_all=fail, wait=wait, actors=[main_rank])
    with pytest.raises(WeightSyncError, match=r"layers\.3 has no name"):
        push.send("update_weights", EngineList(1, 0, Box(None)))
    assert push.excluded == [], "those of an earlier push are not of this one"
