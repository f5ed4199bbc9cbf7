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
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from argparse import Namespace
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, cast

from slime.rollout import ledger
from slime.rollout.abort import IDLE_WAIT_S, engine_loads, stamp_start
from slime.rollout.async_schedule import num_groups_allowed, num_groups_due
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.groups import Group, first_index, is_finished, leaf_samples
from slime.rollout.replaceable import entry_points
from slime.rollout.staleness import StalenessBound, oldest_version, version_number
from slime.rollout.waiting import DEFAULT_ROLLOUT_TIMEOUT_S, LongWait, cancel_all
from slime.utils.async_utils import get_async_loop, run
from slime.utils.errors import ConfigError, DataError, EngineError
from slime.utils.http_utils import get_rollout_num_engines

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the producer looks for a new weight version while the bound holds it back."""
STARTED_AT_ONCE = 16
"""Groups that are started before the event loop looks at other work."""
MAX_FRUITLESS_ATTEMPTS = 3
"""How often a group may come back aborted without a new token, in one rollout and from the same weights."""


@dataclass
class _Flight:
    """A group whose requests are under way."""

    group: Group
    born: int
    """Oldest weight version that its trained tokens may have; 0 where versions are not known."""
    moment: tuple[int | None, int]
    """Weight version and rollout when its requests were sent: a push may have come since either changed."""
    fruitless: int = 0
    num_tokens: int = 0


@dataclass(order=True)
class _Ready:
    """A finished group; the order is that of training."""

    born: int
    """Oldest weight version of its trained tokens; 0 where versions are not known."""
    number: int
    group: Group = field(compare=False)


class AsyncRolloutWorker:
    """Producer and queue of one job, on the background event loop.

    Invariant: a group taken from the data source is in exactly one of ``_spare``, ``_flights``, ``_ready``, a batch
    that was handed out, the dropped ones (counted, and noted in the ledger), or back in the data source.
    """

    def __init__(self, args: Namespace, data_buffer: Any, concurrency: int | None = None) -> None:
        """Make a worker; ``start`` begins.

        Args:
            concurrency: groups in flight, and requests at a time; by default what the engines take together.
        """
        self.args = args
        self.data_buffer = data_buffer
        self.bound = StalenessBound(args)
        self._concurrency = concurrency or args.sglang_server_concurrency * get_rollout_num_engines(args)
        path = getattr(args, "dynamic_sampling_filter_path", None)
        self._filter = entry_points().load_function(path) if path else None
        self._flights: dict[asyncio.Task[Group], _Flight] = {}
        self._ready: list[_Ready] = []
        self._spare: deque[Group] = deque()
        self._seen: list[Group] = []
        self._drops = MetricGatherer()
        self._counts: Counter[str] = Counter()
        self._held_back_s = 0.0
        self._num_finished = 0
        self._next_rollout_id = 0
        self._may_ask_source = False
        self._source_is_dry = False
        self._failure: BaseException | None = None
        self._producer: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._news = asyncio.Event()

    # Life

    def start(self) -> None:
        """Begin to produce.  Call it on the background loop; a second call does nothing."""
        if self._producer is None:
            self._producer = asyncio.get_running_loop().create_task(self._produce())

    async def stop(self) -> None:
        """Cancel the producer and every request."""
        tasks: list[asyncio.Task[Any]] = [*self._flights]
        if self._producer is not None:
            tasks.append(self._producer)
        self._flights.clear()
        self._producer = None
        await cancel_all(tasks)

    def get_queue_size(self) -> int:
        """Finished groups that wait for a rollout."""
        return len(self._ready)

    # Producer

    async def _produce(self) -> None:
        """Issue groups whenever there is room, until the worker is stopped or something fails."""
        try:
            while True:
                await self._fill()
                self._work.clear()
                began = time.monotonic()
                is_held_back = self.bound.limit is not None and self._is_held_back()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if is_held_back else None):
                        await self._work.wait()
                if is_held_back:
                    self._held_back_s += time.monotonic() - began
                    await self.bound.clock.look()
        except Exception as error:  # handed to whoever waits for groups
            self._fail(error)

    async def _fill(self) -> None:
        """Start groups while engines, queue and staleness bound have room for them."""
        unfinished = sum(not is_finished(s) for f in self._flights.values() for s in leaf_samples(f.group))
        started = 0
        while self._failure is None and not self._is_held_back() and len(self._ready) < self._concurrency:
            group_size = self.args.n_samples_per_prompt
            is_full = self._flights and unfinished + group_size > self._concurrency
            if is_full or len(self._flights) >= self._concurrency or not self._spare and not self._take(1):
                return
            group = self._spare.popleft()
            unfinished += sum(not is_finished(entry) for entry in group)
            self._start(_Flight(group, self._birth_of(group), self._moment, num_tokens=_num_tokens(group)))
            started += 1
            if started % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _is_held_back(self) -> bool:
        """Whether one more group could only be trained too late, or after the last rollout."""
        return self._num_outstanding >= self._num_allowed()

    @property
    def _num_outstanding(self) -> int:
        return len(self._flights) + len(self._ready)

    def _num_allowed(self) -> float:
        return num_groups_allowed(
            self.bound,
            next_rollout_id=self._next_rollout_id,
            num_rollout=getattr(self.args, "num_rollout", None),
            batch_size=self.args.rollout_batch_size,
        )

    def _take(self, num_groups: int) -> bool:
        """Move groups from the data source to ``_spare``; False when there are none, or it must not be asked now."""
        if not self._may_ask_source:
            return False
        groups = self.data_buffer.get_samples(num_groups)
        self._source_is_dry = not groups
        for group in groups:
            if len(group) != self.args.n_samples_per_prompt:
                raise DataError(
                    f"The data source gave a group of {len(group)} samples; --n-samples-per-prompt is "
                    f"{self.args.n_samples_per_prompt}. Look at --data-source-path and at what is put into its buffer."
                )
        self.bound.screen(groups, self._next_rollout_id)
        self._counts["issued"] += len(groups)
        self._spare.extend(groups)
        return bool(groups)

    def _birth_of(self, group: Group) -> int:
        versions = (oldest_version(group), self.bound.clock.current)
        return min((version for version in versions if version is not None), default=0)

    @property
    def _moment(self) -> tuple[int | None, int]:
        return self.bound.clock.current, self._next_rollout_id

    def _start(self, flight: _Flight) -> None:
        state = entry_points().GenerateState(self.args)
        call = entry_points().generate_and_rm_group(
            self.args, flight.group, sampling_params=state.sampling_params.copy(), evaluation=False
        )
        task = asyncio.get_running_loop().create_task(call)
        self._flights[task] = flight
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[Group]) -> None:
        """A group came back: finished, interrupted, or with an error."""
        flight = self._flights.pop(task, None)
        if flight is None or task.cancelled():
            return
        try:
            group = task.result()
            if is_finished(group):
                self._keep_or_drop(group, flight)
            else:
                self._go_on(group, flight)
        except Exception as error:  # callbacks have no caller; the next rollout raises it
            self._fail(error)
        self._work.set()
        self._news.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._news.set()

    def _keep_or_drop(self, group: Group, flight: _Flight) -> None:
        ledger.finished(group)
        self._seen.append(group)
        for sample in leaf_samples(group):
            self.bound.clock.observe(version_number(sample.weight_versions[-1]) if sample.weight_versions else None)
        verdict = call_dynamic_filter(self._filter, self.args, group)
        if should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=self._num_outstanding + 1,
            target_data_size=self.args.rollout_batch_size,
        ):
            ledger.filtered(group, verdict.reason)
            self._drops.on_dynamic_filter_drop(verdict.reason)
            self._counts["dropped"] += 1
            return
        oldest = oldest_version(group)
        born = flight.born if oldest is None else oldest
        self._num_finished += 1
        self._ready.append(_Ready(born, self._num_finished, group))

    def _go_on(self, group: Group, flight: _Flight) -> None:
        """A push, or an engine, ended requests of the group: let it go on from the tokens it has."""
        self._counts["interrupted"] += 1
        stamp_start(group, self._next_rollout_id)
        num_tokens, moment = _num_tokens(group), self._moment
        has_moved = num_tokens > flight.num_tokens or moment != flight.moment
        fruitless = 0 if has_moved else flight.fruitless + 1
        if fruitless >= MAX_FRUITLESS_ATTEMPTS:
            raise EngineError(
                f"The group of sample {first_index(group)} came back unfinished {fruitless} times without a new "
                "token, although no weights were pushed meanwhile. Engines abort requests that do not fit their "
                "context; look at their logs and at --rollout-max-prompt-len."
            )
        self._start(_Flight(group, self._birth_of(group), moment, fruitless, num_tokens))

    # Consumer

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The next ``--rollout-batch-size`` groups, the oldest first chosen, sorted by their samples' ``index``.

        Raises:
            EngineError: an engine failed, or ``--rollout-timeout-s`` passed.
            DataError: the data source has no more groups, or gives malformed ones.
            ConfigError: ``--max-staleness`` cannot be kept with this training loop.
        """
        self._next_rollout_id = rollout_id
        await self.bound.clock.look(rollout_id)
        self._may_ask_source = True
        self.start()
        self._work.set()
        began = time.monotonic()
        try:
            batch = await self._wait_for_batch(rollout_id)
            waited_s = time.monotonic() - began
            self._call_end_hooks(batch)
            metrics = self._metrics(batch, rollout_id, waited_s)
            self._next_rollout_id = rollout_id + 1
            self._stock_up()
        finally:
            self._may_ask_source = False
        return RolloutFnTrainOutput(samples=cast(Any, batch), metrics=metrics)

    async def _wait_for_batch(self, rollout_id: int) -> list[Group]:
        target = self.args.rollout_batch_size
        timeout_s = getattr(self.args, "rollout_timeout_s", DEFAULT_ROLLOUT_TIMEOUT_S)
        wait = LongWait(f"rollout {rollout_id}", target, timeout_s=timeout_s)
        try:
            while True:
                self._news.clear()
                if self._failure is not None:
                    raise self._failure
                self._settle_old(rollout_id)
                late = num_groups_due(
                    self.bound,
                    rollout_id=rollout_id,
                    in_flight=[flight.born for flight in self._flights.values()],
                    ready=[ready.born for ready in self._ready],
                    batch_size=target,
                )
                if len(self._ready) >= target and not late:
                    break
                self._check_that_groups_can_come(rollout_id)
                if wait.remaining_s <= 0:
                    raise await self._timeout_error(wait, rollout_id)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(POLL_S, wait.remaining_s)):
                        await self._news.wait()
                wait.show(min(len(self._ready), target), f"{len(self._flights)} groups in flight, {late} of them due")
        finally:
            wait.close()
        self._ready.sort()
        batch = [ready.group for ready in self._ready[:target]]
        del self._ready[:target]
        self._work.set()
        return sorted(batch, key=first_index)

    def _settle_old(self, rollout_id: int) -> None:
        """Meet ready groups that are too old already, as --stale-group-policy says."""
        if self.bound.limit is None:
            return
        for ready in [r for r in self._ready if self.bound.is_too_old(r.group, rollout_id)]:
            if not self.bound.settle(ready.group, rollout_id):
                self._ready.remove(ready)
                self.data_buffer.add_samples([ready.group])
                self._work.set()

    def _check_that_groups_can_come(self, rollout_id: int) -> None:
        if self._flights:
            return
        if self._source_is_dry and not self._spare:
            raise DataError(
                f"The data source gave no groups; rollout {rollout_id} has {len(self._ready)} of "
                f"{self.args.rollout_batch_size}. Check --prompt-data and --buffer-filter-path."
            )
        clock = self.bound.clock
        if self._is_held_back() and len(self._ready) < self.args.rollout_batch_size:
            raise ConfigError(
                f"--max-staleness {self.bound.limit} cannot be kept: rollout {rollout_id} is trained with weight "
                f"version {clock.trained_at(rollout_id)}, which the engines get only after it (they have "
                f"{clock.current}). train_async.py needs --max-staleness 1 or more."
            )

    async def _timeout_error(self, wait: LongWait, rollout_id: int) -> EngineError:
        try:
            loads = await asyncio.wait_for(engine_loads(self.args), timeout=10)
            busy = ", ".join(f"{url} ({'unknown' if n is None else n})" for url, n in loads.items() if n != 0)
        except (EngineError, TimeoutError) as error:
            busy = f"unknown, the router did not answer ({error})"
        return EngineError(
            f"Rollout {rollout_id} did not end within {wait.timeout_s:.0f} s: {len(self._ready)} of "
            f"{self.args.rollout_batch_size} groups are ready, {len(self._flights)} in flight; engines that hold "
            f"requests: {busy or 'none'}. Look at the logs of these engines, or raise --rollout-timeout-s."
        )

    def _stock_up(self) -> None:
        """Take prompts for the time until the next rollout begins, when the data source must be left alone."""
        batch_size, num_rollout = self.args.rollout_batch_size, getattr(self.args, "num_rollout", None)
        room = self._num_allowed() + batch_size  # the push to come makes room for a batch more
        if num_rollout is not None:
            room = min(room, (num_rollout - self._next_rollout_id) * batch_size)
        count = min(batch_size, room - self._num_outstanding) - len(self._spare)
        if count > 0:
            self._take(int(count))

    def _call_end_hooks(self, batch: list[Group]) -> None:
        """The two hooks that see a whole rollout."""
        seen, self._seen = self._seen, []
        if path := getattr(self.args, "rollout_sample_filter_path", None):
            entry_points().load_function(path)(self.args, batch)
        if path := getattr(self.args, "rollout_all_samples_process_path", None):
            function = entry_points().load_function(path)
            function(self.args, sorted(seen, key=first_index), self.data_buffer.get_samples)

    def _metrics(self, batch: list[Group], rollout_id: int, waited_s: float) -> dict[str, Any]:
        counts, self._counts = self._counts, Counter()
        drops, self._drops = self._drops, MetricGatherer()
        held_back_s, self._held_back_s = self._held_back_s, 0.0
        return {
            "rollout/groups/issued": counts["issued"],
            "rollout/groups/kept": len(batch),
            "rollout/groups/dropped": counts["dropped"],
            "rollout/groups/interrupted": counts["interrupted"],
            "rollout/groups/in_flight": len(self._flights),
            "rollout/groups/ready": len(self._ready),
            "perf/time_rollout_wait_s": waited_s,
            "perf/time_rollout_held_back_s": held_back_s,
            **self.bound.metrics(batch, rollout_id),
            **drops.collect(),
        }


def _num_tokens(group: Group) -> int:
    return sum(sample.response_length for sample in leaf_samples(group))


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
