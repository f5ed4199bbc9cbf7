"""Lets code inside the engine answer a caller who has only SGLang's HTTP endpoints.

A loader must not raise, because an exception would end SGLang's scheduler, and its return value is dropped.  Its
answer is therefore kept with the model and fetched through ``/get_weights_by_name``, under names that no parameter
has.  The server returns only the first rank's answer, so ranks gather before they answer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from slime.utils.distributed_utils import gather_objects

logger = logging.getLogger(__name__)

CHECK_REPORT = "slime.weight_check"
"""Name that requests the problems that :func:`reporting` collected since the last request."""
Answer = Callable[[], list[str]]


def answer_by_name(model: nn.Module, name: str, answer: Answer) -> None:
    """Make ``model.get_weights_by_name(name)`` return ``answer()``; other names work as before."""
    state = vars(model)
    if "_slime_answers" not in state:
        state["_slime_answers"] = {}
        original = getattr(model, "get_weights_by_name", None)
        state["get_weights_by_name"] = functools.partial(_read, model, original)
    state["_slime_answers"][name] = answer


def _read(
    model: nn.Module, original: Callable[..., Any] | None, name: str, truncate_size: int = 100, tp_size: int = 1
) -> Any:
    answer = vars(model)["_slime_answers"].get(name)
    if answer is not None:
        return answer()[:truncate_size]
    if original is None:
        raise AttributeError(f"{type(model).__name__} has no get_weights_by_name")
    return original(name, truncate_size, tp_size=tp_size)


def gather_over_ranks(own: Any) -> list[Any]:
    """Gather ``own`` from all tensor-parallel ranks, in rank order; every rank must call this."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return gather_objects(own, group.cpu_group) if group.world_size > 1 else [own]


def position_among_ranks() -> int:
    """Return this rank's index in the result of :func:`gather_over_ranks`."""
    from sglang.srt.distributed import get_tp_group

    return int(get_tp_group().rank_in_group)


def rank_in_engine() -> int:
    """Return the position of this process among all GPUs of the engine."""
    from sglang.srt.distributed import get_world_group

    return int(get_world_group().rank_in_group)


def with_ranks(found: Sequence[Sequence[str]]) -> list[str]:
    """Return the problems of all ranks as one list, prefixed with the rank if there are several."""
    if len(found) == 1:
        return list(found[0])
    return [f"rank {rank}: {problem}" for rank, problems in enumerate(found) for problem in problems]


@contextmanager
def reporting(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list of problems, to be fetched with ``/get_weights_by_name``; an exception is added to it."""
    answer_by_name(model, CHECK_REPORT, _take_problems)
    problems: list[str] = []
    try:
        yield problems
    except Exception as error:  # an exception must not reach the scheduler, which it would end
        logger.exception("Weight check failed")
        problems.append(f"the check itself failed: {type(error).__name__}: {error}")
    _PROBLEMS.extend(problems)


def _take_problems() -> list[str]:
    """Return the problems of all ranks and clear them."""
    problems = gather_over_ranks([*_PROBLEMS])
    _PROBLEMS.clear()
    return with_ranks(problems)


def flatten_reports(answer: Any) -> list[str]:
    """Return the strings in an answer, which the server nests one level deeper with attention data parallelism."""
    if isinstance(answer, str):
        return [answer]
    return [text for part in answer or [] for text in flatten_reports(part)]


_PROBLEMS: list[str] = []
"""Problems of all models in this process: SGLang checks a draft model too, but asks only the target for the report."""
