"""Answers of code that runs inside the engine, to a caller who only has SGLang's HTTP endpoints.

A loader must not raise, because an exception there ends SGLang's scheduler, and its return value is dropped.  What it
has to say is therefore kept with the model and fetched through ``/get_weights_by_name``, under names that no parameter
has.  The server returns the answer of the first rank only, so ranks gather before they answer.
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
"""Name that asks for the problems which :func:`reporting` collected since the last time."""
Answer = Callable[[], list[str]]


def answer_by_name(model: nn.Module, name: str, answer: Answer) -> None:
    """Let ``model.get_weights_by_name(name)`` return ``answer()``; other names mean what they meant."""
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
        raise AttributeError(f"{type(model).__name__} gives no weights by name")
    return original(name, truncate_size, tp_size=tp_size)


def gather_over_ranks(own: Any) -> list[Any]:
    """Return what each tensor-parallel rank gives, in rank order; every rank must call this."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return gather_objects(own, group.cpu_group) if group.world_size > 1 else [own]


def position_among_ranks() -> int:
    """Return the place of what this rank gives in the list of :func:`gather_over_ranks`."""
    from sglang.srt.distributed import get_tp_group

    return int(get_tp_group().rank_in_group)


def rank_in_engine() -> int:
    """Return the position of this process among all GPUs of the engine."""
    from sglang.srt.distributed import get_world_group

    return int(get_world_group().rank_in_group)


def with_ranks(found: Sequence[Sequence[str]]) -> list[str]:
    """Return the problems of all ranks as one list; several ranks are named."""
    if len(found) == 1:
        return list(found[0])
    return [f"rank {rank}: {problem}" for rank, problems in enumerate(found) for problem in problems]


@contextmanager
def reporting(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list whose content reaches the caller of ``/get_weights_by_name``; an exception becomes an entry."""
    answer_by_name(model, CHECK_REPORT, _take_problems)
    problems: list[str] = []
    try:
        yield problems
    except Exception as error:  # the edge of our code inside the scheduler, which an exception would end
        logger.exception("weight check failed")
        problems.append(f"the check itself failed: {type(error).__name__}: {error}")
    _PROBLEMS.extend(problems)


def _take_problems() -> list[str]:
    """Return the problems of all ranks, and forget them."""
    problems = gather_over_ranks([*_PROBLEMS])
    _PROBLEMS.clear()
    return with_ranks(problems)


def flatten_reports(answer: Any) -> list[str]:
    """Return the strings of an answer: the server nests them once more with attention data parallelism."""
    if isinstance(answer, str):
        return [answer]
    return [text for part in answer or [] for text in flatten_reports(part)]


_PROBLEMS: list[str] = []
"""Of all models of this process: SGLang checks a draft model too, and asks the target alone for the report."""
