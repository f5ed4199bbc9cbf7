"""What a rollout function returns, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import HookError
from slime.utils.types import Sample


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
