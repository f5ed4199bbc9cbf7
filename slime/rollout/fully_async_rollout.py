"""Continuous generation: groups stay in flight across rollouts and weight pushes.

    producer:  data source -> spare -> pool (in flight -> kept)      all the time, also while the trainer works
    collect:   the oldest kept groups, --rollout-batch-size of them  once a rollout

Use it with ``train_async.py``.  A push aborts the requests in flight; their tokens are kept, and the groups continue
with the new weights immediately.  Finished groups that are not needed yet stay in the pool for the next rollout.

``--max-staleness N`` bounds the number of weight versions between the oldest token of a group and its training:

* the producer starts no group that could only be trained too late (back-pressure on the engines);
* a rollout waits for groups that later rollouts could not train in time (back-pressure on the trainer);
* groups that are still too old, because an earlier job left them behind, are handled by ``--stale-group-policy``.

The producer reads the data source only while ``collect`` runs, so its position can be saved between two rollouts.
Groups in flight at that time are kept in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from argparse import Namespace
from collections import deque
from typing import Any, cast

from slime.rollout import sglang_rollout
from slime.rollout.base_types import Group, RolloutFnTrainOutput, is_finished, leaf_samples
from slime.rollout.config import RolloutConfig
from slime.rollout.pool import GroupPool
from slime.rollout.sglang_rollout import IDLE_WAIT_S
from slime.rollout.staleness import num_groups_allowed, num_groups_due
from slime.rollout.waiting import LongWait, cancel_all
from slime.utils.async_utils import get_async_loop, run
from slime.utils.errors import ConfigError
from slime.utils.http_utils import get_rollout_num_engines

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]

POLL_S = 1.0
"""Seconds between the producer's checks for a new weight version while the staleness bound holds it back."""


