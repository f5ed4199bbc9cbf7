"""Trainers that die are started again and brought back to the step that they were taken from.

    a rank dies, or does not go on -> its trainer's other ranks are killed
                -> where its node is gone, all wait for it to come back, or others take its place (--spare-nodes)
                -> all start again, from copies of their state in memory, or from the last checkpoint
                -> they train again on the rollouts since -> the interrupted step is taken again

The engines keep their weights and go on generating; no token is drawn twice.  The driver keeps references to the train
data since the last checkpoint, which stay in Ray's object store (it spills to disk when memory is short).

A step whose numbers cannot be used (``--on-nan rollback N``) goes the same way back, with two differences: N
checkpoints instead of one, and neither its rollout nor those since that checkpoint are trained on again, because the
same data would lead to the same numbers.  A save follows, so that later deaths do not lead further back.

Ranks whose node is taken away (SIGTERM, ``--preemption-grace-s``) save first, and start on other nodes, in reserve or
not, or on theirs once it is back.
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
"""Seconds from an error of one rank until Ray has noticed the death of another, which caused it."""
GLOO_TIMEOUT = ("gloo", "Timed out waiting")
"""Words of gloo's error at a rank that waited in vain for another; under NCCL its process ends instead."""
WINDOW_S = 3600.0
"""Time over which ``--max-recoveries`` counts."""


class TrainerRecovery:
    """Takes the steps of a job that need its trainer, and takes them again when one of its ranks dies.

    Args:
        args: the run's arguments.
        trainers: the actor, and the critic if there is one; all start again when a rank of either dies.
        notice: the driver's reaction to SIGTERM.
        gpus: finds GPUs for their ranks; without it they start where they were.
        save: saves what was trained since the last checkpoint, and waits until that is on disk.
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
        """The trainer died and was not started again yet."""
        self.must_save = False
        """The trainer went back to an older checkpoint, which the next save is to replace."""
        self._all, self._notice, self._gpus, self._save = trainers, notice, gpus, save
        self._actor, self._trainers, self._train = trainers.actor, trainers.all, trainers.train
        self._is_on = args.trainer_recovery != "off"
        self._trained: list[tuple[int, list[Box]]] = []
        self._num_rollbacks = 0
        self._deaths: list[tuple[float, str]] = []

    def run(self, step: Callable[[], T], *, needs_trainer: bool = True) -> T:
        """Return ``step()``; when a rank of the trainer dies during it, start the trainer again and repeat the step.

        Args:
            step: may be called several times; changes nothing before it fails, or the same each time.
            needs_trainer: False for a wait for engines, which goes on without a trainer where they share its GPUs.

        Raises:
            EngineDiedError: more deaths than ``--max-recoveries`` within an hour; notes name the earlier ones.
            StepError: numbers that cannot be used, as often as that or without ``--on-nan rollback``.
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
            except Exception as error:  # a death shows first in whatever the other ranks were doing
                death = self._cause_of(error) if self._is_on else None
                if death is None:
                    raise
                self._take_down(death, error)

    def _cause_of(self, error: Exception) -> SlimeError | None:
        """Return the death, departure or hang of a rank behind an error of another; None for an error of its own."""
        if found := find_death(self._all.names, timeout_s=NOTICE_S) or self._notice.departure():
            return found
        is_late = isinstance(error, RuntimeError) and all(words in str(error) for words in GLOO_TIMEOUT)
        return HangError(f"a rank did not take part in a collective: {error}") if is_late else None

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Train on one rollout, or leave it out where that leads to a rollback.

        Its train data is kept until a checkpoint holds what it did to the weights.
        """
        before = self._num_rollbacks
        self.run(lambda: self._train(rollout_id, rollout_data) if self._num_rollbacks == before else None)
        if self._is_on and self._num_rollbacks == before:
            self._trained.append((rollout_id, rollout_data))

    def record_saved(self) -> None:
        """Drop the train data that the last checkpoint makes superfluous."""
        self.must_save = False
        last = self._actor.checkpoints.last
        if last is not None:
            self._trained = [kept for kept in self._trained if kept[0] > last]

    def keep_instead(self, trained: list[tuple[int, list[Box]]]) -> None:
        """Keep other references to the train data since the last checkpoint: the owner of those before died."""
        self._trained = trained

    def can_let_go(self, rank: str) -> bool:
        """Return whether the job goes on without the node of a rank that was told to leave.

        Not where engines share the GPUs, which would have to make room for the save, nor without the driver's node.
        """
        if not (self._is_on and self.args.preemption_grace_s and rank in self._all.names) or self.args.offload_rollout:
            return False
        return self._gpus is None or self._gpus.is_elsewhere(self._number_of(rank))

    def _let_go(self, leave: RanksLeave) -> None:
        """Save while the ranks that are to leave are there, and give all up."""
        if not self.is_down:
            with self._notice.deferred():
                self._save()
        if self._notice.leaving:  # else they died over it, and others have their place
            try:
                self._take_down(leave)
            except RanksLeave:  # one too many: what they trained is saved
                raise Interrupted from leave

    def _number_of(self, name: str) -> int:
        return next(t.names.index(name) for t in self._trainers if name in t.names)

    def _release(self) -> None:
        for trainer in self._trainers:
            trainer.release()

    def _take_down(self, death: SlimeError, error: Exception | None = None) -> None:
        """Kill the ranks that are left, unless there were too many deaths."""
        self.count(death, error)
        logger.error("%s. The trainer is started again (--trainer-recovery %s).", death, self.args.trainer_recovery)
        if self._notice.leaving and self._gpus is not None:
            self._gpus.avoid([self._number_of(name) for name in self._notice.leaving], self.args.preemption_grace_s)
        self._notice.leaving.clear()
        self._release()
        self.is_down = True

    def count(self, death: SlimeError, error: Exception | None = None) -> None:
        """Raise ``death``, with notes that name the earlier ones, when it is one too many (``--max-recoveries``)."""
        now = time.monotonic()
        self._deaths = [earlier for earlier in self._deaths if now - earlier[0] < WINDOW_S]
        if len(self._deaths) >= self.args.max_recoveries:
            for _, earlier in self._deaths:
                death.add_note(f"earlier within the hour (--max-recoveries {self.args.max_recoveries}): {earlier}")
            raise death from error
        self._deaths.append((now, str(death).splitlines()[0]))

    def restart(self) -> None:
        """Start the trainer from its last copies or checkpoint and train again on what came after that."""
        begin, began = time.monotonic(), time.time()
        self._release_and_wait()  # of a restart that failed half-way, too
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
            "The trainer is back after %.1f s: it went on from rollout %d and trained again on %d rollouts.",
            time.monotonic() - begin, start, len(again),
        )  # fmt: skip

    def restart_if_down(self) -> None:
        """Start the trainer again where it is down, or where a rank has died that no wait has noticed."""

        def notice() -> None:
            if death := find_death(self._all.names, timeout_s=0):
                raise death

        self.run(notice)

    def _start(self) -> int:
        """Start every trainer, and return the rollout that all go on with."""
        try:
            start, *others = [trainer.create() for trainer in self._trainers]
            if others not in ([], [start]):
                # The critic's copies were lost, and dropped, when the actor had taken its own: both read checkpoints.
                self._release_and_wait()
                start, *others = [trainer.create() for trainer in self._trainers]
        except DeadlineError as error:
            raise HangError(f"the trainer did not start again: {error}") from error
        assert others in ([], [start]), (start, others)
        return start

    def _release_and_wait(self) -> None:
        self._release()
        if cluster_has_accelerators():
            time.sleep(RELEASE_GRACE_S)
