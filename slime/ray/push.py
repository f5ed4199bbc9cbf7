"""The driver's side of a push: which engines get the weights, and what becomes of those that do not take them.

push_started -> the ranks connect to new engines -> they push -> push_done | push_refused
             -> with fault tolerance others start in their place, and get the same weights
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
"""Pushes of the same weights that no engine took, each to fresh engines, after which the run ends."""
MAX_FAILED_RESENDS = 3
"""Failures in a row of new engines to take weights, after which the run ends."""
ANSWER_S = 60.0
"""For the main rank to say which engines a push that is over excluded."""
PUSH_MARGIN_S = 120.0
"""Time of a push beyond its own deadline, for the trainers' collectives after the last engine was late."""


class WeightPush:
    """Pushes the weights of a trainer to the engines of a rollout manager.

    Args:
        trainer: its ranks push.
    """

    def __init__(self, trainer: RayTrainGroup) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.manager: Any = None
        self.is_connected = False
        """The ranks know the engines that the manager described last."""
        self.excluded: list[ExcludedEngine] = []
        """The engines that the last push excluded and that were not reported yet."""
        self._failed_resends = 0

    @property
    def restarts_engines(self) -> bool:
        """True when engines may start while a rollout runs, and wait for weights of this trainer."""
        args = self.args
        return bool(args.use_fault_tolerance and self.trainer.world_size and not args.debug_train_only)

    def update(self) -> dict[str, float]:
        """Give the present weights to every engine that takes updates; return the metrics of the push.

        With fault tolerance dead engines are replaced first.  ``--weight-push-failure`` says what becomes of engines
        that do not take the push.
        """
        if self.args.debug_train_only or not self.trainer.world_size:
            return {}
        if self.restarts_engines:
            # An engine that starts or takes weights answers no probe; the next rollout resumes the monitors.
            self.ask_manager("health_monitoring_pause")
            self._recover_engines()
        metrics = self._push_until_taken()
        if self._report_refusals() and self.restarts_engines:
            # Where GPUs are shared, others must be up before the trainer takes them; elsewhere that can wait.
            self._recover_engines()
            self.serve_new_engines()
        return metrics

    def _push_until_taken(self) -> dict[str, float]:
        """Push; where no engine took it, again to others in their place.  A failure of the trainer's stays one."""
        num_failed = 0
        while True:
            try:
                return self.push_once()
            except HangError:
                raise  # the trainer's, which is started again
            except (ProcessError, WeightSyncError) as error:
                num_failed += 1
                if not self.restarts_engines or num_failed == MAX_PUSHES:
                    raise
                was_refused = self._report_refusals()
                if not self.ask_manager("find_dead_engines", 0.0 if was_refused else 10.0) and not was_refused:
                    raise
                logger.warning("no engine took the push; retrying: %s", error)
            self._recover_engines()

    def serve_new_engines(self) -> None:
        """Give the weights to engines in the place of dead ones; to be called while the trainer is idle."""
        engines = self.ask_manager("describe_engines", "without_weights")
        if not engines.num:
            return
        try:
            self.resend(engines)
            self._failed_resends = 0
        except HangError:
            raise
        except (ProcessError, WeightSyncError) as error:
            # It may have died as well: then its monitor reports it, and we are called again.
            self._failed_resends += 1
            if self._failed_resends >= MAX_FAILED_RESENDS:
                raise
            logger.warning("new engines did not take the weights; they will be tried again: %s", error)
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
        """Restart dead engines, and wait for those that the push must meet."""
        self.ask_manager("recover_updatable_engines", timeout_s=memory_timeout_s(self.args))

    def push_once(self) -> dict[str, float]:
        """Push the present weights once; :attr:`excluded` has the engines that did not take them."""
        self.excluded = []
        engines = self.ask_manager("push_started")
        if not engines.num:
            return {}
        metrics = self.send("update_weights", engines)
        self._report_taken()
        return metrics

    def resend(self, engines: EngineList) -> None:
        """Give engines that started late what the others got with the last push, under the same version."""
        self.send("resend_weights", engines)
        self._report_taken()

    def send(self, verb: str, engines: EngineList) -> dict[str, float]:
        """Push once, by a verb of the trainer's; :attr:`excluded` has the engines that did not take the weights.

        The trainers keep the deadline of the push themselves, and know who was late.
        """
        trainer, self.excluded = self.trainer, []
        if verb == "resend_weights" or engines.num_new or not self.is_connected:
            self._connect(engines)
        trainer.version.count(self.args.save)
        timeout_s = self.args.weight_update_timeout_s + PUSH_MARGIN_S
        try:
            results = trainer.on_all(verb, what="the push", timeout_s=timeout_s)
        except WeightSyncError:
            # A rank that failed alone has left the main rank waiting for it, or dead: then that error is all there is
            # to know.
            with contextlib.suppress(DeadlineError, EngineDiedError):
                self.excluded = self._ask_excluded()
            raise
        self.excluded = self._ask_excluded()
        return next((result for result in results if result), {})

    def _connect(self, engines: EngineList) -> None:
        # Ranks that were started again know none of them, whatever the manager told those before.
        all_new = replace(engines, num_new=engines.num)
        self.is_connected = False  # where it fails some ranks know these engines, and others those before
        self.trainer.on_all("connect_engines", all_new, what="the trainers' connection to the engines")
        self.is_connected = True
        self.ask_manager("clear_updatable_num_new_engines")

    def _ask_excluded(self) -> list[ExcludedEngine]:
        asked = [self.trainer.actors[0].excluded_engines.remote()]
        return self.trainer.wait(asked, "the engines that the push excluded", ANSWER_S)[0]

    def _report_taken(self) -> None:
        """Report the engines that took a push; a new one that a router does not take in waits for the next rollout."""
        try:
            self.ask_manager("push_done", self.excluded)
        except ProcessError as error:
            if not self.restarts_engines:
                raise
            logger.warning("a new engine waits for its router: %s", error)

    def ask_manager(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Have the rollout manager do something, and wait for it."""
        ref: ray.ObjectRef = getattr(self.manager, method).remote(*arguments)
        what = f"the rollout manager ({method})"
        return wait_for(ref, what=what, timeout_s=timeout_s or self.args.weight_update_timeout_s)
