"""Answers of a dynamic sampling filter, and what becomes of a group by them.

The filters themselves are in ``dynamic_sampling_filters``; the policy that asks them in
``slime.rollout.pool``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import HookError


@dataclass
class DynamicFilterOutput:
    """One filter's verdict on one finished group."""

    keep: bool
    reason: str | None = None
    """Why the group goes; it names the metric ``rollout/dynamic_filter/drop_{reason}``."""
    keep_when_insufficient: bool = False
    """A rejected group is kept all the same when dropping it would call for another wave of prompts."""


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Ask ``fn`` about a group; it may answer with a DynamicFilterOutput, or with a plain truth value.

    Without a filter every group is kept.  Truth values may be Python's, numpy's or a tensor of one element.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    verdict = output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)
    try:
        if verdict.keep is None or not hasattr(verdict.keep, "__bool__") or verdict.keep != verdict.keep:
            raise TypeError  # a coroutine, a list or a text is no verdict
        verdict.keep = bool(verdict.keep)
    except (TypeError, ValueError, RuntimeError):
        raise HookError(
            f"The dynamic sampling filter {getattr(fn, '__name__', fn)} returned {str(output)[:80]!r} "
            f"({type(output).__name__}); it must return a DynamicFilterOutput or a bool. Change the function that "
            "--dynamic-sampling-filter-path names."
        ) from None
    return verdict


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return True when the group goes.

    Args:
        remaining_batch_size: groups kept so far plus groups still being generated, this one included.
        target_data_size: groups that the rollout needs.
    """
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts of the dropped groups by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group; a filter that gave no reason counts as ``unspecified``."""
        self._drops[reason or "unspecified"] += 1

    def collect(self) -> dict[str, int]:
        """Return ``rollout/dynamic_filter/drop_{reason}`` for every reason seen."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in sorted(self._drops.items())}
