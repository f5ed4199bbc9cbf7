"""Every wait of the Ray layer has a deadline; test_ray_waiting checks what happens when it expires."""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from slime.backends.sglang_utils.router_process import RouterHandle
from slime.ray import cluster, gpus, train_actor
from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines import actor as engine_actor
from slime.ray.engines import fleet, models
from slime.ray.train_loop import Generation, TrainJob
from slime.utils.errors import ConfigError, DeadlineError, EngineDiedError, EngineError
from tests.flag_values import args_with

FLAGS = args_with(
    rollout_timeout_s=1000.0,
    train_timeout_s=200.0,
    weight_update_timeout_s=30.0,
    shutdown_timeout_s=4.0,
    engine_start_timeout_s=50.0,
    offload_rollout=True,
)


class Anything:
    """A handle on which every method is remote."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Namespace(remote=lambda *args, **kwargs: name)


def job() -> TrainJob:
    made = TrainJob.__new__(TrainJob)
    made.args, made.manager = FLAGS, Anything()
    made.actor, made._background = Namespace(push=Namespace(restarts_engines=False)), None
    made.trainers = Namespace(train=lambda *_: None)  # type: ignore[assignment]
    return made


def trainers() -> RayTrainGroup:
    made = RayTrainGroup(FLAGS, 1, 1, pg=None)  # type: ignore[arg-type]
    made.actors, made.push.manager, made.push.is_connected = [Anything()], Anything(), True
    return made


def engines(*groups: Any) -> fleet.EngineFleet:
    args = Namespace(**vars(FLAGS) | {"rollout_stall_timeout_s": 0})
    model = Namespace(groups=groups, router=None, config=Namespace(name="m", update_weights=False))
    return fleet.EngineFleet(args, [model] if groups else [])  # type: ignore[list-item]


def sharing_group() -> Any:
    return Namespace(needs_offload=True, indices=lambda *states: [0], engines=[Anything()], name_of=str)


def trainer_with_box() -> None:
    made = Namespace(get_parallel_config=lambda: {"dp_rank": 0}, train=lambda *args, **kwargs: None)
    rank: Any = Namespace(worker=made)
    train_actor.TrainRayActor.train_boxed(rank, 0, [Namespace(inner="box")])  # type: ignore[list-item]


CASES: list[tuple[str, Callable[[], Any], float]] = [
    ("slime.ray.train_loop", lambda: job().finish_generate(Generation(0, "ref")), 1000 + 2 * 180),
    ("slime.ray.train_loop", lambda: job().evaluate(0), 1000 + 2 * 180),
    ("slime.ray.train_loop", lambda: job().train(0, []), 3 * (50 + 120) + 30 + 180),
    ("slime.ray.actor_group", lambda: trainers().wait_trained(0, ["ref"]), 200),
    ("slime.ray.actor_group", lambda: trainers().push.send("update_weights", Namespace(num_new=0)), 30 + 120),
    ("slime.ray.engines.memory", lambda: engines(sharing_group()).offload(), 30),
    ("slime.ray.engines.models", lambda: engines().wait_ready(), 50 + 120),
    ("slime.ray.engines.actor", lambda: engine_actor._probe(Anything(), 1, 1, time.monotonic() + 40), 40),
    ("slime.ray.train_actor", trainer_with_box, 3600),
]


def first_wait_s(monkeypatch: pytest.MonkeyPatch, module: str, call: Callable[[], Any]) -> float:
    """The deadline of the first wait of ``module`` during ``call``; every answer is available at once."""
    given: list[float] = []

    def wait_for(refs: Any, *, what: str, timeout_s: float, **rest: Any) -> Any:
        assert what
        given.append(timeout_s)
        return [{}] if isinstance(refs, list) else {}

    monkeypatch.setattr(f"{module}.wait_for", wait_for)
    call()
    return given[0]


@pytest.mark.parametrize(("module", "call", "deadline_s"), CASES)
def test_a_wait_has_the_deadline_of_its_row(monkeypatch, module, call, deadline_s):
    assert first_wait_s(monkeypatch, module, call) == pytest.approx(deadline_s, abs=1)


def test_the_tasks_that_tell_the_place_of_each_gpu_have_five_minutes(monkeypatch):
    task = Namespace(options=lambda **_: Namespace(remote=lambda: "ref"))
    monkeypatch.setattr(gpus.ray, "remote", lambda **_: lambda function: task)
    monkeypatch.setattr(gpus, "PlacementGroupSchedulingStrategy", lambda *args, **kwargs: None)

    def wait_for(refs: Any, *, what: str, timeout_s: float) -> Any:
        assert timeout_s == 300 and refs == ["ref", "ref"]
        raise DeadlineError(what)

    monkeypatch.setattr(gpus, "wait_for", wait_for)
    with pytest.raises(DeadlineError, match="addresses of the GPUs"):
        gpus.bundle_identities(None, range(2))  # type: ignore[arg-type]


def test_a_cluster_that_does_not_let_the_driver_in_is_an_error_that_names_the_variable(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: release.wait(60))
    outcome = cluster._join("10.0.0.1:6379")
    release.set()
    assert isinstance(outcome, ConfigError) and "10.0.0.1:6379 did not let this process in" in str(outcome)
    assert "RAY_ADDRESS" in str(outcome)


def test_a_private_cluster_that_starts_too_slowly_is_started_again_but_not_for_ever(monkeypatch, caplog):
    answers: list[Exception | None] = []
    monkeypatch.setattr(cluster, "_make_token", lambda folder: None)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: _raise(answers.pop(0)))
    slow = Exception("The current node timed out during startup.")
    answers[:] = [slow, None]
    cluster._start(1, 2)
    assert answers == [] and "Attempt 1 of 3" in caplog.text
    answers[:] = [slow] * 4
    with pytest.raises(Exception, match="timed out during startup"):
        cluster._start(1, 2)
    assert len(answers) == 1
    answers[:] = [ConnectionError("no"), None]
    with pytest.raises(ConnectionError):
        cluster._start(1, 2)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def quiet_fleet(**flags: Any) -> fleet.EngineFleet:
    values = {"rollout_timeout_s": -fleet.ROLLOUT_MARGIN_S, "use_fault_tolerance": False, "shutdown_timeout_s": 0.2}
    values |= {"rollout_health_check_interval": 1000.0, "rollout_health_check_timeout": 1000.0} | flags
    made = fleet.EngineFleet.__new__(fleet.EngineFleet)
    made.args, made.servers, made.groups, made._monitors = Namespace(**values), [], [], []
    made._next_router_check_s = float("inf")
    return made


def test_a_rollout_function_that_does_not_return_ends_the_run_at_its_deadline(monkeypatch):
    monkeypatch.setattr(fleet, "ENGINE_CHECK_INTERVAL_S", 0.05)
    release = threading.Event()
    with pytest.raises(DeadlineError, match="has not returned within .*--rollout-timeout-s"):
        quiet_fleet().run_watched(lambda: release.wait(60))
    release.set()


def test_a_rollout_that_ends_in_the_moment_when_it_is_looked_for_counts(monkeypatch):
    class EndsNow(Future):
        def result(self, timeout: float | None = None) -> Any:
            try:
                return super().result(0 if timeout else None)
            except TimeoutError:
                super().result()
                raise

    def submit(work: Callable[[], Any]) -> Future:
        future = EndsNow()
        threading.Timer(0.05, lambda: future.set_result(work())).start()
        return future

    executor = Namespace(submit=submit, shutdown=lambda wait: None)
    monkeypatch.setattr(fleet, "ThreadPoolExecutor", lambda *_, **__: executor)
    assert quiet_fleet(rollout_timeout_s=60.0).run_watched(lambda: "samples") == "samples"


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_router_that_gives_no_sign_of_life_ends_the_run_or_is_started_again(monkeypatch, tolerant):
    made = quiet_fleet(use_fault_tolerance=tolerant)
    restarted: list[Any] = []
    router = Namespace(url="http://router", process=object(), problem=lambda timeout_s: "does not answer")
    server = models.RolloutServer(Namespace(name="actor"), router, [])  # type: ignore[arg-type]
    monkeypatch.setattr(server, "restart_router", lambda: restarted.append(server))
    made.servers = [server]
    if tolerant:
        made.check()
        assert restarted == [server]
    else:
        with pytest.raises(EngineDiedError, match="the router http://router .* does not answer"):
            made.check()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_request_that_a_dead_router_refused_ends_the_run_with_the_death(monkeypatch, is_dead):
    monkeypatch.setattr(fleet, "ENGINE_CHECK_INTERVAL_S", 0.01)
    made = quiet_fleet(rollout_timeout_s=60.0)
    router = RouterHandle("router", 80, Namespace(is_alive=lambda: not is_dead))
    made.servers = [models.RolloutServer(Namespace(name="actor"), router, [])]  # type: ignore[arg-type]
    monkeypatch.setattr(made, "pause_monitors", lambda: None)
    cause = "the router http://router:80 .* has ended" if is_dead else "GET http://router/workers failed"
    with pytest.raises(EngineDiedError if is_dead else EngineError, match=cause):
        made.run_watched(lambda: _raise(EngineError("GET http://router/workers failed")))


def test_the_end_waits_for_engines_no_longer_than_its_flag(monkeypatch):
    given: list[float] = []
    monkeypatch.setattr(fleet.ray, "wait", lambda refs, num_returns, timeout: given.append(timeout))
    made = quiet_fleet()
    made.groups = [Namespace(states=[], shutting_down=["ref"])]  # type: ignore[list-item]
    began = time.monotonic()
    made.stop()
    assert given == [0.2] and time.monotonic() - began < 5
