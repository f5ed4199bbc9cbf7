"""The driver's side of a weight push: which engines get the weights, and what happens to engines that fail to.

push_started -> the ranks connect to new engines -> they push -> push_done | push_refused
             -> with fault tolerance, replacement engines start and get the same weights
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from slime.ray.engines.deadlines import memory_timeout_s
from slime.ray.waiting import wait_for
from slime.utils.errors import DeadlineError, EngineDiedError, HangError, ProcessError, WeightSyncError

if TYPE_CHECKING:
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.engines.verbs import EngineList
    from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)

MAX_PUSHES = 4
"""The run ends after this many pushes of the same weights failed on all engines, each on fresh engines."""
MAX_FAILED_RESENDS = 3
"""The run ends after new engines failed this many times in a row to take the weights."""
ANSWER_S = 60.0
"""Deadline in seconds for the main rank to report which engines a finished push excluded."""
PUSH_MARGIN_S = 120.0
"""Seconds added to the push's own deadline, for the trainers' collectives after a late engine."""


class WeightPush:
    """Pushes a trainer's weights to a rollout manager's engines.

    Args:
        trainer: the group whose ranks push.
    """

    def __init__(self, trainer: RayTrainGroup) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.manager: Any = None
        self.is_connected = False
        """True if the ranks are connected to the engines that the manager described last."""
        self.excluded: list[ExcludedEngine] = []
        """Engines excluded by the last push and not yet reported to the manager."""
        self._failed_resends = 0

    @property
    def restarts_engines(self) -> bool:
        """True if engines may restart during a rollout and then wait for this trainer's weights."""
        args = self.args
        return bool(args.use_fault_tolerance and self.trainer.world_size and not args.debug_train_only)

    def update(self) -> dict[str, float]:
        """Push the current weights to every engine that takes updates; return the metrics of the push.

        With fault tolerance, dead engines are replaced first.  ``--weight-push-failure`` decides what happens to
        engines that do not take the push.
        """
        if self.args.debug_train_only or not self.trainer.world_size:
            return {}
        if self.restarts_engines:
            # Engines do not answer health probes while they start or take weights; the next rollout resumes probing.
            self.ask_manager("health_monitoring_pause")
            self._recover_engines()
        metrics = self._push_until_taken()
        if self._report_refusals() and self.restarts_engines:
            # On shared GPUs, replacements must be up before the trainer takes the GPUs.
            self._recover_engines()
            self.serve_new_engines()
        return metrics

    def _push_until_taken(self) -> dict[str, float]:
        """Push; if no engine took the weights, push again to replacements.  Failures of the trainer are raised."""
        num_failed = 0
        while True:
            try:
                return self.push_once()
            except HangError:
                raise  # the trainer hangs; a recovering driver restarts it
            except (ProcessError, WeightSyncError) as error:
                num_failed += 1
                if not self.restarts_engines or num_failed == MAX_PUSHES:
                    raise
                was_refused = self._report_refusals()
                if not self.ask_manager("find_dead_engines", 0.0 if was_refused else 10.0) and not was_refused:
                    raise
                logger.warning("No engine took the push; retrying: %s", error)
            self._recover_engines()

    def serve_new_engines(self) -> None:
        """Push the weights to engines that replaced dead ones.  Call only while the trainer is idle."""
        engines = self.ask_manager("describe_engines", "without_weights")
        if not engines.num:
            return
        try:
            self.resend(engines)
            self._failed_resends = 0
        except HangError:
            raise
        except (ProcessError, WeightSyncError) as error:
            # The new engine may have died as well.  Its monitor then reports it, and this method is called again.
            self._failed_resends += 1
            if self._failed_resends >= MAX_FAILED_RESENDS:
                raise
            logger.warning("New engines did not take the weights; will retry: %s", error)
        self._report_refusals()

    def _report_refusals(self) -> bool:
        """Tell the manager which engines the last push excluded; return whether there were any.

        Raises:
            WeightSyncError: ``--weight-push-failure`` is stop.
        """
        excluded, self.excluded = self.excluded, []
        if excluded:
            self.ask_manager("push_refused", excluded)
        return bool(excluded)

    def _recover_engines(self) -> None:
        """Restart dead engines and wait for those that must take the push."""
        timeout_s = memory_timeout_s(self.args.engine_start_timeout_s, self.args.weight_update_timeout_s)
        self.ask_manager("recover_updatable_engines", timeout_s=timeout_s)

    def push_once(self) -> dict[str, float]:
        """Push the current weights once and fill :attr:`excluded` with the engines that did not take them."""
        self.excluded = []
        engines = self.ask_manager("push_started")
        if not engines.num:
            return {}
        metrics = self.send("update_weights", engines)
        self._report_taken()
        return metrics

    def resend(self, engines: EngineList) -> None:
        """Push the weights of the last push, under the same version, to engines that started after it."""
        self.send("resend_weights", engines)
        self._report_taken()

    def send(self, verb: str, engines: EngineList) -> dict[str, float]:
        """Push once by calling ``verb`` on all ranks; fills :attr:`excluded`.

        The ranks enforce the push's deadline themselves and know which engine was late.
        """
        trainer, self.excluded = self.trainer, []
        if verb == "resend_weights" or engines.num_new or not self.is_connected:
            self._connect(engines)
        trainer.version.count(self.args.save)
        timeout_s = self.args.weight_update_timeout_s + PUSH_MARGIN_S
        try:
            results = trainer.on_all(verb, what="the push", timeout_s=timeout_s)
        except WeightSyncError:
            # If one rank failed alone, the main rank is dead or waits for it and cannot report; raise the error as is.
            with contextlib.suppress(DeadlineError, EngineDiedError):
                self.excluded = self._ask_excluded()
            raise
        self.excluded = self._ask_excluded()
        return next((result for result in results if result), {})

    def _connect(self, engines: EngineList) -> None:
        # Restarted ranks know no engine, whatever the manager told their predecessors.
        all_new = replace(engines, num_new=engines.num)
        self.is_connected = False  # after a failure, ranks may know different sets of engines
        self.trainer.on_all("connect_engines", all_new, what="the trainers' connection to the engines")
        self.is_connected = True
        self.ask_manager("clear_updatable_num_new_engines")

    def _ask_excluded(self) -> list[ExcludedEngine]:
        asked = [self.trainer.actors[0].excluded_engines.remote()]
        return self.trainer.wait(asked, "the engines that the push excluded", ANSWER_S)[0]

    def _report_taken(self) -> None:
        """Report that a push is done.  A new engine that its router does not accept waits for the next rollout."""
        try:
            self.ask_manager("push_done", self.excluded)
        except ProcessError as error:
            if not self.restarts_engines:
                raise
            logger.warning("A new engine is waiting for its router: %s", error)

    def ask_manager(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the rollout manager and wait for its result."""
        ref: ray.ObjectRef = getattr(self.manager, method).remote(*arguments)
        what = f"the rollout manager ({method})"
        return wait_for(ref, what=what, timeout_s=timeout_s or self.args.weight_update_timeout_s)
