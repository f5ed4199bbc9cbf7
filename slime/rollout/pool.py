"""The pool of groups that both rollout functions use.

    submit -> in flight -> finished -> kept | stale | dropped
                  ^            |                 |
                  +-- cut off -+-- drawn again --+

``GroupPolicy`` decides what happens to each group; ``GroupPool`` holds the groups and their tasks.  The default
rollout (``sglang_rollout``) submits groups until enough are kept and aborts the others.  The fully asynchronous
rollout (``fully_async_rollout``) keeps the pool filled across rollouts and never aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from slime.flags.reward import RewardConfig
from slime.observability import telemetry
from slime.rollout.base_types import Group, check_samples, first_index, has_response, is_finished, leaf_samples
from slime.rollout.config import RolloutConfig
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub.policy import leave_out
from slime.rollout.run_state import current_run
from slime.rollout.staleness import StalenessBound, oldest_version, version_number
from slime.rollout.waiting import LongWait, cancel_all, deadline_error
from slime.utils.errors import DataError, EngineError, HookError
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, call_plugin
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Longest interval in seconds between checks of groups, failures and the deadline."""
STARTED_AT_ONCE = 64
"""Samples whose requests are prepared before yielding to the event loop; takes 10 to 20 ms."""
MAX_NO_PROGRESS = 3
"""Consecutive times that a group may come back unfinished from the same weights."""
DROPS_BEFORE_WARNING = 8
"""Number of batches' worth of groups that a filter may drop, without keeping any, before a warning is logged."""


@dataclass
class InFlightGroup:
    """A group with running requests."""

    group: Group
    min_version: int
    """Oldest weight version that its trained tokens may have; 0 if unknown."""
    moment: tuple[int | None, int]
    """(weight version, rollout id) when its requests were sent.  If either has changed, a push may have occurred."""
    num_tokens: int
    """Response tokens when its requests were sent."""
    no_progress: int
    """Consecutive times that it came back unfinished without being interrupted."""


@dataclass(order=True)
class KeptGroup:
    """A finished group waiting for training; instances sort in training order."""

    min_version: int
    """Oldest weight version of its trained tokens; 0 if unknown."""
    number: int
    group: Group = field(compare=False)


