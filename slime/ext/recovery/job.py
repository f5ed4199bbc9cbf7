"""The driver that survives deaths of the trainer's ranks and of the manager, and saves before it exits on SIGTERM.

A failure surfaces in the driver's current step or in one of its waits:

    step -> a rank died -> the trainer is brought back to this step -> repeat the step   (trainer_recovery.py)
    wait for a rollout -> the manager died -> start another, replay up to that rollout -> push -> repeat the rollout
    SIGTERM -> the trainer's step ends -> save -> exit                                   (preemption.py)

Engines keep generating while the trainer restarts, and no token is sampled twice.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from slime.ext.recovery.lending import give_back, lend
from slime.ext.recovery.preemption import Preemption
from slime.ext.recovery.trainer_gpus import TrainerGpus
from slime.ext.recovery.trainer_recovery import NOTICE_S, TrainerRecovery
from slime.flags.parse import args_to_resume, record_runtime
from slime.observability.telemetry import event, span
from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines.deadlines import memory_timeout_s
from slime.ray.gpus import GpuSlice
from slime.ray.startup import (
    MANAGER,
    create_rollout_manager,
    engines_come_first,
    load_position,
    save_position,
    wait_for_engines,
)
from slime.ray.train_loop import Generation, TrainJob
from slime.ray.utils import RELEASE_GRACE_S, cluster_has_accelerators
from slime.ray.waiting import find_death, forget, react_by, sigterm, unwatched, wait_for
from slime.utils.errors import EngineDiedError, ProcessError
from slime.utils.misc import Box

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RecoveringJob(TrainJob):
    """A job whose trainer, manager and nodes may die (``--trainer-recovery``, ``--preemption-grace-s``)."""

    def start_parts(self) -> None:
        """Start the parts and set up recovery for them."""
        super().start_parts()
        self._unsaved: int | None = None
        """The last rollout trained on, if it has not been saved."""
        self._notice = Preemption(self.args.preemption_grace_s, self._save_and_leave)
        self._recovery = TrainerRecovery(
            self.args, self.trainers, self._notice, TrainerGpus(self.args, self.gpus), self._save_unsaved
        )
        self._notice.lets_go = self._recovery.can_let_go
        self._notice.listen()
        sigterm().check()
        react_by(self._notice)

    def step(self, name: str, work: Callable[[], T], *, needs_trainer: bool = True) -> T:
        """Return ``work()``; if a trainer rank dies during it, restart the trainer and repeat it."""
        return super().step(name, lambda: self._recovery.run(work, needs_trainer=needs_trainer))

    # The trainer

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Train on one rollout, or skip it if it causes a rollback.  SIGTERM takes effect afterwards."""
        self._on_shared_gpus("offload", "offload")
        with self._notice.deferred():
            with span("train"):
                self._recovery.train(rollout_id, rollout_data)
            self._ask("train", "record_trained", rollout_id, what="the ledger")
            self._unsaved = rollout_id

    def push_weights(self) -> None:
        """Push the weights.  SIGTERM takes effect afterwards."""
        with self._notice.deferred():
            super().push_weights()

    def serve_new_engines(self) -> None:
        """Push the weights to new engines, if the trainer is up.

        On shared GPUs a dead trainer normally restarts after the rollout, because the engines hold the GPUs.  If no
        request can be answered until it pushes weights, it restarts at once.
        """
        if self._recovery.is_down:
            if not self._lend_memory(is_lent=True):
                return
            self._recovery.restart()
            self._lend_memory(is_lent=False)
        with self._notice.deferred():
            super().serve_new_engines()

    def _lend_memory(self, *, is_lent: bool) -> bool:
        """Make engines lend memory to a restarting trainer, or take it back; return whether they lend it."""
        ref: ray.ObjectRef[bool] = self.manager.run.remote(lend if is_lent else give_back)
        what = f"the engines' memory ({'offload' if is_lent else 'onload'})"
        timeout_s = memory_timeout_s(self.args.engine_start_timeout_s, self.args.weight_update_timeout_s)
        return wait_for(ref, what=what, timeout_s=timeout_s)

    # Saves

    def save_if_due(self, rollout_id: int) -> None:
        """Save if the flags say so, and after a rollback."""
        if self._recovery.must_save:
            self.save(rollout_id)
        else:
            super().save_if_due(rollout_id)

    def save(self, rollout_id: int, *, is_last: bool = False) -> None:
        """Save, and drop the train data kept for repeating steps."""
        with self._notice.deferred():
            super().save(rollout_id, is_last=is_last)
            self._unsaved = None
            self._recovery.record_saved()

    def _save_unsaved(self) -> None:
        """Save training since the last checkpoint, on disk when this returns, because the trainer must exit."""
        if self._unsaved is not None and self.args.save is not None:
            self.save(self._unsaved, is_last=True)

    def _save_and_leave(self) -> None:
        """Save training since the last checkpoint; the processes do nothing else afterwards."""
        rollout_id = self._unsaved
        if rollout_id is None or self.args.save is None:
            return
        if self._recovery.is_down:
            raise ProcessError("the trainer had died and had not recovered yet")
        position = partial(save_position, self.args, self.manager, rollout_id)
        if self.args.offload_rollout and cluster_has_accelerators():
            # The engines hold the GPUs in the middle of a rollout, so they are killed before the trainer wakes up.
            position()
            forget(MANAGER)
            ray.kill(self.manager)
            time.sleep(RELEASE_GRACE_S)
            self.trainers.save(rollout_id, lambda: None, force_sync=True)
        else:
            self.trainers.save(rollout_id, position, force_sync=True)
        event("save", rollout=rollout_id)

    # The manager

    def finish_generate(self, generation: Generation) -> list[Box] | None:
        """Wait for a rollout in progress and return its train data; repeat it if the manager dies."""
        death: EngineDiedError | None = None
        while True:
            try:
                if death is not None:
                    with span("wait_for_rollout"):
                        self._restart_manager(generation.rollout_id, death)
                    generation.ref = self.manager.generate.remote(generation.rollout_id)
                return super().finish_generate(generation)
            except (EngineDiedError, RayError) as error:  # RayError: the manager's train data is lost
                death = self._manager_death(error)

    def _manager_death(self, error: Exception) -> EngineDiedError:
        """Return the manager's death if it caused ``error``; raise ``error`` otherwise or if restarts are off."""
        args = self.args
        is_on = args.trainer_recovery != "off" and self.parts.observers and self._background is None
        death = find_death([MANAGER], timeout_s=NOTICE_S) if is_on else None
        if death is None:
            raise error
        self._recovery.count(death, error)
        return death

    def _restart_manager(self, rollout_id: int, death: EngineDiedError) -> None:
        """Restart the manager and its engines, and bring them to the start of ``rollout_id``.

        Answers come back from the ledger, so nothing is sampled again.  The trainer keeps its weights and pushes them.
        A rank that dies meanwhile is restarted afterwards, with the new train data.
        """
        logger.error("%s. Restarting it with its engines (--trainer-recovery).", death)
        began, since = time.monotonic(), time.time()
        with unwatched(self.trainers.names):
            gpus = self.gpus["rollout"]
            assert gpus is not None
            self.manager, start = create_manager_again(self.args, gpus, self.actor)
            trained = []
            for earlier in range(start, rollout_id):
                ref = self.manager.generate.remote(earlier)
                trained.append((earlier, wait_for(ref, what="the ledger", timeout_s=self.args.train_timeout_s)))
        self._recovery.keep_instead(trained)
        self._recovery.restart_if_down()
        self.push_weights()
        span("manager_recovery", since, time.time(), rollout=rollout_id)
        logger.warning("The manager is back after %.1f s, at rollout %d.", time.monotonic() - began, rollout_id)


def create_manager_again(args: Namespace, pg: GpuSlice, actor: RayTrainGroup) -> tuple[Any, int]:
    """Start a rollout manager to replace a dead one, with engines that have no trained weights yet.

    Returns:
        the manager's actor handle, and the first rollout whose samples come only from the ledger.
    """
    forget(MANAGER)
    last, start = actor.checkpoints.last, args.start_rollout_id
    if last is not None:
        args, start = args_to_resume(args, weight_version=last, checkpoint=last), last + 1
        record_runtime(args, start_rollout_id=start)
    if cluster_has_accelerators():
        time.sleep(RELEASE_GRACE_S)  # the dead manager's engines end with it
    manager, _ = create_rollout_manager(args, pg, parts=actor.parts)
    if not engines_come_first(args):
        wait_for_engines(manager, args.engine_start_timeout_s)
    actor.set_rollout_manager(manager)
    load_position(args, manager, start)
    return manager, start
