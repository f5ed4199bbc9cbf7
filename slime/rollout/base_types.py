"""Types of a rollout: groups of samples, and the output of a rollout function.

A group is the answers to one prompt: a list with one entry per execution of it.  An entry is a Sample, or a list of
Samples when a custom generate function fanned that execution out (sub-agents, compacted contexts); both count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime.utils.errors import HookError
from slime.utils.types import Sample

Entry: TypeAlias = "Sample | list[Any]"
Group: TypeAlias = list[Entry]

_FINISHED = frozenset({Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED})


def leaf_samples(value: Entry | Iterable[Any]) -> Iterator[Sample]:
    """Yield every Sample of an entry, a group or a list of groups, in order, however deep the nesting."""
    if isinstance(value, Sample):
        yield value
        return
    for item in value:
        yield from leaf_samples(item)


def is_finished(value: Entry | Iterable[Any]) -> bool:
    """Return True when no sample of it waits for the engine: each completed, was truncated or failed for good."""
    return all(sample.status in _FINISHED for sample in leaf_samples(value))


def first_index(group: Entry | Iterable[Any]) -> int:
    """Return the ``index`` of the group's first sample: the sort key of a rollout.  Samples without one go first."""
    for sample in leaf_samples(group):
        return -1 if sample.index is None else sample.index
    return -1


def has_response(group: Entry | Iterable[Any]) -> bool:
    """Return True when some sample of it already holds response tokens."""
    return any(sample.response_length > 0 for sample in leaf_samples(group))


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on; ``samples[group][sibling]``, one level deeper where an execution fanned out."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Results of an evaluation: ``data[dataset] = {"rewards": [...], "truncated": [...], "samples": [...]}``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def eval_samples(output: RolloutFnEvalOutput) -> list[Sample]:
    """Return the samples of every data set; an evaluation function of the user's may give none."""
    return [sample for result in output.data.values() for sample in result.get("samples") or ()]


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function; a bare list or dict, as older functions return, is wrapped.

    Raises:
        HookError: it returned something that is neither.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    expected = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    if isinstance(output, expected):
        return output
    if evaluation and isinstance(output, dict):
        return RolloutFnEvalOutput(data=output)
    if not evaluation and isinstance(output, list):
        return RolloutFnTrainOutput(samples=output)
    name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', fn)}"
    legacy = "a dict by data set" if evaluation else "a list of groups"
    raise HookError(
        f"{name} returned {type(output).__name__} with evaluation={evaluation}; "
        f"it must return {expected.__name__} or {legacy}."
    )