class GroupPolicy:
    """Decides about single groups (admit, keep or drop, stuck) and counts the decisions."""

    def __init__(self, args: Namespace, *, pushes_interrupt: bool = False) -> None:
        """Create a policy.

        Args:
            pushes_interrupt: Whether weight pushes abort requests in flight; a group that gained tokens is then not
                stuck.
        """
        self.config = RolloutConfig.of(args)
        self._args, self.run = args, current_run()
        self._pushes_interrupt = pushes_interrupt
        if self.run.bound is None:
            self.run.bound = StalenessBound(self.config, first_rollout_id=self.run.first_rollout_id)
        self.bound = self.run.bound
        self.counts: Counter[str] = Counter()
        self.drops = MetricGatherer()
        path = self.config.dynamic_sampling_filter_path
        self._filter = load_function(path) if path else None
        self._filter_path = path or ""
        self._num_dropped = self._num_kept = 0

    def admit(self, group: Group, rollout_id: int) -> None:
        """Check and count a group from the data source, and apply ``--stale-group-policy`` if it is too old.

        Raises:
            DataError: the group does not have ``--n-samples-per-prompt`` entries, or its samples are malformed.
        """
        if len(group) != self.config.n_samples_per_prompt:
            raise DataError(
                f"The data source gave a group of {len(group)} samples; --n-samples-per-prompt is "
                f"{self.config.n_samples_per_prompt}. Check --data-source-path and the groups in its buffer."
            )
        check_samples(group, "The data source (--data-source-path) gave", error=DataError)
        self.bound.screen(group, rollout_id)
        self.counts["issued"] += 1
        if is_finished(group):
            self.counts["reused"] += 1
        elif has_response(group):
            self.counts["continued"] += 1

    def keeps(self, group: Group, *, num_outstanding: int) -> bool:
        """Return whether the dynamic filter keeps a finished group; dropped groups are recorded with the reason.

        Args:
            num_outstanding: Groups in flight and kept, including this one; see ``keep_when_insufficient``.
        """
        for observer in self.run.observers:
            observer.finished(group)
        call = PluginCall("--dynamic-sampling-filter-path", self._filter_path, group)
        verdict = call_plugin(call, call_dynamic_filter, self._filter, self._args, group)
        if not should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=num_outstanding, target_data_size=self.config.rollout_batch_size
        ):
            self._num_kept += 1
            return True
        for observer in self.run.observers:
            observer.dropped(group, verdict.reason)
        telemetry.samples("dropped", samples=list(leaf_samples(group)), reason=verdict.reason)
        self.drops.on_dynamic_filter_drop(verdict.reason)
        self.counts["dropped"] += 1
        self._num_dropped += 1
        if not self._num_kept and self._num_dropped % (DROPS_BEFORE_WARNING * self.config.rollout_batch_size) == 0:
            logger.warning(
                "--dynamic-sampling-filter-path %s has dropped %d groups and kept none (the last one: %s). If all "
                "rewards are equal, look at the grader, at --rollout-max-response-len and at the data.",
                self.config.dynamic_sampling_filter_path,
                self._num_dropped,
                verdict.reason,
            )
        return False

    def count_no_progress(self, group: Group, before: InFlightGroup, moment: tuple[int | None, int]) -> int:
        """Return how many consecutive times a group came back unfinished without being interrupted.

        After ``MAX_NO_PROGRESS`` times, samples that a custom generate function keeps aborting are left out.

        Raises:
            EngineError: after ``MAX_NO_PROGRESS`` times, if the built-in generate function made the samples.
            HookError: after ``MAX_NO_PROGRESS`` times, if a custom generate function left samples pending.
        """
        self.counts["resubmitted"] += 1
        has_grown = self._pushes_interrupt and num_tokens(group) > before.num_tokens
        if has_grown or moment != before.moment:
            return 0
        times = before.no_progress + 1
        if times < MAX_NO_PROGRESS:
            return times
        samples = list(leaf_samples(group))
        path = samples[0].generate_function_path or self.config.custom_generate_function_path
        if path and any(sample.status is Sample.Status.PENDING for sample in samples):
            raise HookError(
                f"--custom-generate-function-path {path} returned samples with status pending; it must set "
                "sample.status: COMPLETED, TRUNCATED or FAILED (Sample.append_response_tokens with the engine's "
                "meta_info does)."
            )
        if path:
            failure = RuntimeError(f"--custom-generate-function-path {path} returned the sample aborted {times} times")
            for sample in samples:
                if sample.status is Sample.Status.ABORTED:
                    leave_out(RewardConfig.of(self._args), sample, failure)
            return times
        statuses = ", ".join(sorted({sample.status.value for sample in samples}))
        raise EngineError(
            f"The group of sample {first_index(group)} came back unfinished {times} times (statuses: {statuses}), "
            "although the rollout was not over and no weights were pushed. Engines abort requests that do not fit "
            "their context; look at their logs and at --rollout-max-prompt-len."
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the counts and drops by reason since the last call."""
        names = ("issued", "reused", "continued", "resubmitted", "dropped")
        metrics: dict[str, float] = {f"rollout/groups/{name}": self.counts[name] for name in names}
        metrics |= self.drops.collect()
        self.counts.clear()
        self.drops = MetricGatherer()
        return metrics


def result_of(task: asyncio.Task[Group], name: str) -> Group:
    """Return the group of a finished task; ``name`` names it in errors.

    Raises:
        HookError: the task was cancelled, but not by the rollout.
    """
    if task.cancelled():
        raise HookError(
            f"{name} was cancelled, and not by the rollout. Does a custom generate or reward function, or a sample "
            "hook, cancel its task?"
        )
    return task.result()


class GroupPool:
    """Holds groups in flight and kept groups.  Not thread-safe: use it on one event loop only.

    Invariant: a submitted group is in exactly one of ``in_flight``, ``kept``, a batch that was taken, the dropped
    groups (which are counted and shown to observers), or the return value of ``abort``.
    """

    def __init__(
        self,
        args: Namespace,
        state: Any,
        run_group: Callable[..., Coroutine[Any, Any, Group]],
        *,
        rollout_id: int = 0,
        pushes_interrupt: bool = False,
    ) -> None:
        """Create an empty pool.

        Args:
            args: The run's arguments.
            state: This process's ``GenerateState``.
            run_group: ``generate_and_rm_group``.
            rollout_id: The rollout that begins.
            pushes_interrupt: See ``GroupPolicy``.
        """
        self.args, self.state = args, state
        self.policy = GroupPolicy(args, pushes_interrupt=pushes_interrupt)
        self.config, self.bound = self.policy.config, self.policy.bound
        self._run_group = run_group
        self.rollout_id = rollout_id
        self.in_flight: dict[asyncio.Task[Group], InFlightGroup] = {}
        self.kept: list[KeptGroup] = []
        self._seen: list[Group] = []
        """Every finished group, dropped ones included, for ``--rollout-all-samples-process-path``."""
        self._failure: BaseException | None = None
        self._num_kept = 0
        self._num_started = 0
        self.news = asyncio.Event()
        """Set when a group has come back or something failed; ``next_finished`` clears it."""
        self.room = asyncio.Event()
        """Set when there may be room for another group; the producer of groups clears it."""

    @property
    def num_outstanding(self) -> int:
        """Number of groups in flight or kept."""
        return len(self.in_flight) + len(self.kept)

    # Into the pool

    def admit(self, groups: Iterable[Group]) -> None:
        """Check and count groups from the data source."""
        for group in groups:
            self.policy.admit(group, self.rollout_id)

    async def submit(self, groups: Iterable[Group]) -> None:
        """Start the requests of groups, yielding to the event loop regularly so that answers are handled meanwhile."""
        for group in groups:
            self._start(group)
            self._num_started += len(group)
            if self._num_started >= STARTED_AT_ONCE:
                self._num_started = 0
                await asyncio.sleep(0)

    def _start(self, group: Group, *, no_progress: int = 0) -> None:
        params = self.state.sampling_params.copy()
        task = self.state.start_group(self._run_group(self.args, group, sampling_params=params, evaluation=False))
        versions = (oldest_version(group), self.bound.clock.current)
        min_version = min((version for version in versions if version is not None), default=0)
        self.in_flight[task] = InFlightGroup(group, min_version, self._moment, num_tokens(group), no_progress)
        task.add_done_callback(self._on_done)
        self._record_outstanding()

    @property
    def _moment(self) -> tuple[int | None, int]:
        return self.bound.clock.current, self.rollout_id

    # Out of flight

    def _on_done(self, task: asyncio.Task[Group]) -> None:
        """Handle a group that came back finished, cut off, or with an error.  ``abort`` collects its own groups."""
        if self.state.aborted or task not in self.in_flight:
            return
        before = self.in_flight.pop(task)
        self.state.pendings.discard(task)
        try:
            group = result_of(task, f"The group of sample {first_index(before.group)}")
            no_progress = 0 if is_finished(group) else self.policy.count_no_progress(group, before, self._moment)
            if is_finished(group):
                self._finish(group, before)
            else:
                stamp_start(group, self.rollout_id)
                self._start(group, no_progress=no_progress)
        except Exception as error:  # a callback has no caller: next_finished raises it instead
            self.fail(error)
        self._record_outstanding()
        self.news.set()
        self.room.set()

    def _finish(self, group: Group, before: InFlightGroup) -> None:
        self._seen.append(group)
        for sample in leaf_samples(group):
            versions = sample.weight_versions
            self.bound.clock.observe(version_number(versions[-1]) if versions else None)
        if self.policy.keeps(group, num_outstanding=self.num_outstanding + 1):
            oldest = oldest_version(group)
            self._num_kept += 1
            self.kept.append(KeptGroup(before.min_version if oldest is None else oldest, self._num_kept, group))

    def _record_outstanding(self) -> None:
        """Publish the number of outstanding groups where plug-ins read it."""
        self.state.remaining_batch_size = self.num_outstanding

    def apply_staleness(self) -> None:
        """Apply ``--stale-group-policy`` to kept groups that are too old for this rollout: mask or regenerate them."""
        if self.bound.limit is None:
            return
        for kept in [kept for kept in self.kept if self.bound.is_too_old(kept.group, self.rollout_id)]:
            if not self.bound.apply_policy(kept.group, self.rollout_id):
                self.kept.remove(kept)
                self._start(kept.group)

    # Waiting

    def fail(self, error: BaseException) -> None:
        """Record an error for the waiting rollout to raise; only the first one is kept."""
        self._failure = self._failure or error
        self.news.set()

    @property
    def has_failed(self) -> bool:
        """True if a group or the producer failed."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the recorded error of a group or the producer, if any."""
        if self._failure is not None:
            raise self._failure

    async def next_finished(self, wait: LongWait, detail: str) -> None:
        """Wait until a group has come back since the last call, for at most ``POLL_S`` seconds.

        Args:
            wait: The rollout's deadline and progress line.
            detail: End of the progress line.

        Raises:
            DeadlineError: the deadline has passed.
        """
        self.raise_failure()
        if wait.remaining_s <= 0:
            pending, num_dropped = f"{len(self.in_flight)} groups pending", self.policy.counts["dropped"]
            if num_dropped:
                path = self.config.dynamic_sampling_filter_path
                pending += f", {num_dropped} dropped by --dynamic-sampling-filter-path {path}"
            what, num_done = wait.title.capitalize(), len(self.kept)
            raise await deadline_error(self.config, what, wait, num_done=num_done, pending=pending)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(POLL_S, wait.remaining_s)):
                await self.news.wait()
        self.news.clear()
        wait.show(min(len(self.kept), wait.total), f"{len(self.in_flight)} groups in flight, {detail}")
        self.raise_failure()

    def no_groups_error(self) -> DataError:
        """Return the error for a data source that gave no groups."""
        return DataError(
            f"The data source gave no groups; rollout {self.rollout_id} has {self.num_outstanding} of "
            f"{self.config.rollout_batch_size}. Check --prompt-data and --buffer-filter-path."
        )

    # Out of the pool

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return the ``num_groups`` oldest kept groups."""
        self.kept.sort()
        batch = [kept.group for kept in self.kept[:num_groups]]
        del self.kept[:num_groups]
        self._record_outstanding()
        self.room.set()
        return batch

    def take_batch(self, get_samples: Callable[[int], list[Group]]) -> tuple[list[Group], dict[str, float]]:
        """Take the rollout's batch and call the two hooks that process a whole rollout.

        Returns:
            The ``--rollout-batch-size`` oldest groups, sorted by their first sample's ``index``, and the metrics since
            the last batch.
        """
        batch = sorted(self.take(self.config.rollout_batch_size), key=first_index)
        seen, self._seen = sorted(self._seen, key=first_index), []
        if path := self.config.rollout_sample_filter_path:
            call_plugin(PluginCall("--rollout-sample-filter-path", path), load_function(path), self.args, batch)
        if path := self.config.rollout_all_samples_process_path:
            call = PluginCall("--rollout-all-samples-process-path", path)
            call_plugin(call, load_function(path), self.args, seen, get_samples)
        metrics = {"rollout/groups/kept": len(batch), **self.policy.take_metrics()}
        metrics |= self.bound.metrics(batch, self.rollout_id)
        for observer in self.policy.run.observers:
            metrics |= observer.take_metrics()
        return batch, metrics

    async def close(self) -> None:
        """Cancel every request."""
        tasks = list(self.in_flight)
        self.in_flight.clear()
        self.state.pendings.difference_update(tasks)
        await cancel_all(tasks)


def num_tokens(group: Group) -> int:
    """Return the number of response tokens in a group."""
    return sum(sample.response_length for sample in leaf_samples(group))


def stamp_start(group: Group, rollout_id: int) -> None:
    """Record the rollout that drew each sample's first tokens, unless already recorded."""
    for sample in leaf_samples(group):
        if sample.response_length > 0:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
