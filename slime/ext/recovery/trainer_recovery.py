"""Restarts trainers that die, and brings them back to the interrupted step.

    a rank dies or hangs -> all other ranks of the trainers are killed
                -> if its node is gone, wait for the node to come back, or use spare nodes (--spare-nodes)
                -> all ranks restart, from copies of their state in memory or from the last checkpoint
                -> they repeat training on the rollouts since then -> the interrupted step is repeated

Engines keep their weights and continue generating; no token is sampled twice.  The driver keeps references to the
train data since the last checkpoint, which stays in Ray's object store (spilled to disk if memory is short).

A step with unusable numbers (``--on-nan rollback N``) is handled the same way with two differences: the trainer goes
back N checkpoints instead of one, and neither that rollout nor those since the checkpoint are trained on again,
because the same data would give the same numbers.  A save follows, so that later deaths do not lead further back.

Ranks whose node is taken away (SIGTERM, ``--preemption-grace-s``) save first, and restart on other nodes, spare or
not, or on their own once it is back.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TypeVar

from slime.ext.recovery.preemption import Preemption, RanksLeave
from slime.ext.recovery.trainer_gpus import TrainerGpus
from slime.flags.fault_tolerance import checkpoints_to_go_back
from slime.observability.telemetry import span
from slime.ray.trainers import Trainers
from slime.ray.utils import RELEASE_GRACE_S, cluster_has_accelerators
from slime.ray.waiting import Interrupted, find_death
from slime.utils.errors import DeadlineError, HangError, SlimeError, StepError
from slime.utils.misc import Box

T = TypeVar("T")
logger = logging.getLogger(__name__)

NOTICE_S = 5.0
"""Seconds after a rank's error for Ray to notice the death of another rank that caused it."""
GLOO_TIMEOUT = ("gloo", "Timed out waiting")
"""Text of gloo's error on a rank that waited in vain for another; with NCCL the process ends instead."""
WINDOW_S = 3600.0
"""Seconds over which ``--max-recoveries`` counts."""


