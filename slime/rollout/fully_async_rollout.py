"""Generation that never stops: groups are in flight across rollouts and weight pushes.

    producer:  data source -> requests in flight -> filter -> ready          all the time, also while the trainer works
    collect:   oldest ready groups, --rollout-batch-size of them             once a rollout

Use it with ``train_async.py``.  A push aborts what is in flight; the tokens drawn so far are kept, and the group goes
on with the new weights at once.  Finished groups that are not needed yet stay ready for the next rollout.

``--max-staleness N`` bounds how many weight versions lie between the oldest token of a group and its training:

* the producer issues no group that could only be trained too late (back-pressure on the engines);
* a rollout waits for groups that later rollouts could not train in time (back-pressure on the trainer);
* what is too old all the same, because an earlier job left it behind, meets ``--stale-group-policy``.

The data source is asked only while ``collect`` runs.  Its position can therefore be saved between two rollouts; groups
that are in flight then are kept in the ledger.

The producer is in ``async_producer.py``; here is the rollout's side: waiting, hooks, metrics, and the worker's life.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from typing import Any, cast

from slime.rollout.abort import IDLE_WAIT_S, engine_loads
from slime.rollout.async_producer import AsyncProducer
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.groups import Group, first_index
from slime.rollout.replaceable import entry_points
from slime.rollout.staleness import StalenessBound
from slime.rollout.waiting import DEFAULT_ROLLOUT_TIMEOUT_S, LongWait
from slime.utils.async_utils import get_async_loop, run
from slime.utils.errors import ConfigError, DeadlineError, ProcessError
from slime.utils.http_utils import get_rollout_num_engines

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]

POLL_S = 1.0
"""How often a rollout looks again for groups and failures, though nothing came back."""


class AsyncRolloutWorker:
    """One job's producer, and the rollouts that take from it, on the background event loop."""

    def __init__(self, args: Namespace, data_buffer: Any, concurrency: int | None = None) -> None:
        """Make a worker; ``start`` begins.

        Args:
            concurrency: groups in flight, and requests at a time; by default what the engines take together.
        """
        self.args = args
        self.data_buffer = data_buffer
        self.bound = StalenessBound(args)
        concurrency = concurrency or args.sglang_server_concurrency * get_rollout_num_engines(args)
        self.producer = AsyncProducer(args, data_buffer, self.bound, concurrency=concurrency)

    def start(self) -> None:
        """Begin to produce.  Call it on the background loop; a second call does nothing."""
        self.producer.start()

    async def stop(self) -> None:
        """Cancel the producer and every request."""
        await self.producer.stop()

    def get_queue_size(self) -> int:
        """Finished groups that wait for a rollout."""
        return len(self.producer.ready)

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The next ``--rollout-batch-size`` groups, the oldest first chosen, sorted by their samples' ``index``.

        Raises:
            EngineError: an engine failed.
            DeadlineError: ``--rollout-timeout-s`` passed.
            DataError: the data source has no more groups, or gives malformed ones.
            ConfigError: ``--max-staleness`` cannot be kept with this training loop.
        """
        await self.producer.begin_rollout(rollout_id)
        began = time.monotonic()
        try:
            batch = await self._wait_for_batch(rollout_id)
            waited_s = time.monotonic() - began
            self._call_end_hooks(batch)
            metrics = {
                "rollout/groups/kept": len(batch),
                "perf/time_rollout_wait_s": waited_s,
                **self.producer.take_metrics(),
                **self.bound.metrics(batch, rollout_id),
            }
            self.producer.stock_up(rollout_id + 1)
        finally:
            self.producer.end_rollout()
        return RolloutFnTrainOutput(samples=cast(Any, batch), metrics=metrics)

    async def _wait_for_batch(self, rollout_id: int) -> list[Group]:
        producer, target = self.producer, self.args.rollout_batch_size
        timeout_s = getattr(self.args, "rollout_timeout_s", DEFAULT_ROLLOUT_TIMEOUT_S)
        wait = LongWait(f"rollout {rollout_id}", target, timeout_s=timeout_s)
        try:
            while True:
                producer.raise_failure()
                producer.settle_old(rollout_id)
                num_due = producer.num_due(rollout_id)
                if len(producer.ready) >= target and not num_due:
                    break
                producer.check_that_groups_can_come(rollout_id)
                if wait.remaining_s <= 0:
                    raise await self._timeout_error(wait, rollout_id)
                await producer.wait_for_news(min(POLL_S, wait.remaining_s))
                in_flight = f"{len(producer.flights)} groups in flight, {num_due} of them due"
                wait.show(min(len(producer.ready), target), in_flight)
        finally:
            wait.close()
        return sorted(producer.take(target), key=first_index)

    async def _timeout_error(self, wait: LongWait, rollout_id: int) -> DeadlineError:
        try:
            loads = await asyncio.wait_for(engine_loads(self.args), timeout=10)
            busy = ", ".join(f"{url} ({'unknown' if n is None else n})" for url, n in loads.items() if n != 0)
        except (ProcessError, TimeoutError) as error:
            busy = f"unknown, the router did not answer ({error})"
        return DeadlineError(
            f"Rollout {rollout_id} did not end within {wait.timeout_s:.0f} s: {len(self.producer.ready)} of "
            f"{self.args.rollout_batch_size} groups are ready, {len(self.producer.flights)} in flight; engines that "
            f"hold requests: {busy or 'none'}. Look at the logs of these engines, or raise --rollout-timeout-s."
        )

    def _call_end_hooks(self, batch: list[Group]) -> None:
        """The two hooks that see a whole rollout."""
        seen = self.producer.ready.take_seen()
        if path := getattr(self.args, "rollout_sample_filter_path", None):
            entry_points().load_function(path)(self.args, batch)
        if path := getattr(self.args, "rollout_all_samples_process_path", None):
            function = entry_points().load_function(path)
            function(self.args, sorted(seen, key=first_index), self.data_buffer.get_samples)


_WORKERS: list[AsyncRolloutWorker] = []
"""The worker of this process."""


def _worker_of(args: Namespace, data_buffer: Any) -> AsyncRolloutWorker:
    """The process's worker; a new one for another data source."""
    for worker in _WORKERS:
        if worker.data_buffer is data_buffer:
            return worker
        run(worker.stop(), IDLE_WAIT_S)
    get_async_loop()
    _WORKERS[:] = [AsyncRolloutWorker(args, data_buffer)]
    return _WORKERS[0]


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next batch of a generation that goes on in the background.

    Raises:
        ConfigError: asked to evaluate.
    """
    if evaluation:
        raise ConfigError(
            "generate_rollout_fully_async cannot evaluate; set "
            "--eval-function-path slime.rollout.sglang_rollout.generate_rollout."
        )
    timeout_s = getattr(args, "rollout_timeout_s", DEFAULT_ROLLOUT_TIMEOUT_S) + 2 * IDLE_WAIT_S
    return run(_worker_of(args, data_buffer).collect(rollout_id), timeout_s)


generate_rollout_fully_async.keeps_groups_in_flight = True  # type: ignore[attr-defined]
