"""Groups whose requests are under way all the time, also while the trainer works.

    data source -> spare -> in flight -> filter -> ready -> a rollout takes the oldest

:class:`AsyncProducer` decides when a group starts, what becomes of one that comes back, and when the data source may
be asked.  When a rollout has enough of them is ``fully_async_rollout.py``'s business; how many groups
``--max-staleness`` allows is arithmetic, in ``async_schedule.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from argparse import Namespace
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from slime.rollout.abort import stamp_start
from slime.rollout.async_schedule import num_groups_allowed, num_groups_due
from slime.rollout.groups import Group, first_index, is_finished, leaf_samples, refuse_pending
from slime.rollout.ready_groups import ReadyGroups
from slime.rollout.replaceable import entry_points
from slime.rollout.staleness import StalenessBound, oldest_version, version_number
from slime.rollout.waiting import cancel_all
from slime.utils.errors import ConfigError, DataError, EngineError

POLL_S = 1.0
"""How often the producer looks for a new weight version while the bound holds it back."""
STARTED_AT_ONCE = 16
"""Groups that are started before the event loop looks at other work."""
MAX_FRUITLESS_ATTEMPTS = 3
"""How often a group may come back aborted without a new token, in one rollout and from the same weights."""


@dataclass
class Flight:
    """A group whose requests are under way."""

    group: Group
    born: int
    """Oldest weight version that its trained tokens may have; 0 where versions are not known."""
    moment: tuple[int | None, int]
    """Weight version and rollout when its requests were sent: a push may have come since either changed."""
    fruitless: int = 0
    num_tokens: int = 0


class AsyncProducer:
    """Keeps groups in flight and finished ones ready.  Every call is made on the background event loop.

    Invariant: a group taken from the data source is in exactly one of ``spare``, ``flights``, ``ready``, a batch that
    was taken, the dropped ones (counted, and noted in the ledger), or back in the data source.
    """

    def __init__(self, args: Namespace, data_buffer: Any, bound: StalenessBound, *, concurrency: int) -> None:
        """Make a producer; ``start`` begins.

        Args:
            data_buffer: the data source; asked only between ``begin_rollout`` and ``end_rollout``.
            bound: how old groups may grow.
            concurrency: groups in flight, and requests at a time.
        """
        self.args = args
        self.data_buffer = data_buffer
        self.bound = bound
        self.spare: deque[Group] = deque()
        """Taken from the data source and not started yet."""
        self.flights: dict[asyncio.Task[Group], Flight] = {}
        self.ready = ReadyGroups(args, bound)
        self._concurrency = concurrency
        self._counts: Counter[str] = Counter()
        self._held_back_s = 0.0
        self._next_rollout_id = 0
        self._may_ask_source = False
        self._source_is_dry = False
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._news = asyncio.Event()

    # Life

    def start(self) -> None:
        """Begin to produce; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._produce())

    async def stop(self) -> None:
        """Cancel the production and every request."""
        tasks: list[asyncio.Task[Any]] = [*self.flights]
        if self._task is not None:
            tasks.append(self._task)
        self.flights.clear()
        self._task = None
        await cancel_all(tasks)

    # What a rollout asks

    async def begin_rollout(self, rollout_id: int) -> None:
        """Rollout ``rollout_id`` takes the next batch; from now on the data source may be asked."""
        self._next_rollout_id = rollout_id
        await self.bound.clock.look(rollout_id)
        self._may_ask_source = True
        self.start()
        self._work.set()

    def end_rollout(self) -> None:
        """The data source must be left alone until the next rollout begins."""
        self._may_ask_source = False

    def raise_failure(self) -> None:
        """Raise what ended the production, or a group."""
        if self._failure is not None:
            raise self._failure

    def num_due(self, rollout_id: int) -> int:
        """Groups in flight that later rollouts could not train in time: this one must wait for them."""
        return num_groups_due(
            self.bound,
            rollout_id=rollout_id,
            in_flight=[flight.born for flight in self.flights.values()],
            ready=self.ready.births,
            batch_size=self.args.rollout_batch_size,
        )

    async def wait_for_news(self, timeout_s: float) -> None:
        """Return when a group has come back or something failed, or after ``timeout_s`` seconds."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def take(self, num_groups: int) -> list[Group]:
        """The ``num_groups`` oldest ready groups."""
        self._work.set()
        return self.ready.take(num_groups)

    def settle_old(self, rollout_id: int) -> None:
        """Meet ready groups that are too old already, as --stale-group-policy says."""
        for group in self.ready.take_too_old(rollout_id):
            self.data_buffer.add_samples([group])
            self._work.set()

    def check_that_groups_can_come(self, rollout_id: int) -> None:
        """Raise when nothing is in flight and nothing can be started.

        Raises:
            DataError: the data source has no more groups.
            ConfigError: ``--max-staleness`` cannot be kept with this training loop.
        """
        if self.flights:
            return
        if self._source_is_dry and not self.spare:
            raise DataError(
                f"The data source gave no groups; rollout {rollout_id} has {len(self.ready)} of "
                f"{self.args.rollout_batch_size}. Check --prompt-data and --buffer-filter-path."
            )
        clock = self.bound.clock
        if self._is_held_back() and len(self.ready) < self.args.rollout_batch_size:
            raise ConfigError(
                f"--max-staleness {self.bound.limit} cannot be kept: rollout {rollout_id} is trained with weight "
                f"version {clock.trained_at(rollout_id)}, which the engines get only after it (they have "
                f"{clock.current}). train_async.py needs --max-staleness 1 or more."
            )

    def stock_up(self, next_rollout_id: int) -> None:
        """Take prompts for the time until ``next_rollout_id`` begins, when the data source must be left alone."""
        self._next_rollout_id = next_rollout_id
        batch_size, num_rollout = self.args.rollout_batch_size, getattr(self.args, "num_rollout", None)
        room = self._num_allowed() + batch_size  # the push to come makes room for a batch more
        if num_rollout is not None:
            room = min(room, (num_rollout - next_rollout_id) * batch_size)
        count = min(batch_size, room - self._num_outstanding) - len(self.spare)
        if count > 0:
            self._ask_source(int(count))

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, and what is under way now."""
        counts, self._counts = self._counts, Counter()
        held_back_s, self._held_back_s = self._held_back_s, 0.0
        return {
            "rollout/groups/issued": counts["issued"],
            "rollout/groups/interrupted": counts["interrupted"],
            "rollout/groups/in_flight": len(self.flights),
            "perf/time_rollout_held_back_s": held_back_s,
            **self.ready.take_metrics(),
        }

    # Starting groups

    async def _produce(self) -> None:
        """Issue groups whenever there is room, until the producer is stopped or something fails."""
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
        unfinished = sum(not is_finished(s) for f in self.flights.values() for s in leaf_samples(f.group))
        started = 0
        while self._failure is None and not self._is_held_back() and len(self.ready) < self._concurrency:
            group_size = self.args.n_samples_per_prompt
            is_full = self.flights and unfinished + group_size > self._concurrency
            if is_full or len(self.flights) >= self._concurrency or not self.spare and not self._ask_source(1):
                return
            group = self.spare.popleft()
            unfinished += sum(not is_finished(entry) for entry in group)
            self._start(Flight(group, self._birth_of(group), self._moment, num_tokens=_num_tokens(group)))
            started += 1
            if started % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _is_held_back(self) -> bool:
        """Whether one more group could only be trained too late, or after the last rollout."""
        return self._num_outstanding >= self._num_allowed()

    @property
    def _num_outstanding(self) -> int:
        return len(self.flights) + len(self.ready)

    def _num_allowed(self) -> float:
        return num_groups_allowed(
            self.bound,
            next_rollout_id=self._next_rollout_id,
            num_rollout=getattr(self.args, "num_rollout", None),
            batch_size=self.args.rollout_batch_size,
        )

    def _ask_source(self, num_groups: int) -> bool:
        """Move groups from the data source to ``spare``; False when there are none, or it must not be asked now."""
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
        self.spare.extend(groups)
        return bool(groups)

    def _birth_of(self, group: Group) -> int:
        versions = (oldest_version(group), self.bound.clock.current)
        return min((version for version in versions if version is not None), default=0)

    @property
    def _moment(self) -> tuple[int | None, int]:
        return self.bound.clock.current, self._next_rollout_id

    def _start(self, flight: Flight) -> None:
        state = entry_points().GenerateState(self.args)
        call = entry_points().generate_and_rm_group(
            self.args, flight.group, sampling_params=state.sampling_params.copy(), evaluation=False
        )
        task = asyncio.get_running_loop().create_task(call)
        self.flights[task] = flight
        task.add_done_callback(self._landed)

    # What comes back

    def _landed(self, task: asyncio.Task[Group]) -> None:
        """A group came back: finished, interrupted, or with an error."""
        flight = self.flights.pop(task, None)
        if flight is None or task.cancelled():
            return
        try:
            group = task.result()
            if is_finished(group):
                for sample in leaf_samples(group):
                    versions = sample.weight_versions
                    self.bound.clock.observe(version_number(versions[-1]) if versions else None)
                self.ready.add(group, born=flight.born, num_outstanding=self._num_outstanding + 1)
            else:
                self._go_on(group, flight)
        except Exception as error:  # callbacks have no caller; the next rollout raises it
            self._fail(error)
        self._work.set()
        self._news.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._news.set()

    def _go_on(self, group: Group, flight: Flight) -> None:
        """A push, or an engine, ended requests of the group: let it go on from the tokens it has."""
        self._counts["interrupted"] += 1
        stamp_start(group, self._next_rollout_id)
        num_tokens, moment = _num_tokens(group), self._moment
        has_moved = num_tokens > flight.num_tokens or moment != flight.moment
        fruitless = 0 if has_moved else flight.fruitless + 1
        if fruitless >= MAX_FRUITLESS_ATTEMPTS:
            refuse_pending(self.args, group)
            raise EngineError(
                f"The group of sample {first_index(group)} came back unfinished {fruitless} times without a new "
                "token, although no weights were pushed meanwhile. Engines abort requests that do not fit their "
                "context; look at their logs and at --rollout-max-prompt-len."
            )
        self._start(Flight(group, self._birth_of(group), moment, fruitless, num_tokens))


def _num_tokens(group: Group) -> int:
    return sum(sample.response_length for sample in leaf_samples(group))
