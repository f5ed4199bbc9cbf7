"""Finished groups of one rollout: which are kept, which dropped, which are more than was asked for; and the counts."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections import Counter

from slime.rollout import ledger
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.groups import Group, first_index, has_response, is_finished, leaf_samples, refuse_pending
from slime.rollout.replaceable import entry_points
from slime.rollout.staleness import bound_of
from slime.rollout.state import GenerateState
from slime.utils.errors import DataError, EngineError

logger = logging.getLogger(__name__)

MAX_GROUP_ATTEMPTS = 3
"""How often a group that came back aborted, though nobody aborted it, is submitted."""
DROPS_BEFORE_WARNING = 8
"""Batches that a filter may drop whole before the log says so."""


class GroupCollector:
    """Takes groups in the order in which they finish.

    Invariant: every group issued is in exactly one of flight, ``kept``, ``surplus`` and the dropped ones.
    """

    def __init__(self, args: Namespace, target: int, *, rollout_id: int = 0) -> None:
        self.target = target
        self._rollout_id = rollout_id
        self._bound = bound_of(args) if getattr(args, "max_staleness", None) is not None else None
        self.kept: list[Group] = []
        self.surplus: list[Group] = []
        self.seen: list[Group] = []
        """Every finished group, dropped ones included, for ``--rollout-all-samples-process-path``."""
        self._args = args
        path = getattr(args, "dynamic_sampling_filter_path", None)
        self._filter = entry_points().load_function(path) if path else None
        self._drops = MetricGatherer()
        self._counts: Counter[str] = Counter()
        self._attempts: Counter[int] = Counter()

    @property
    def is_full(self) -> bool:
        """True when the rollout has its groups."""
        return len(self.kept) >= self.target

    async def begin(self) -> None:
        """With ``--max-staleness``, learn which weights the engines have."""
        if self._bound is not None:
            await self._bound.clock.look(self._rollout_id)

    def issued(self, groups: list[Group]) -> None:
        """Check and count groups that the data source gave; those that are too old become prompts again."""
        expected = self._args.n_samples_per_prompt
        for group in groups:
            if len(group) != expected:
                raise DataError(
                    f"The data source gave a group of {len(group)} samples; --n-samples-per-prompt is {expected}. "
                    "Look at --data-source-path and at what is put into its buffer."
                )
            if self._bound is not None:
                self._bound.screen([group], self._rollout_id)
            self._counts["issued"] += 1
            if is_finished(group):
                self._counts["reused"] += 1
            elif has_response(group):
                self._counts["continued"] += 1

    def add(self, state: GenerateState, group: Group) -> None:
        """Sort one group that came out of ``generate_and_rm_group``."""
        if not is_finished(group):
            self._submit_again(state, group)
            return
        self.seen.append(group)
        ledger.finished(group)
        verdict = call_dynamic_filter(self._filter, self._args, group)
        drop = should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=state.remaining_batch_size, target_data_size=self.target
        )
        if drop:
            ledger.filtered(group, verdict.reason)
            self._drops.on_dynamic_filter_drop(verdict.reason)
            self._counts["dropped"] += 1
            self._warn_of_a_filter_that_keeps_nothing(verdict.reason)
            state.remaining_batch_size -= 1
        elif self.is_full:
            self.surplus.append(group)
        else:
            if self._bound is not None:
                self._bound.mask_old(group, self._rollout_id)
            self.kept.append(group)

    def _warn_of_a_filter_that_keeps_nothing(self, reason: str | None) -> None:
        """Such a rollout goes on until its deadline."""
        dropped = self._counts["dropped"]
        if not self.kept and dropped % (DROPS_BEFORE_WARNING * self.target) == 0:
            logger.warning(
                "--dynamic-sampling-filter-path %s has dropped %d groups and kept none (the last one: %s). If all "
                "rewards are equal, look at the grader, at --rollout-max-response-len and at the data.",
                self._args.dynamic_sampling_filter_path,
                dropped,
                reason,
            )

    def _submit_again(self, state: GenerateState, group: Group) -> None:
        """An engine ended requests that this rollout did not abort: let the group go on, a few times."""
        index = first_index(group)
        self._attempts[index] += 1
        if self._attempts[index] >= MAX_GROUP_ATTEMPTS:
            statuses = sorted({sample.status.value for sample in leaf_samples(group)})
            refuse_pending(self._args, group)
            raise EngineError(
                f"The group of sample {index} came back unfinished {self._attempts[index]} times (statuses: "
                f"{', '.join(statuses)}) although the rollout was not over. Engines abort requests that do not fit "
                "their context, and while weights are updated; look at their logs and at --rollout-max-prompt-len."
            )
        self._counts["resubmitted"] += 1
        state.remaining_batch_size -= 1
        state.submit_generate_tasks([group])

    def returned(self, groups: list[Group], *, num_unfinished: int) -> None:
        """Count the groups that go back to the data source: unfinished ones, and finished surplus."""
        self._counts["returned"] += len(groups)
        self._counts["returned_unfinished"] += num_unfinished

    def detail(self, state: GenerateState) -> str:
        """The end of the progress line."""
        return f"{len(state.pendings)} groups in flight, {self._counts['dropped']} dropped by the filter"

    def metrics(self) -> dict[str, float]:
        """Counts of groups in this rollout, and drops by reason.

        ``issued`` splits into kept, dropped and left over; what is left over is either ``returned`` to the data source
        or ``discarded``.
        """
        left_over = self._counts["issued"] - len(self.kept) - self._counts["dropped"]
        counts = {
            "issued": self._counts["issued"],
            "reused": self._counts["reused"],
            "continued": self._counts["continued"],
            "resubmitted": self._counts["resubmitted"],
            "kept": len(self.kept),
            "dropped": self._counts["dropped"],
            "returned": self._counts["returned"],
            "returned_unfinished": self._counts["returned_unfinished"],
            "returned_finished": self._counts["returned"] - self._counts["returned_unfinished"],
            "discarded": left_over - self._counts["returned"],
        }
        ages = {} if self._bound is None else self._bound.metrics(self.kept, self._rollout_id)
        return {f"rollout/groups/{name}": value for name, value in counts.items()} | self._drops.collect() | ages
