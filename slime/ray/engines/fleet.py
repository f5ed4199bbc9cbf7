"""The engines of all models of a run: watched, described to trainers, and lent memory; an object of the manager's.

What happens to an engine is reported to its group, which acts on it (see ``lifecycle``).
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import ray

from slime.backends.sglang_utils.sglang_config import EVALUATION_MODEL
from slime.flags.cluster import plan_gpus
from slime.flags.security import job_secret
from slime.ray.engine_handles import RayEngine, UpdatableEngines
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import LIVE, EngineEvent, EngineState
from slime.ray.engines.memory import SharedMemory
from slime.ray.engines.models import JobState, RolloutServer, start_rollout_servers, wait_until_serving
from slime.ray.engines.monitor import HealthMonitor, StallMonitor
from slime.ray.gpus import GpuSlice
from slime.ray.utils import Lock
from slime.ray.waiting import wait_for
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, ProcessError, WeightSyncError
from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)

ENGINE_CHECK_INTERVAL_S = 3.0
DEADLINE_MARGIN_S = 180.0
"""The rollout function has its own deadline and the better message; ours comes later, the driver's last."""

END_ADVICE = {
    False: "start the job again to resume from the last checkpoint, or pass --use-fault-tolerance to have engines "
    "restarted",
    True: "start the job again to resume from the last checkpoint",
}


def start_fleet(args: Namespace, gpus: GpuSlice) -> EngineFleet:
    """Begin to start routers and engines; :meth:`EngineFleet.wait_ready` sees to the end of it."""
    if args.debug_train_only:
        return EngineFleet(args)
    return EngineFleet(args, start_rollout_servers(args, gpus))


def _with_weights(model: RolloutServer | None) -> list[EngineGroup]:
    """Return the groups of a model whose engines hold the language model's weights: all but encoders."""
    return [group for group in model.groups if group.config.worker_type != "encoder"] if model else []


