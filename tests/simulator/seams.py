"""The seams at which the simulator replaces Ray, HTTP, clocks, files and processes."""

from __future__ import annotations

import functools
import signal
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import requests

from slime.ext.ledger.journal import Journal
from slime.ext.recovery.preemption import Preemption
from slime.ray.waiting import Sigterm, sigterm
from slime.rollout import fully_async_rollout, sglang_rollout  # before clocks are replaced
from tests.simulator.fake_ray import RemoteClass, patch_ray
from tests.simulator.files import patch_files
from tests.simulator.kernel import WORLD, Patches, Process
from tests.simulator.network import AsyncSession, SyncSession
from tests.simulator.servers import EngineServer, RouterServer
from tests.simulator.threads import Executor, Lock, patch_standard_library
from tests.simulator.trainer import SimulatedTrainer, patch_trainer
from tests.simulator.weight_groups import patch_weight_groups
from tests.simulator.world import World
from tests.unit.rollout.fake_cluster import FakeTokenizer

NO_SIGTERM_S = 60.0
"""No process gets SIGTERM here; checking for it every second would be every fifth event."""


def world() -> World:
    assert WORLD[0] is not None
    return WORLD[0]


class Child:
    """slime.backends.sglang_utils.child_process.ChildProcess: a server of the simulated network."""

    def __init__(self, module: str, settings: Any, *, name: str, **_: Any) -> None:
        now = world()
        kernel, self.name = now.kernel, name
        is_router = module.endswith("router_main")
        role = now.router_role(kernel.current_process, settings["port"]) if is_router else f"server{settings['rank']}"
        count = sum(r == role for r in now.cluster.roles.values())
        label = role if not count else f"{role}#{count + 1}"
        self.process = Process(kernel, label, owner=kernel.current_process)
        now.cluster.roles[self.process] = role
        now.at(f"start {role}", self.process)
        # One that dies at once found its port in use.
        self._lost_port = not self.process.is_alive
        now.next_pid += 1
        self.pid = now.next_pid
        ready_s = kernel.draw(f"boot {role}", 1.0, 12.0)
        if is_router:
            RouterServer(now, self.process, settings["port"], ready_s=ready_s / 4)
        else:
            EngineServer(now, self.process, settings, ready_s=ready_s)

    def is_alive(self) -> bool:
        return self.process.is_alive

    def describe_end(self) -> str | None:
        return None if self.process.is_alive else f"{self.name} was killed by signal 9"

    def listens_at(self, port: int) -> bool:
        return self.process.is_alive

    def lost_port(self) -> bool:
        return self._lost_port

    def log_tail(self) -> str:
        return "(no log)"

    def stop(self, timeout_s: float = 10.0) -> None:
        self.process.kill()
        world().kernel.sleep(0.05)


class _Ended:
    """A future that has completed successfully."""

    def result(self, timeout: float | None = None) -> None:
        return None


