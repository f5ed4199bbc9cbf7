"""What the rollout manager does with its engines: start, watch, replace, hand memory over, describe to trainers."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import ray
from ray.exceptions import RayError

from slime.backends.sglang_utils.router_process import RouterHandle
from slime.backends.sglang_utils.server_control import ServerControl
from slime.ray.engine_handles import UpdatableEngines
from slime.ray.external_group import ExternalGroup
from slime.ray.health_monitor import RolloutHealthMonitor, StallMonitor
from slime.ray.placement_group import GpuSlice, plan_gpus
from slime.ray.rollout_servers import (
    RolloutServer,
    ServerGroup,
    first_dead_engine,
    start_rollout_servers,
    wait_until_serving,
)
from slime.ray.server_group import EngineState
from slime.ray.utils import Lock
from slime.ray.waiting import wait_for
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, ProcessError
from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)

CONTROL_GROUP = "control"
"""Concurrency group of the short calls that must not queue behind a running ``generate``."""

ALIVE = (EngineState.STARTING, EngineState.READY, EngineState.SERVING)
ENGINE_CHECK_INTERVAL_S = 3.0
DEADLINE_MARGIN_S = 180.0
"""The rollout function has its own deadline and the better message; ours comes later, the driver's last."""

GIVE_UP_ADVICE = {
    False: "start the job again to resume from the last checkpoint, or pass --use-fault-tolerance to have engines "
    "restarted",
    True: "start the job again to resume from the last checkpoint",
}


