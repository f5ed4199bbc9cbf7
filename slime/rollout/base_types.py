"""Rollout types: groups of samples, and the output of a rollout function.

A group holds the responses to one prompt: a list with one entry per execution of the prompt.  An entry is a Sample, or
a list of Samples if a custom generate function fanned the execution out (sub-agents, compacted contexts).  Either way
it counts as one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeAlias

from torch import Tensor

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
    """Return True if every sample has completed, was truncated or failed for good, so none needs an engine."""
    return all(sample.status in _FINISHED for sample in leaf_samples(value))


def first_index(group: Entry | Iterable[Any]) -> int:
    """Return the ``index`` of the group's first sample, the sort key of a rollout; -1 if it has none."""
    for sample in leaf_samples(group):
        return -1 if sample.index is None else sample.index
    return -1


def has_response(group: Entry | Iterable[Any]) -> bool:
    """Return True if any sample already holds response tokens."""
    return any(sample.response_length > 0 for sample in leaf_samples(group))


_NOTHING = type(None)
# Concrete types first: isinstance is ten times slower on an abstract class.
_COUNT, _LIST, _DICT = (int, Integral), (list, Sized), (dict, Mapping)
_FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("index", "group_index"), ("a whole number or None", (_NOTHING, *_COUNT))),
    "rollout_id": ("a whole number, a string or None", (_NOTHING, str, *_COUNT)),
    **dict.fromkeys(("response_length", "num_untrained_calls"), ("a whole number >= 0", _COUNT)),
    **dict.fromkeys(("tokens", "weight_versions"), ("a list", _LIST)),
    **dict.fromkeys(("loss_mask", "rollout_log_probs", "teacher_log_probs"), ("a list or None", (_NOTHING, *_LIST))),
    **dict.fromkeys(("metadata", "multimodal_train_inputs"), ("a dict or None", (_NOTHING, *_DICT))),
    **dict.fromkeys(("generate_function_path", "custom_rm_path", "session_id"), ("a string or None", (_NOTHING, str))),
    "response": ("a string", (str,)),
    "remove_sample": ("True or False", (bool, Integral)),
    "non_generation_time": ("a number of seconds", (float, Real)),
    "spec_info": ("a Sample.SpecInfo", (Sample.SpecInfo,)),
    "prefix_cache_info": ("a Sample.PrefixCacheInfo", (Sample.PrefixCacheInfo,)),
}
"""Allowed values of a sample's fields, in words and as types.  Fields not listed here may hold anything."""
_NO_LISTS = (str, bytes, Mapping, set, frozenset)


def check_samples(value: Any, says: Any, *, error: type[Exception] = HookError) -> None:
    """Check the samples that a plug-in created or changed, however deeply they are nested in lists.

    Normalizes them in place: ``metadata`` None becomes an empty dict, and the reward becomes ``plain_reward(reward)``.

    Args:
        value: Return value of the plug-in.
        says: Start of the error message, for example the plug-in call.
        error: Exception type to raise.

    Raises:
        HookError: ``value`` holds something other than Samples, or a field holds an unusable value.  The type is
            ``error``.
    """
    if isinstance(value, list | tuple):
        for item in value:
            check_samples(item, says, error=error)
        return
    if not isinstance(value, Sample):
        raise error(f"{says} {_shown(value)} instead of a Sample; only Samples, and lists of them, are allowed.")
    for name, (words, kinds) in _FIELDS.items():
        given = getattr(value, name)
        is_kind = isinstance(given, kinds)
        if is_kind and Sized in kinds and type(given) is not list:
            is_kind = not isinstance(given, _NO_LISTS)
        if not is_kind or (kinds is _COUNT and (isinstance(given, bool) or given < 0)):
            raise error(f"{says} sample {_shown(value.index)} with {_shown(given)} in {name}; it must be {words}.")
    if value.metadata is None:
        value.metadata = {}
    value.reward = plain_reward(value.reward)


def plain_reward(reward: Any) -> Any:
    """Convert single-element tensors, including dict values, to Python numbers; return anything else unchanged."""
    if isinstance(reward, dict) and any(isinstance(entry, Tensor) for entry in reward.values()):
        return {name: plain_reward(entry) for name, entry in reward.items()}
    return reward.item() if isinstance(reward, Tensor) and reward.numel() == 1 else reward


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})" if not isinstance(value, int) else str(value)[:80]


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on: ``samples[group][entry]``, one level deeper where an execution fanned out."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Evaluation results: ``data[dataset] = {"rewards": [...], "truncated": [...], "samples": [...]}``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def eval_samples(output: RolloutFnEvalOutput) -> list[Sample]:
    """Return the samples of every data set; a user-defined evaluation function may omit them."""
    return [sample for result in output.data.values() for sample in result.get("samples") or ()]


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and wrap a bare list or dict, which older functions return, in its output type.

    Raises:
        HookError: the function returned anything else, or a part of its output has the wrong type.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', fn)}"
    expected = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    if evaluation and isinstance(output, dict):
        output = RolloutFnEvalOutput(data=output)
    elif not evaluation and isinstance(output, list):
        output = RolloutFnTrainOutput(samples=output)
    elif not isinstance(output, expected):
        legacy = "a dict by data set" if evaluation else "a list of groups"
        raise HookError(
            f"{name} returned {type(output).__name__} with evaluation={evaluation}; "
            f"it must return {expected.__name__} or {legacy}."
        )
    _check_part(name, "metrics", output.metrics, Mapping, _NOTHING)
    if isinstance(output, RolloutFnTrainOutput):
        _check_part(name, "samples", output.samples, list)
        return output
    _check_part(name, "data", output.data, Mapping)
    for data_set, result in output.data.items():
        _check_part(name, f"data[{data_set!r}]", result, Mapping)
        if "rewards" not in result:
            raise HookError(f"{name} returned data[{data_set!r}], which has no rewards; it must have a list of them.")
        _check_part(name, f"data[{data_set!r}]['rewards']", result["rewards"], list, tuple)
        for key in ("truncated", "samples"):
            _check_part(name, f"data[{data_set!r}][{key!r}]", result.get(key), list, tuple, _NOTHING)
        check_samples(result.get("samples") or [], f"{name} returned")
    return output


def _check_part(name: str, part: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        allowed = " or ".join("nothing" if kind is _NOTHING else kind.__name__.lower() for kind in kinds)
        raise HookError(f"{name} returned {_shown(value)} as {part}; it must be a {allowed}.")
