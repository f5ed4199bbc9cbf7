"""The engines of all models in a run.

Events of an engine are reported to its group, which acts on them (see ``lifecycle``).
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import Any

import ray

from slime.flags.security import Trust
from slime.ray.engines.deadlines import ROLLOUT_MARGIN_S, restart_timeout_s, start_timeout_s
from slime.ray.engines.group import END_ADVICE, raise_if_given_up
from slime.ray.engines.lifecycle import EngineEvent
from slime.ray.engines.memory import SharedMemory
from slime.ray.engines.models import RolloutServer, wait_until_serving
from slime.ray.engines.monitor import HealthMonitor, StallMonitor
from slime.ray.engines.weights import WeightTargets
from slime.ray.utils import Lock
from slime.ray.waiting import wait_for
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError

logger = logging.getLogger(__name__)

ENGINE_CHECK_INTERVAL_S = 3.0


class EngineFleet:
    """Starts, watches and stops the engines of all models.

    ``weights`` describes engines to trainers; ``memory`` manages the GPU memory that they share with trainers.
    """

    def __init__(self, args: Namespace, servers: Sequence[RolloutServer] = ()) -> None:
        self.args = args
        self.servers = list(servers)
        self.groups = [group for server in servers for group in server.groups]
        self.weights = WeightTargets(args, servers)
        self.memory = SharedMemory(
            self.groups,
            restart_s=restart_timeout_s(args.engine_start_timeout_s),
            answer_s=args.weight_update_timeout_s,
            is_tolerant=args.use_fault_tolerance,
        )
        self._has_snapshot = False
        self._start_guard = threading.Lock()
        self._said: list[str] = []
        """Addresses already logged."""
        self._next_router_check_s = 0.0
        self._monitors: list[HealthMonitor] = []
        for group in self.groups if args.use_fault_tolerance or args.rollout_stall_timeout_s > 0 else ():
            interval_s, timeout_s = args.rollout_health_check_interval, args.rollout_health_check_timeout
            waits = {"interval_s": interval_s, "timeout_s": timeout_s}
            if args.use_fault_tolerance:
                monitor = HealthMonitor(group, **waits, first_wait_s=args.rollout_health_check_first_wait)
            else:
                monitor = StallMonitor(group, **waits, stall_timeout_s=args.rollout_stall_timeout_s)
            self._monitors.append(monitor)

    def wait_ready(self) -> None:
        """Wait until every engine serves; may be called several times, from several threads.

        Raises:
            ProcessError: an engine did not start, or a router ended meanwhile.
        """
        with self._start_guard:
            wait_until_serving(self.groups, start_timeout_s(self.args.engine_start_timeout_s))
            lines = [line for server in self.servers for line in server.listens_at()]
            if lines != self._said:
                self._said = lines
                guard = "no secret" if Trust.of(self.args).job_secret is None else "the job's secret"
                logger.info("Listening, guarded by %s: %s", guard, "; ".join(lines))

    def stop(self) -> None:
        """Stop engines and routers cleanly; external ones keep running."""
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

    @cached_property
    def lock(self) -> Any:
        """A cluster-wide lock for drivers written for upstream; None without engines."""
        return Lock.remote() if self.servers else None

    # Faults

    def find_dead_engines(self, patience_s: float = 0.0) -> int:
        """Report engines whose process has ended since the last check; return how many.

        Args:
            patience_s: seconds to keep looking for one; a server ends some seconds after one of its processes.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            found = [(group, *dead) for group in self.groups for dead in group.find_exited(2.0).items()]
            for group, index, sentence in found:
                group.report(index, EngineEvent.DIED, sentence)
            raise_if_given_up(self.groups)
            if found or time.monotonic() >= deadline_s:
                return len(found)
            time.sleep(0.5)

    def recover(self) -> None:
        """Ensure that the next weight push finds live engines in the memory state that it expects.

        Waits for restarts on shared GPUs (an engine sizes its memory by what is free, so it must not start while a
        trainer holds memory) and if a model has no live engine.  Other restarting engines get the weights later.
        """
        self.find_dead_engines()
        for server in self.servers:
            for group in server.groups:
                if not server.has_live_engine:
                    group.wait_settled()
        self.memory.release_started()

    def begin_rollout(self) -> None:
        """Reset the restart counts and resume the monitors."""
        for group in self.groups:
            group.begin_rollout()
        self.resume_monitors()

    def run_watched(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` while checking that routers and engines are alive; return its result.

        Without fault tolerance, a dead router or engine ends the rollout at once instead of after all retries, and a
        hanging engine ends it after ``--rollout-stall-timeout-s``.  With fault tolerance, the health monitors report
        engines, and this method restarts dead routers.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        future = executor.submit(work)
        deadline = time.monotonic() + self.args.rollout_timeout_s + ROLLOUT_MARGIN_S
        try:
            while not wait([future], timeout=ENGINE_CHECK_INTERVAL_S).done:
                self.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the rollout function has not returned within {self.args.rollout_timeout_s:.0f} s "
                        "(--rollout-timeout-s)"
                    )
            try:
                return future.result(timeout=0)
            except EngineError:
                if not self.args.use_fault_tolerance:
                    time.sleep(ENGINE_CHECK_INTERVAL_S)  # a killed server's sockets close before it has ended
                    self.check()  # the server's death explains more than a refused request
                raise
        finally:
            executor.shutdown(wait=False)
            if not self.args.use_fault_tolerance:
                self.pause_monitors()  # engines may now take weights or release memory

    def check(self) -> None:
        """Raise if something ends the run; with fault tolerance, restart a dead router.

        Raises:
            EngineDiedError: a router or an engine is dead.
        """
        tolerant = self.args.use_fault_tolerance
        is_time_to_ask = time.monotonic() >= self._next_router_check_s
        if is_time_to_ask:
            self._next_router_check_s = time.monotonic() + self.args.rollout_health_check_interval
        timeout_s = self.args.rollout_health_check_timeout if is_time_to_ask else None
        for server in self.servers:
            if tolerant and server.has_own_router:
                server.revive_router(timeout_s)
            elif dead := server.router_problem(timeout_s):
                raise EngineDiedError(f"{dead}. The rollout cannot continue; {END_ADVICE[tolerant]}.")
        raise_if_given_up(self.groups)
        if tolerant:
            return
        for group in self.groups:
            for index, sentence in group.find_exited(ENGINE_CHECK_INTERVAL_S).items():
                dead = f"{group.name_of(index)}: {sentence}"
                raise EngineDiedError(f"{dead}. The rollout cannot continue; {END_ADVICE[False]}.")

    def pause_monitors(self) -> None:
        """Stop probing, because engines are about to stop serving requests."""
        for monitor in self._monitors:
            monitor.pause()

    def resume_monitors(self) -> None:
        """Resume probing, because engines serve requests again."""
        for monitor in self._monitors:
            monitor.resume()

    # Memory

    def offload(self) -> None:
        """Make the engines on the trainers' GPUs release their memory."""
        self.pause_monitors()
        self.memory.release()

    def check_weights(self, action: str) -> list[Any]:
        """Call every engine's weight checker with ``action``: snapshot, reset_tensors or compare."""
        # With --check-weight-update-equal each push is already checked, so the extra compare by upstream's driver is
        # skipped.
        if action == "compare" and not self._has_snapshot and self.args.check_weight_update_equal:
            return []
        self._has_snapshot |= action == "snapshot"
        engines = [engine for group in self.groups for engine in group.engines if engine is not None]
        refs = [engine.check_weights.remote(action=action) for engine in engines]
        return wait_for(refs, what="check_weights of the engines", timeout_s=self.args.weight_update_timeout_s)