class EngineFleet:
    """The engines of all models.

    Invariant: ``_connected`` are the engines to which the trainers' weight sender is connected, in its order; as long
    as the engines that take updates are others, the trainers are told to connect again.
    """

    def __init__(self, args: Namespace, servers: Sequence[RolloutServer] = ()) -> None:
        self.args = args
        self.servers = list(servers)
        self._connected: list[Any] = []
        self._described: list[Any] = []
        """The engines that the trainers were told of last."""
        self._has_snapshot = False
        self._lock: Any = None
        self._lock_guard = threading.Lock()
        self._start_guard = threading.Lock()
        self._monitors: list[HealthMonitor] = []
        self._memory = SharedMemory(args, self.groups)
        self._next_router_check_s = 0.0
        if args.use_fault_tolerance or args.rollout_stall_timeout_s > 0:
            monitor = HealthMonitor if args.use_fault_tolerance else StallMonitor
            self._monitors = [monitor(args, group) for group in self.groups]

    @property
    def groups(self) -> list[EngineGroup]:
        """The groups of every model."""
        return [group for server in self.servers for group in server.groups]

    @property
    def engines(self) -> list[Any]:
        """The engines of every model that are there."""
        return [engine for server in self.servers for engine in server.engines]

    def job_state(self) -> JobState:
        """Return what the Prometheus page of the job says of engines and routers, and where theirs are."""
        pages = [page for server in self.servers for page in server.metrics_pages()]
        states = Counter(state.value for group in self.groups for state in group.states)
        return JobState(pages, states, sum(group.num_evictions for group in self.groups))

    def wait_ready(self) -> None:
        """Wait until every engine serves; may be called several times, from several threads.

        Raises:
            ProcessError: one did not start, or the router has ended meanwhile.
        """
        with self._start_guard:
            wait_until_serving(self.args, self.groups)
        guard = "no secret" if job_secret(self.args) is None else "the job's secret"
        lines = [line for server in self.servers for line in server.listens_at()]
        logger.info("listening, guarded by %s: %s", guard, "; ".join(lines) or "nothing")

    def stop(self) -> None:
        """Stop engines and routers in an orderly way; external ones go on."""
        for monitor in self._monitors:
            monitor.stop()
        for group in self.groups:
            for index in range(len(group.states)):
                group.report(index, EngineEvent.STOP)
        refs = [ref for group in self.groups for ref in group.shutting_down]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=self.args.shutdown_timeout_s)
        for server in self.servers:
            if server.router is not None:
                server.router.stop()

    # Weights

    @property
    def _updatable_model(self) -> RolloutServer | None:
        """The first model that takes weight updates."""
        return next((server for server in self.servers if server.config.update_weights), None)

    @property
    def _updatable_groups(self) -> list[EngineGroup]:
        return _with_weights(self._updatable_model)

    def for_evaluation(self) -> UpdatableEngines:
        """Describe the engines that evaluate in the background; the trainers connect to them anew each time."""
        model = next((server for server in self.servers if server.config.name == EVALUATION_MODEL), None)
        return self._describe(*LIVE, groups=_with_weights(model))

    def _describe(self, *states: EngineState, groups: Sequence[EngineGroup] | None = None) -> UpdatableEngines:
        offset = plan_gpus(self.args).rollout_offset
        num_trainer_gpus = self.args.actor_num_nodes * self.args.actor_num_gpus_per_node
        engines: list[RayEngine] = []
        for group in self._updatable_groups if groups is None else groups:
            for index in group.indices(*states):
                actors = group.actors_of(index)  # read once: an engine may be killed meanwhile
                if actors[0] is not None:
                    first_gpu = offset + group.gpu_offset + index * group.num_gpus_per_engine
                    engine = RayEngine(
                        index=len(engines),
                        num_gpus=group.num_gpus_per_engine,
                        gpu_offset=first_gpu,
                        is_colocated=first_gpu + group.num_gpus_per_engine <= num_trainer_gpus,
                        loaders=group.weight_loaders,
                        dtype=group.dtype,
                        node_handles=actors,
                    )
                    engines.append(engine)
        self._described = [engine.handle for engine in engines]
        num_new = len([handle for handle in self._described if handle not in self._connected])
        # One that is gone leaves a hole in the sender's group: connecting again closes it.
        return UpdatableEngines(engines, num_new or int(self._described != self._connected))

    def updatable(self) -> UpdatableEngines:
        """Describe the live engines of the first model that takes weight updates."""
        return self._describe(*LIVE)

    def without_weights(self) -> UpdatableEngines:
        """Describe the restarted engines that wait for the present weights before they get requests.

        Raises:
            EngineDiedError: the run cannot go on without an engine.
        """
        self._raise_if_given_up()
        if not any(group.indices(EngineState.UPDATING) for group in self._updatable_groups):
            return UpdatableEngines([], num_new=0)
        return self._describe(EngineState.UPDATING)

    def lock(self) -> Any:
        """Return the cluster-wide lock of the engines, started for the first who asks for it."""
        with self._lock_guard:
            if self._lock is None and self.servers:
                self._lock = Lock.remote()
            return self._lock

    def connected(self) -> None:
        """Take note that the trainers have connected to the engines that they were told of last."""
        self._connected = list(self._described)

    def push_started(self) -> UpdatableEngines:
        """Report that the trainers begin a push; describe the engines that take it.

        Raises:
            EngineDiedError: the run cannot go on without an engine, which may still answer with the old weights.
        """
        self._raise_if_given_up()
        engines = self.updatable()
        self._report_described(engines.handles, EngineEvent.PUSH_STARTED)
        return engines

    def push_done(self, excluded: Sequence[ExcludedEngine] = ()) -> None:
        """Report that the engines that the trainers were told of last hold the present weights, but for ``excluded``.

        Raises:
            ProcessError: the router does not take a restarted engine in.
        """
        without = {engine.index for engine in excluded}
        updated = [handle for index, handle in enumerate(self._described) if index not in without]
        self._report_described(updated, EngineEvent.PUSH_DONE)

    def push_refused(self, excluded: Sequence[ExcludedEngine]) -> None:
        """Report that a push has excluded engines; ``--weight-push-failure`` says what becomes of them.

        Args:
            excluded: indices count the engines that the trainers were told of last.

        Raises:
            WeightSyncError: the policy is to stop.
            EngineError: no engine of the model is left, or one cannot be restarted.
        """
        reasons = "; ".join(f"engine {engine.index}: {engine.reason}" for engine in excluded)
        policy = self.args.weight_push_failure
        if policy == "stop":
            raise WeightSyncError(
                f"{len(excluded)} engines did not take the weights (--weight-push-failure stop). {reasons}. The "
                "others serve the new version; start the job again to resume from the last checkpoint"
            )
        for engine in excluded:
            reason = f"it did not take the weights: {engine.reason}"
            self._report_described([self._described[engine.index]], EngineEvent.PUSH_REFUSED, reason)
        self._raise_if_given_up()
        states = {state for group in self._updatable_groups for state in group.states}
        if policy == "drop" and not states - {EngineState.RETIRED}:
            raise EngineError("no engine is left; the last were excluded (--weight-push-failure drop). " + reasons)

    def _report_described(self, handles: Sequence[Any], event: EngineEvent, reason: str = "") -> None:
        """Report an event of those of ``handles`` that are still there; raise the first failure after the last."""
        failures: list[ProcessError] = []
        for group, index in [(g, i) for g in self._updatable_groups for i, e in enumerate(g.engines) if e in handles]:
            try:
                group.report(index, event, reason)
            except ProcessError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    # Faults

    def find_dead_engines(self, patience_s: float = 0.0) -> int:
        """Report engines whose process has ended since they were last looked at; return how many.

        Args:
            patience_s: how long to look for the first; a server ends some seconds after one of its processes has died.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            found = [(group, *dead) for group in self.groups for dead in group.find_exited(2.0).items()]
            for group, index, sentence in found:
                group.report(index, EngineEvent.DIED, sentence)
            self._raise_if_given_up()
            if found or time.monotonic() >= deadline_s:
                return len(found)
            time.sleep(0.5)

    def recover(self) -> None:
        """See to it that the coming weight update meets live engines, with the memory state that it expects.

        Waits for restarts where the GPUs are shared (an engine sizes its memory by what is free, so it must not start
        beside a trainer) and where a model has no other engine; others get their weights when they are there.
        """
        self.find_dead_engines()
        for server in self.servers:
            for group in server.groups:
                if not server.has_live_engine:
                    group.wait_settled()
        self._memory.release_started()

    def _raise_if_given_up(self) -> None:
        for group in self.groups:
            if group.given_up is not None:
                advice = END_ADVICE[self.args.use_fault_tolerance]
                raise EngineDiedError(f"{group.given_up}. The run cannot go on; {advice}.")

    def begin_rollout(self) -> None:
        """Count restarts anew and have the monitors watch."""
        for group in self.groups:
            group.begin_rollout()
        self.resume_monitors()

    def run_watched(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` beside a check that router and engines still live; return what it returns.

        Without fault tolerance a dead one ends the rollout at once, instead of after every request to it has been
        retried, and one that hangs after ``--rollout-stall-timeout-s``.  With it the health monitors report engines,
        and a router is started again here.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        future = executor.submit(work)
        deadline = time.monotonic() + self.args.rollout_timeout_s + DEADLINE_MARGIN_S
        try:
            while not wait([future], timeout=ENGINE_CHECK_INTERVAL_S).done:
                self.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the rollout function has run for {self.args.rollout_timeout_s:.0f} s "
                        "(--rollout-timeout-s) and has not returned"
                    )
            try:
                return future.result(timeout=0)
            except EngineError:
                if not self.args.use_fault_tolerance:
                    time.sleep(ENGINE_CHECK_INTERVAL_S)  # sockets close before a killed server has ended
                    self.check()  # its death says more than a refused request
                raise
        finally:
            executor.shutdown(wait=False)
            if not self.args.use_fault_tolerance:
                self.pause_monitors()  # engines may take weights now, or give their memory away

    def check(self) -> None:
        """Raise for what ends the run; with fault tolerance, start a dead router again.

        Raises:
            EngineDiedError: a router or an engine is gone.
        """
        tolerant = self.args.use_fault_tolerance
        is_time_to_ask = time.monotonic() >= self._next_router_check_s
        if is_time_to_ask:
            self._next_router_check_s = time.monotonic() + self.args.rollout_health_check_interval
        timeout_s = self.args.rollout_health_check_timeout if is_time_to_ask else None
        for server in self.servers:
            if tolerant and server.has_own_router:
                server.revive_router(self.args, timeout_s)
            elif dead := server.router_problem(timeout_s):
                raise EngineDiedError(f"{dead}. The rollout cannot go on; {END_ADVICE[tolerant]}.")
        self._raise_if_given_up()
        if tolerant:
            return
        for group in self.groups:
            for index, sentence in group.find_exited(ENGINE_CHECK_INTERVAL_S).items():
                dead = f"{group.name_of(index)}: {sentence}"
                raise EngineDiedError(f"{dead}. The rollout cannot go on; {END_ADVICE[False]}.")

    def pause_monitors(self) -> None:
        """Stop probing: engines are about to be busy with something else than requests."""
        for monitor in self._monitors:
            monitor.pause()

    def resume_monitors(self) -> None:
        """Probe again: engines serve."""
        for monitor in self._monitors:
            monitor.resume()

    # Memory

    def offload(self) -> None:
        """Have the engines on the trainers' GPUs release their memory."""
        self.pause_monitors()
        self._memory.release()

    def offload_idle(self) -> bool:
        """Have the engines make room for a trainer that died, where the rollout waits for it; return whether they do.

        They are not watched meanwhile: one that starts sizes its memory by what is free, so not beside a trainer.
        """
        model = self._updatable_model
        if not self._memory.may_lend(is_stuck=model is not None and not model.answers_requests):
            return False
        self.pause_monitors()
        self._memory.lend()
        return True

    def onload_idle(self) -> None:
        """Have the engines take back what they lent to a trainer that has started, and watch them."""
        self._memory.take_back(None)
        self.resume_monitors()

    def onload(self, tags: list[str] | None = None) -> None:
        """Have the engines on the trainers' GPUs take the memory of ``tags`` (None: all of it) back."""
        self._memory.take_back(tags)

    def check_weights(self, action: str) -> list[Any]:
        """Ask every engine's weight checker to snapshot, reset_tensors or compare."""
        # With that flag each push is checked as it is made: upstream's driver, which compares after it, need not.
        if action == "compare" and not self._has_snapshot and self.args.check_weight_update_equal:
            return []
        self._has_snapshot |= action == "snapshot"
        refs = [engine.check_weights.remote(action=action) for engine in self.engines]
        return wait_for(refs, what="check_weights of the engines", timeout_s=self.args.weight_update_timeout_s)