class AsyncRolloutWorker:
    """Produces groups for the rollouts of one job, on the background event loop.

    Invariant: a group taken from the data source is in ``spare``, in the pool, in a batch that was taken, or back in
    the data source.
    """

    def __init__(self, args: Namespace, data_buffer: Any, concurrency: int | None = None) -> None:
        """Create a worker without starting it.

        Args:
            data_buffer: The data source, read only while ``collect`` runs.
            concurrency: Maximum number of groups in flight and of concurrent requests; defaults to
                ``--sglang-server-concurrency`` times the number of engines.
        """
        self.args = args
        self.data_buffer = data_buffer
        state = sglang_rollout.GenerateState(args)
        self.pool = GroupPool(args, state, sglang_rollout.generate_and_rm_group, pushes_interrupt=True)
        self.config = self.pool.config
        self.bound = self.pool.bound
        self.spare: deque[Group] = deque()
        """Taken from the data source and not started yet."""
        self._concurrency = concurrency or args.sglang_server_concurrency * get_rollout_num_engines(args)
        self._held_back_s = 0.0
        self._may_ask_source = False
        self._source_is_dry = False
        self._producer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start producing.  Call it on the background loop; a second call does nothing."""
        if self._producer is None:
            self._producer = asyncio.get_running_loop().create_task(self._produce())

    async def stop(self) -> None:
        """Cancel the producer and every request."""
        producer, self._producer = self._producer, None
        await cancel_all([producer] if producer else [])
        await self.pool.close()

    def get_queue_size(self) -> int:
        """Return the number of finished groups waiting for a rollout."""
        return len(self.pool.kept)

    # The rollout

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Wait for ``--rollout-batch-size`` kept groups; return the oldest, sorted by their samples' ``index``.

        Raises:
            EngineError: an engine failed.
            DeadlineError: ``--rollout-timeout-s`` passed.
            DataError: the data source has no more groups, or gives malformed ones.
            ConfigError: this training loop cannot satisfy ``--max-staleness``.
        """
        pool = self.pool
        pool.rollout_id = rollout_id
        await self.bound.clock.refresh(rollout_id)
        self._may_ask_source = True
        self.start()
        pool.room.set()
        began = time.monotonic()
        try:
            await self._wait_for_batch(rollout_id)
            waited_s = time.monotonic() - began
            batch, metrics = pool.take_batch(self.data_buffer.get_samples)
            held_back_s, self._held_back_s = self._held_back_s, 0.0
            metrics |= {
                "rollout/groups/interrupted": metrics["rollout/groups/resubmitted"],
                "rollout/groups/in_flight": len(pool.in_flight),
                "rollout/groups/ready": len(pool.kept),
                "perf/time_rollout_wait_s": waited_s,
                "perf/time_rollout_held_back_s": held_back_s,
            }
            self._stock_up(rollout_id + 1)
        finally:
            self._may_ask_source = False
        return RolloutFnTrainOutput(samples=cast(Any, batch), metrics=metrics)

    async def _wait_for_batch(self, rollout_id: int) -> None:
        pool, target = self.pool, self.config.rollout_batch_size
        wait = LongWait(f"rollout {rollout_id}", target, timeout_s=self.config.rollout_timeout_s)
        try:
            while True:
                pool.raise_failure()
                pool.apply_staleness()
                num_due = self._num_due()
                if len(pool.kept) >= target and not num_due:
                    return
                self._check_that_groups_can_come()
                await pool.next_finished(wait, f"{num_due} of them due")
        finally:
            wait.close()

    def _num_due(self) -> int:
        """Return how many groups in flight this rollout must wait for: later ones could not train them in time."""
        return num_groups_due(
            self.bound,
            rollout_id=self.pool.rollout_id,
            in_flight=[flight.min_version for flight in self.pool.in_flight.values()],
            kept=[kept.min_version for kept in self.pool.kept],
            batch_size=self.config.rollout_batch_size,
        )

    def _check_that_groups_can_come(self) -> None:
        """Raise if nothing is in flight and nothing can be started.

        Raises:
            DataError: the data source has no more groups.
            ConfigError: this training loop cannot satisfy ``--max-staleness``.
        """
        if self.pool.in_flight:
            return
        if self._source_is_dry and not self.spare:
            raise self.pool.no_groups_error()
        if self._is_held_back() and len(self.pool.kept) < self.config.rollout_batch_size:
            clock, rollout_id = self.bound.clock, self.pool.rollout_id
            raise ConfigError(
                f"--max-staleness {self.bound.limit} cannot be kept: rollout {rollout_id} is trained with weight "
                f"version {clock.trained_at(rollout_id)}, which the engines get only after it (they have "
                f"{clock.current}). train_async.py needs --max-staleness 1 or more."
            )

    # The producer

    async def _produce(self) -> None:
        """Start groups whenever there is room, until the worker is stopped or a group fails."""
        try:
            while True:
                self.pool.room.clear()  # before _fill: a group that returns during it makes room for another
                await self._fill()
                began = time.monotonic()
                is_held_back = self.bound.limit is not None and self._is_held_back()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if is_held_back else None):
                        await self.pool.room.wait()
                if is_held_back:
                    self._held_back_s += time.monotonic() - began
                    await self.bound.clock.refresh()
        except Exception as error:  # raised where the rollout waits for groups
            self.pool.fail(error)

    async def _fill(self) -> None:
        """Start groups while the engines, the queue and the staleness bound have room."""
        pool, group_size = self.pool, self.config.n_samples_per_prompt
        unfinished = sum(not is_finished(s) for f in pool.in_flight.values() for s in leaf_samples(f.group))
        # A batch may hold more groups than the engines run concurrently; collect waits for all of them.
        max_kept = max(self._concurrency, self.config.rollout_batch_size)
        while not pool.has_failed and not self._is_held_back() and len(pool.kept) < max_kept:
            is_full = pool.in_flight and unfinished + group_size > self._concurrency
            if is_full or len(pool.in_flight) >= self._concurrency or not self.spare and not self._ask_source(1):
                return
            group = self.spare.popleft()
            unfinished += sum(not is_finished(entry) for entry in group)
            await pool.submit([group])

    def _is_held_back(self) -> bool:
        """Return True if one more group could only be trained too late, or after the last rollout."""
        return self.pool.num_outstanding >= self._num_allowed()

    def _num_allowed(self) -> float:
        return num_groups_allowed(
            self.bound,
            next_rollout_id=self.pool.rollout_id,
            num_rollout=self.config.num_rollout,
            batch_size=self.config.rollout_batch_size,
        )

    def _ask_source(self, num_groups: int) -> bool:
        """Move groups from the data source to ``spare``; return False if it gave none or must not be read now."""
        if not self._may_ask_source:
            return False
        groups = self.data_buffer.get_samples(num_groups)
        self._source_is_dry = not groups
        self.pool.admit(groups)
        self.spare.extend(groups)
        return bool(groups)

    def _stock_up(self, next_rollout_id: int) -> None:
        """Take enough prompts to last until ``next_rollout_id`` begins: the data source must not be read before."""
        self.pool.rollout_id = next_rollout_id
        batch_size, num_rollout = self.config.rollout_batch_size, self.config.num_rollout
        room = self._num_allowed() + batch_size  # the next push makes room for one more batch
        if num_rollout is not None:
            room = min(room, (num_rollout - next_rollout_id) * batch_size)
        count = min(batch_size, room - self.pool.num_outstanding) - len(self.spare)
        if count > 0:
            self._ask_source(int(count))


_WORKERS: list[AsyncRolloutWorker] = []
"""The worker of this process."""


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return the next batch of the background generation.

    Raises:
        ConfigError: ``evaluation`` is True.
        EngineError, DeadlineError, DataError: see ``AsyncRolloutWorker.collect``.
    """
    if evaluation:
        raise ConfigError(
            "generate_rollout_fully_async cannot evaluate; set "
            "--eval-function-path slime.rollout.sglang_rollout.generate_rollout."
        )
    timeout_s = RolloutConfig.of(args).rollout_timeout_s + 2 * IDLE_WAIT_S
    if not any(worker.data_buffer is data_buffer for worker in _WORKERS):  # the first one, or of another data source
        for worker in _WORKERS:
            run(worker.stop(), IDLE_WAIT_S)
        get_async_loop()
        _WORKERS[:] = [AsyncRolloutWorker(args, data_buffer)]
    return run(_WORKERS[0].collect(rollout_id), timeout_s)


generate_rollout_fully_async.keeps_groups_in_flight = True  # type: ignore[attr-defined]