class EngineFleet:
    """The engines of all models.  A mixin of the rollout manager, whose methods these are.

    Invariant: ``_connected`` are the engines to which the trainers' weight sender is connected, in its order; as long
    as the engines that take updates are others, the trainers are told to connect again.
    """

    args: Namespace

    def _start_fleet(self, args: Namespace, gpus: GpuSlice) -> None:
        """Begin to start routers and engines; :meth:`wait_ready` sees to the end of it."""
        self.servers: list[RolloutServer] = []
        self._starting: list[ray.ObjectRef] = []
        self._connected: list[Any] = []
        self._offered: list[Any] = []
        self._monitors: list[RolloutHealthMonitor] = []
        self._next_router_check_s = 0.0
        if not args.debug_train_only:
            self.servers, self._starting = start_rollout_servers(args, gpus)
        self._engine_lock = None if args.debug_train_only else Lock.remote()
        if args.use_fault_tolerance or args.rollout_stall_timeout_s > 0:
            monitor = RolloutHealthMonitor if args.use_fault_tolerance else StallMonitor
            self._monitors = [monitor(args, group) for group in self._groups]

    @property
    def _groups(self) -> list[ServerGroup]:
        return [group for server in self.servers for group in server.groups]

    @property
    def server(self) -> RolloutServer | None:
        """The first model's engines."""
        return self.servers[0] if self.servers else None

    @property
    def rollout_engines(self) -> list[Any]:
        """The live engines of every model."""
        return [engine for server in self.servers for engine in server.engines]

    def wait_ready(self) -> None:
        """Until every engine serves; gives their start-up error if one does not."""
        wait_until_serving(self.args, self._starting)
        self._starting = []
        for group in self._groups:
            group.started()

    # Weights

    @property
    def _updatable_groups(self) -> list[ServerGroup]:
        """The groups of the first model that takes weight updates."""
        model = next((server for server in self.servers if server.config.update_weights), None)
        return [group for group in model.groups if group.config.worker_type != "encoder"] if model else []

    def _describe(self, *states: EngineState) -> UpdatableEngines:
        offset = plan_gpus(self.args).rollout_offset
        handles, counts, offsets, nodes, acknowledges = [], [], [], [], []
        for group in self._updatable_groups:
            for index in group.indices(*states):
                if (engine := group.engines[index]) is not None:
                    handles.append(engine)
                    counts.append(group.num_gpus_per_engine)
                    offsets.append(offset + group.engine_gpu_offsets[index])
                    acknowledges.append(group.acknowledges_pushes)
                    nodes.append(group.actors_of(index))
        self._offered = handles
        num_new = len([handle for handle in handles if handle not in self._connected])
        return UpdatableEngines(
            handles=handles,
            gpu_counts=counts,
            gpu_offsets=offsets,
            # One that is gone leaves a hole in the sender's group: connecting again closes it.
            num_new=num_new or int(handles != self._connected),
            num_trainer_gpus=self.args.actor_num_nodes * self.args.actor_num_gpus_per_node,
            node_handles=nodes,
            acknowledges=acknowledges,
        )

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_updatable_engines(self) -> UpdatableEngines:
        """The engines of the first model that takes weight updates."""
        return self._describe(EngineState.SERVING, EngineState.READY)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_engines_without_weights(self) -> UpdatableEngines:
        """Replacements that serve, but wait for the present weights before they get requests."""
        self._raise_if_given_up()
        if not any(group.indices(EngineState.READY) for group in self._updatable_groups):
            return UpdatableEngines(handles=[], gpu_counts=[], gpu_offsets=[], num_new=0, num_trainer_gpus=0)
        return self._describe(EngineState.READY)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        """``(engines, lock, num_new_engines, gpu_counts, gpu_offsets, parallel_configs)`` of the updatable model."""
        engines = self._describe(EngineState.SERVING, EngineState.READY)
        configs = [{"tp_size": count // (self.args.sglang_pp_size or 1)} for count in engines.gpu_counts]
        lock = self._engine_lock
        return engines.handles, lock, engines.num_new, engines.gpu_counts, engines.gpu_offsets, configs

    @ray.method(concurrency_group=CONTROL_GROUP)
    def clear_updatable_num_new_engines(self) -> None:
        """The trainers have connected to the engines that they were told of last."""
        self._connected = list(self._offered)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def admit_updated_engines(self, fenced: Sequence[ExcludedEngine] = ()) -> None:
        """The engines that the trainers were told of last hold the present weights: let the router know new ones.

        Args:
            fenced: those that do not.
        """
        left_out = {engine.index for engine in fenced}
        offered = [handle for index, handle in enumerate(self._offered) if index not in left_out]
        for group in self._updatable_groups:
            for index in group.indices(EngineState.READY):
                if group.engines[index] in offered:
                    group.admit(index)

    # Faults

    @ray.method(concurrency_group=CONTROL_GROUP)
    def leave_out_engines(self, fenced: Sequence[ExcludedEngine], policy: str) -> None:
        """Take engines out of service that a push has fenced.

        Args:
            fenced: indices count the engines that the trainers were told of last.
            policy: ``refill`` starts others in their place, ``drop`` goes on without them.

        Raises:
            EngineError: no engine of the model is left, or one cannot be replaced.
        """
        handles = [self._offered[engine.index] for engine in fenced]
        for group in self._updatable_groups:
            for index, engine in enumerate(group.engines):
                if engine is None or engine not in handles:
                    continue
                reason = f"it did not take the weights: {fenced[handles.index(engine)].reason}"
                group.replace(index, reason) if policy == "refill" else group.drop(index, reason)
        self._raise_if_given_up()
        if policy == "drop" and not any(group.indices(*ALIVE) for group in self._updatable_groups):
            reasons = "; ".join(f"engine {engine.index}: {engine.reason}" for engine in fenced)
            raise EngineError(
                "no engine is left to generate with, the last were dropped (--weight-push-failure drop). " + reasons
            )

    def drop_dead_engines(self, patience_s: float = 0.0) -> int:
        """Replace engines whose process has ended since they were last looked at; gives how many.

        Args:
            patience_s: how long to look for the first; a server ends some seconds after one of its processes has died.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            found = [(group, *dead) for group in self._groups for dead in group.find_exited(2.0).items()]
            for group, index, sentence in found:
                group.replace(index, sentence)
            self._raise_if_given_up()
            if found or time.monotonic() >= deadline_s:
                return len(found)
            time.sleep(0.5)

    def recover_updatable_engines(self) -> None:
        """See to it that the coming weight update meets live engines, with the memory state that it expects.

        Waits for replacements where the GPUs are shared (an engine sizes its memory by what is free, so it must not
        start beside a trainer) and where a model has no other engine; others get their weights when they are there.
        """
        self.drop_dead_engines()
        for server in self.servers:
            for group in server.groups:
                before = set(group.indices(EngineState.READY))
                if group.needs_offload or not server.has_serving_engine:
                    group.wait_settled(self.args.engine_start_timeout_s * 2)
                if group.needs_offload:
                    fresh = [group.engines[i] for i in group.indices(EngineState.READY) if i not in before]
                    self._on_engines(fresh, "release_memory_occupation")
                    self._on_engines(fresh, "resume_memory_occupation", tags=["weights"])

    def _raise_if_given_up(self) -> None:
        for group in self._groups:
            if group.given_up is not None:
                advice = GIVE_UP_ADVICE[self.args.use_fault_tolerance]
                raise EngineDiedError(f"{group.given_up}. The run cannot go on; {advice}.")

    def _watching_engines(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` beside a check that router and engines still live.

        Without fault tolerance a dead one ends the rollout at once, instead of after every request to it has been
        retried, and one that hangs after ``--rollout-stall-timeout-s``.  With it the health monitors replace engines,
        and a router is started again here.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        future = executor.submit(work)
        deadline = time.monotonic() + self.args.rollout_timeout_s + DEADLINE_MARGIN_S
        try:
            while True:
                try:
                    return future.result(timeout=ENGINE_CHECK_INTERVAL_S)
                except FutureTimeout:
                    if future.done():
                        raise
                self._look_after_engines()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the rollout function has run for {self.args.rollout_timeout_s:.0f} s "
                        "(--rollout-timeout-s) and has not returned"
                    )
        finally:
            executor.shutdown(wait=False)
            if not self.args.use_fault_tolerance:
                self.health_monitoring_pause()  # engines may take weights now, or give their memory away

    def _look_after_engines(self) -> None:
        """Raise for what ends the run; with fault tolerance, start a dead router again."""
        tolerant = self.args.use_fault_tolerance
        is_time_to_ask = time.monotonic() >= self._next_router_check_s
        if is_time_to_ask:
            self._next_router_check_s = time.monotonic() + self.args.rollout_health_check_interval
        for server in self.servers:
            if server.router is None or (problem := self._router_problem(server.router, ask=is_time_to_ask)) is None:
                continue
            dead = f"the router {server.router.url} of model {server.config.name!r} {problem}"
            if not tolerant or server.router.process is None:
                raise EngineDiedError(f"{dead}. The rollout cannot go on; {GIVE_UP_ADVICE[tolerant]}.")
            logger.error("%s: it is started again", dead)
            server.restart_router(self.args)
        self._raise_if_given_up()
        if tolerant:
            return
        if dead_engine := first_dead_engine(self._groups, timeout_s=ENGINE_CHECK_INTERVAL_S):
            raise EngineDiedError(f"{dead_engine}. The rollout cannot go on; {GIVE_UP_ADVICE[False]}.")

    def _router_problem(self, router: RouterHandle, *, ask: bool) -> str | None:
        """What keeps a router from its work, as the end of a sentence; None for nothing.

        Args:
            router: one whose process is ours is looked at; any other is only asked.
            ask: whether to send a request too, which also finds a router that hangs.
        """
        if router.process is not None and not router.process.is_alive():
            return "has ended"
        timeout_s = self.args.rollout_health_check_timeout
        if ask and not ServerControl(router.url).answers("/health", timeout_s=timeout_s):
            return f"does not answer within {timeout_s:g} s (--rollout-health-check-timeout)"
        return None

    def _begin_watching(self) -> None:
        """A rollout begins."""
        for group in self._groups:
            group.begin_rollout()
        self.health_monitoring_resume()

    def health_monitoring_pause(self) -> None:
        """Engines are about to be busy with something else than requests."""
        for monitor in self._monitors:
            monitor.pause()

    def health_monitoring_resume(self) -> None:
        """Engines serve again."""
        for monitor in self._monitors:
            monitor.resume()

    # Memory

    def offload(self) -> None:
        """Engines on the trainers' GPUs give their memory away."""
        self.health_monitoring_pause()
        for group in self._groups:
            if group.needs_offload and self.args.use_fault_tolerance:
                group.wait_settled(self.args.engine_start_timeout_s * 2)
        self._on_shared_gpus("release_memory_occupation")

    def onload(self, tags: list[str] | None = None) -> None:
        """Engines on the trainers' GPUs take the memory of ``tags`` (None: all of it) back."""
        self._on_shared_gpus("resume_memory_occupation", tags=tags)

    def onload_weights(self) -> None:
        """Room for the weights, which a push then fills."""
        self.onload(["weights"])

    def onload_kv(self) -> None:
        """Room for the KV cache and the CUDA graphs: after this an engine can generate."""
        self.onload(["kv_cache", "cuda_graph"])

    def _on_shared_gpus(self, method: str, **keywords: Any) -> None:
        """Call a method of every engine that shares GPUs; with fault tolerance one that fails in it is replaced."""
        asked = [
            (group, index, getattr(group.engines[index], method).remote(**keywords))
            for group in self._groups
            if group.needs_offload
            for index in group.indices(EngineState.SERVING, EngineState.READY)
        ]
        timeout_s = self.args.weight_update_timeout_s
        if not self.args.use_fault_tolerance:
            wait_for([ref for _, _, ref in asked], what=f"{method} of the engines", timeout_s=timeout_s)
            return
        deadline_s = time.monotonic() + timeout_s
        for group, index, ref in asked:
            try:
                wait_for(ref, what=f"{method} of {group.name_of(index)}", timeout_s=deadline_s - time.monotonic())
            except (ProcessError, RayError) as error:
                group.replace(index, str(error))

    def _on_engines(self, engines: list[Any], method: str, **keywords: Any) -> list[Any]:
        refs = [getattr(engine, method).remote(**keywords) for engine in engines]
        return wait_for(refs, what=f"{method} of the engines", timeout_s=self.args.weight_update_timeout_s)

    def check_weights(self, action: str) -> list[Any]:
        """Ask every engine's weight checker to snapshot, reset_tensors or compare."""
        return self._on_engines(self.rollout_engines, "check_weights", action=action)

    def _stop_fleet(self) -> None:
        """Stop engines and routers in an orderly way; external ones go on."""
        for monitor in self._monitors:
            monitor.stop()
        ours = [group for group in self._groups if not isinstance(group, ExternalGroup)]
        refs = [engine.shutdown.remote() for group in ours for engine in group.engines if engine is not None]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=self.args.shutdown_timeout_s)
        for server in self.servers:
            if server.router is not None:
                server.router.stop()
