"""Types of a rollout: groups of samples, and the output of a rollout function.

A group is the answers to one prompt: a list with one entry per execution of it.  An entry is a Sample, or a list of
Samples when a custom generate function fanned that execution out (sub-agents, compacted contexts); both count alike.
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


_NOTHING = type(None)
# Concrete types first: asking an abstract class costs ten times as much.
_COUNT, _LIST, _DICT = (int, Integral), (list, Sized), (dict, Mapping)
_FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("index", "group_index"), ("a whole number or None", (_NOTHING, *_COUNT))),
    "rollout_id": ("a whole number, a text or None", (_NOTHING, str, *_COUNT)),
    **dict.fromkeys(("response_length", "num_untrained_calls"), ("a whole number from 0 on", _COUNT)),
    **dict.fromkeys(("tokens", "weight_versions"), ("a list", _LIST)),
    **dict.fromkeys(("loss_mask", "rollout_log_probs", "teacher_log_probs"), ("a list or None", (_NOTHING, *_LIST))),
    **dict.fromkeys(("metadata", "multimodal_train_inputs"), ("a dict or None", (_NOTHING, *_DICT))),
    **dict.fromkeys(("generate_function_path", "custom_rm_path", "session_id"), ("a text or None", (_NOTHING, str))),
    "response": ("a text", (str,)),
    "remove_sample": ("True or False", (bool, Integral)),
    "non_generation_time": ("a number of seconds", (float, Real)),
    "spec_info": ("a Sample.SpecInfo", (Sample.SpecInfo,)),
    "prefix_cache_info": ("a Sample.PrefixCacheInfo", (Sample.PrefixCacheInfo,)),
}
"""Allowed values of a sample's fields, in words and as types; those that are not named here may be anything."""
_NO_LISTS = (str, bytes, Mapping, set, frozenset)


def check_samples(value: Any, says: Any, *, error: type[Exception] = HookError) -> None:
    """Check the samples that a plug-in made or changed, however deep they are nested in lists.

    ``metadata`` that is None becomes an empty dict, since others look into it; the reward becomes ``plain_reward``.

    Args:
        value: what it returned.
        says: beginning of the error, such as the call of the plug-in.
        error: raised.

    Raises:
        HookError: there is something else among them, or a field of one holds an unusable value.
    """
    if isinstance(value, list | tuple):
        for item in value:
            check_samples(item, says, error=error)
        return
    if not isinstance(value, Sample):
        raise error(f"{says} {_shown(value)} in the place of a Sample; only Samples, and lists of them, belong there.")
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
    """Return the number of a tensor that holds one, also within a dict; anything else as it is."""
    if isinstance(reward, dict) and any(isinstance(entry, Tensor) for entry in reward.values()):
        return {name: plain_reward(entry) for name, entry in reward.items()}
    return reward.item() if isinstance(reward, Tensor) and reward.numel() == 1 else reward


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})" if not isinstance(value, int) else str(value)[:80]


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
            raise HookError(f"{name} returned data[{data_set!r}], which has no rewards; it must be a list of them.")
        _check_part(name, f"data[{data_set!r}]['rewards']", result["rewards"], list, tuple)
        for key in ("truncated", "samples"):
            _check_part(name, f"data[{data_set!r}][{key!r}]", result.get(key), list, tuple, _NOTHING)
        check_samples(result.get("samples") or [], f"{name} returned")
    return output


def _check_part(name: str, part: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        allowed = " or ".join("nothing" if kind is _NOTHING else kind.__name__.lower() for kind in kinds)
        raise HookError(f"{name} returned {_shown(value)} as {part}; it must be a {allowed}.")