class TrainerRecovery:
    """Runs a job's steps, and repeats them if a trainer rank dies.

    Args:
        args: the run's arguments.
        trainers: the actor, and the critic if any; all restart if a rank of either dies.
        notice: the driver's reaction to SIGTERM.
        gpus: finds GPUs for the ranks; None to restart them where they were.
        save: saves training since the last checkpoint and waits until that is on disk.
    """

    def __init__(
        self,
        args: Namespace,
        trainers: Trainers,
        notice: Preemption,
        gpus: TrainerGpus | None = None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.args = args
        self.is_down = False
        """True if the trainer died and has not been restarted."""
        self.must_save = False
        """True after a rollback, until a save: the next step must save."""
        self._all, self._notice, self._gpus, self._save = trainers, notice, gpus, save
        self._actor, self._trainers, self._train = trainers.actor, trainers.all, trainers.train
        self._is_on = args.trainer_recovery != "off"
        self._trained: list[tuple[int, list[Box]]] = []
        self._num_rollbacks = 0
        self._deaths: list[tuple[float, str]] = []

    def run(self, step: Callable[[], T], *, needs_trainer: bool = True) -> T:
        """Return ``step()``; if a trainer rank dies during it, restart the trainer and repeat the step.

        Args:
            step: may be called several times; a failed call must change nothing or be idempotent.
            needs_trainer: False for a wait for engines, which continues without a trainer if they share its GPUs.

        Raises:
            EngineDiedError: more than ``--max-recoveries`` deaths within an hour; notes list the earlier ones.
            StepError: unusable numbers, without ``--on-nan rollback`` or more than ``--max-recoveries`` times.
        """
        while True:
            try:
                if self.is_down and (needs_trainer or not self.args.offload_rollout):
                    self.restart()
                with self._notice.letting_go():
                    return step()
            except RanksLeave as leave:
                self._let_go(leave)
            except StepError as error:
                back = checkpoints_to_go_back(self.args.on_nan)
                if not back:
                    raise
                self._take_down(error)
                self._actor.leave_out_checkpoints(back - 1)
                self._trained.clear()
                self._num_rollbacks += 1
                self.must_save = True
            except HangError as error:
                if not self._is_on:
                    raise
                self._take_down(error)
            except Exception as error:  # a death surfaces first in whatever the other ranks were doing
                death = self._cause_of(error) if self._is_on else None
                if death is None:
                    raise
                self._take_down(death, error)

    def _cause_of(self, error: Exception) -> SlimeError | None:
        """Return the death, departure or hang of another rank that caused ``error``; None if there is none."""
        if found := find_death(self._all.names, timeout_s=NOTICE_S) or self._notice.departure():
            return found
        is_late = isinstance(error, RuntimeError) and all(words in str(error) for words in GLOO_TIMEOUT)
        return HangError(f"a rank did not take part in a collective: {error}") if is_late else None

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Train on one rollout, or skip it if it causes a rollback.

        The train data is kept until a checkpoint includes this step.
        """
        before = self._num_rollbacks
        self.run(lambda: self._train(rollout_id, rollout_data) if self._num_rollbacks == before else None)
        if self._is_on and self._num_rollbacks == before:
            self._trained.append((rollout_id, rollout_data))

    def record_saved(self) -> None:
        """Drop the train data that the last checkpoint makes obsolete."""
        self.must_save = False
        last = self._actor.checkpoints.last
        if last is not None:
            self._trained = [kept for kept in self._trained if kept[0] > last]

    def keep_instead(self, trained: list[tuple[int, list[Box]]]) -> None:
        """Replace the references to train data since the last checkpoint, because the old ones' owner died."""
        self._trained = trained

    def can_let_go(self, rank: str) -> bool:
        """Return whether the job can continue without the node of a rank that received SIGTERM.

        It cannot if engines share the GPUs, because they would have to free memory for the save, or if the driver is
        on that node.
        """
        if not (self._is_on and self.args.preemption_grace_s and rank in self._all.names) or self.args.offload_rollout:
            return False
        return self._gpus is None or self._gpus.is_elsewhere(self._number_of(rank))

    def _let_go(self, leave: RanksLeave) -> None:
        """Save while the leaving ranks are still up, then take the trainer down."""
        if not self.is_down:
            with self._notice.deferred():
                self._save()
        if self._notice.leaving:  # empty if they died during the save and were replaced
            try:
                self._take_down(leave)
            except RanksLeave:  # too many recoveries, but training is saved
                raise Interrupted from leave

    def _number_of(self, name: str) -> int:
        return next(t.names.index(name) for t in self._trainers if name in t.names)

    def _release(self) -> None:
        for trainer in self._trainers:
            trainer.release()

    def _take_down(self, death: SlimeError, error: Exception | None = None) -> None:
        """Kill the remaining ranks; raises if there were too many deaths."""
        self.count(death, error)
        logger.error("%s. Restarting the trainer (--trainer-recovery %s).", death, self.args.trainer_recovery)
        if self._notice.leaving and self._gpus is not None:
            self._gpus.avoid([self._number_of(name) for name in self._notice.leaving], self.args.preemption_grace_s)
        self._notice.leaving.clear()
        self._release()
        self.is_down = True

    def count(self, death: SlimeError, error: Exception | None = None) -> None:
        """Count a death; raise it, with notes on the earlier ones, if it exceeds ``--max-recoveries``."""
        now = time.monotonic()
        self._deaths = [earlier for earlier in self._deaths if now - earlier[0] < WINDOW_S]
        if len(self._deaths) >= self.args.max_recoveries:
            for _, earlier in self._deaths:
                death.add_note(f"earlier within the hour (--max-recoveries {self.args.max_recoveries}): {earlier}")
            raise death from error
        self._deaths.append((now, str(death).splitlines()[0]))

    def restart(self) -> None:
        """Restart the trainer from its last copies or checkpoint and repeat training on later rollouts."""
        begin, began = time.monotonic(), time.time()
        self._release_and_wait()  # also cleans up after a failed restart
        if self._gpus is not None:
            found = self._gpus.find_again()
            for trainer in self._trainers:
                trainer.gpus = found
        start = self._start()
        again = [kept for kept in self._trained if kept[0] >= start]
        for rollout_id, rollout_data in again:
            self._train(rollout_id, rollout_data)
        self.is_down = False
        span("recovery", began, time.time(), rollout=start)
        logger.warning(
            "The trainer is back after %.1f s: it resumed at rollout %d and repeated training on %d rollouts.",
            time.monotonic() - begin, start, len(again),
        )  # fmt: skip

    def restart_if_down(self) -> None:
        """Restart the trainer if it is down, or if a rank has died unnoticed by any wait."""

        def notice() -> None:
            if death := find_death(self._all.names, timeout_s=0):
                raise death

        self.run(notice)

    def _start(self) -> int:
        """Start every trainer, and return the rollout at which all resume."""
        try:
            start, *others = [trainer.create() for trainer in self._trainers]
            if others not in ([], [start]):
                # The critic's copies were lost after the actor had used its own: restart both from checkpoints.
                self._release_and_wait()
                start, *others = [trainer.create() for trainer in self._trainers]
        except DeadlineError as error:
            raise HangError(f"the trainer did not restart: {error}") from error
        assert others in ([], [start]), (start, others)
        return start

    def _release_and_wait(self) -> None:
        self._release()
        if cluster_has_accelerators():
            time.sleep(RELEASE_GRACE_S)