def install() -> Patches:
    from slime.backends.sglang_utils import router_process, sglang_engine
    from slime.ext.fast_push import engine_verbs
    from slime.observability import pulse, telemetry
    from slime.ray import actor_group, gpus, job, placement_group, rollout, startup, train_actor, train_loop, waiting
    from slime.ray import utils as ray_utils
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.engines import actor as engine_actor
    from slime.ray.engines import fleet, models
    from slime.ray.engines.group import EngineGroup
    from slime.ray.gpus import GpuSlice
    from slime.rollout import data_source
    from slime.rollout import waiting as rollout_waiting
    from slime.utils import async_utils, distributed_utils, http_utils
    from slime.weights.push import participants

    patches = Patches()
    patch_standard_library(patches)
    patch_ray(patches, lambda: world().cluster)
    patch_files(patches, lambda: world().files)
    patch_trainer(patches)
    patch_weight_groups(patches, free_port)
    nothing: Callable[..., Any] = lambda *_, **__: None  # noqa: E731
    ray_class = functools.partial(RemoteClass, lambda: world().cluster)
    watch = waiting.WATCH_GROUP
    for holder, name, value in (
        (requests, "Session", SyncSession),
        (http_utils.LoopSessions, "current", lambda self: AsyncSession()),
        (fleet, "ThreadPoolExecutor", Executor),
        (participants, "ThreadPoolExecutor", Executor),
        (rollout, "RemoteRolloutManager", ray_class(rollout.RolloutManager, {watch: 1, rollout.CONTROL_GROUP: 4})),
        (engine_actor, "RemoteEngine", ray_class(engine_actor.EngineActor, {watch: 1})),
        (ray_utils, "Lock", ray_class(ray_utils._Lock)),
        (fleet, "Lock", ray_class(ray_utils._Lock)),
        (startup, "RayTrainGroup", functools.partial(RayTrainGroup, actor_cls=SimulatedTrainer)),
        (actor_group, "trainer_environment", lambda *_: {}),
        (train_actor, "strategy_for", nothing),
        (engine_actor, "strategy_for", nothing),
        (engine_actor, "one_node_environment", lambda: {}),
        (train_actor, "check_trainer_hooks", nothing),
        (train_actor, "visible_index", lambda index: index),
        (train_loop, "create_placement_groups", lambda args: make_gpus(args, GpuSlice)),
        (gpus, "create_placement_groups", lambda args: make_gpus(args, GpuSlice)),
        (placement_group, "check_contents", nothing),
        (telemetry, "start", nothing),
        (telemetry, "log", nothing),
        (train_loop, "print", nothing),
        (rollout, "log_rollout", nothing),
        (job, "check_contents", nothing),
        (job, "connect", nothing),
        (job, "configure_logger", nothing),
        (train_loop, "configure_logger", nothing),
        (rollout, "configure_logger", nothing),
        (job.signal, "signal", nothing),
        (job.signal, "setitimer", set_alarm),
        (job.signal, "raise_signal", lambda number: sigterm()._on_signal(number, None)),
        (job, "print", nothing),
        (job, "_report", lambda title, error: world().ended_with(error)),
        (job.traceback, "print_exc", nothing),
        (sglang_engine, "ChildProcess", Child),
        (router_process, "ChildProcess", Child),
        (sglang_engine, "check_in_background", lambda folder: _Ended()),
        (sglang_engine, "build_server_args", server_args),
        (router_process, "build_router_args", lambda args, **settings: settings),
        (engine_verbs, "encode", lambda message: message),
        (ray_utils, "get_free_port", free_port),
        (distributed_utils, "hold_port", lambda address, first: free_port()),
        (ray_utils, "listen_address", lambda: "127.0.0.1"),
        (models, "listen_address", lambda: "127.0.0.1"),
        (models, "find_available_port", lambda base: free_port()),
        (sglang_rollout, "load_tokenizer", lambda *_, **__: FakeTokenizer()),
        (sglang_rollout, "load_processor", nothing),
        (sglang_rollout, "tune_garbage_collection", nothing),
        (data_source, "load_tokenizer", lambda *_, **__: FakeTokenizer()),
        (data_source, "load_processor", nothing),
        (waiting, "SIGTERM_POLL_S", NO_SIGTERM_S),
        (sglang_engine, "POLL_S", 1.0),
        (async_utils, "_arm", nothing),
        (async_utils.faulthandler, "cancel_dump_traceback_later", nothing),
        (uuid, "uuid4", lambda: uuid.UUID(int=world().kernel.rng("uuid").getrandbits(128))),
    ):
        patches.set(holder, name, value)
    for reaction in (Sigterm, Preemption):
        patches.set(reaction, "check", in_the_driver(reaction.check))
    evict = EngineGroup._evict

    @functools.wraps(evict)
    def evicted(group: EngineGroup, index: int, event: Any, reason: str) -> None:
        world().evicted(group.name_of(index), reason)
        evict(group, index, event, reason)

    patches.set(EngineGroup, "_evict", evicted)
    record_finished = Journal.record_finished

    def recorded(journal: Journal, group: list[Any]) -> None:
        record_finished(journal, group)
        world().recorded(world().kernel.current_process, group)

    patches.set(Journal, "record_finished", recorded)
    record_batch = Journal.record_batch

    def recorded_batch(journal: Journal, rollout_id: int, groups: list[Any], *args: Any, **keywords: Any) -> None:
        record_batch(journal, rollout_id, groups, *args, **keywords)
        for group in groups:
            world().recorded(world().kernel.current_process, group, is_written=True)

    patches.set(Journal, "record_batch", recorded_batch)
    patches.set(pulse.Pulse.__init__, "__defaults__", (lambda: time.monotonic(),))
    patches.set(
        rollout_waiting.LongWait.__init__,
        "__kwdefaults__",
        dict(
            rollout_waiting.LongWait.__init__.__kwdefaults__,
            clock=lambda: time.monotonic(),
            stream=_Silent(),
        ),
    )
    return patches


def in_the_driver(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a check for SIGTERM that other processes pass, because all share the driver's here."""
    return lambda reaction: check(reaction) if world().kernel.current_process.owner is None else None


class _Silent:
    """A stream that nobody reads."""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass


def set_alarm(which: int, seconds: float) -> None:
    """signal.setitimer for the running driver; a setting remains, but has no effect in the next life."""
    kernel = world().kernel
    driver = kernel.current_process

    def strike() -> None:
        if driver is None or driver.is_alive:
            sigterm()._on_alarm(signal.SIGALRM, None)

    if seconds:
        kernel.call_later(seconds, strike)


def make_gpus(args: Namespace, gpu_slice: Any) -> dict[str, Any]:
    """The placement of the job: GPUs by number."""
    from slime.flags.cluster import plan_gpus

    plan = plan_gpus(args)
    everything = gpu_slice(None, list(range(plan.num_gpus)), list(range(plan.num_gpus)))
    return {"actor": everything, "critic": None, "rollout": everything.from_offset(plan.rollout_offset)}


def server_args(args: Namespace, place: Any, *, model_path: str, **_: Any) -> dict[str, Any]:
    return {
        "tp_size": 1, "port": place.port, "rank": place.rank, "load_format": "auto",
        "worker_type": place.worker_type, "is_trained": model_path == args.hf_checkpoint,
    }  # fmt: skip


def free_port(start_port: int = 0, consecutive: int = 1) -> int:
    now = world()
    now.next_port += consecutive
    return now.next_port - consecutive


def process_globals() -> list[tuple[Any, str, Callable[[], Any]]]:
    """The module globals of which each simulated process has its own."""
    from slime.ray import waiting
    from slime.rollout import run_state
    from slime.utils import async_utils, http_utils

    return [
        (waiting, "_sentinels", dict),
        (waiting, "_names", dict),
        (waiting, "_starting", dict),
        (run_state, "_RUNS", lambda: [run_state.RunState()]),
        (async_utils, "_LOOPS", list),
        (async_utils, "_LOOPS_LOCK", Lock),
        (http_utils, "_CLIENT", http_utils._Client),
        (fully_async_rollout, "_WORKERS", list),
    ]
