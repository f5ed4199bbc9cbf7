"""Groups that came back from a rollout: the order they leave in, and how they are stored.

A returned group is aborted (its tokens are continued) or a finished surplus (it is trained as it is).
"""

from __future__ import annotations

import logging
import pickle
from argparse import Namespace
from typing import Any

from slime.rollout.ledger.sample_codec import try_pickle
from slime.utils.errors import DataError, HookError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_LEFT_OUT: set[str] = set()
"""Attributes that were named in the log already."""


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """The oldest ``num_samples`` groups, removed from ``buffer``; the default of ``--buffer-filter-path``."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def check_taken(taken: Any, buffer: list[list[Sample]], num_samples: int, filter_name: str) -> list[list[Sample]]:
    """What a buffer filter returned, once it is known that no group can be trained twice because of it."""
    if not isinstance(taken, list) or len(taken) > num_samples:
        got = f"{len(taken)} groups" if isinstance(taken, list) else type(taken).__name__
        raise HookError(f"{filter_name} returned {got}; it must return a list of at most {num_samples} groups.")
    left = {id(group) for group in buffer}
    if any(id(group) in left for group in taken):
        raise HookError(f"{filter_name} returned a group and left it in the buffer; it must remove what it returns.")
    return taken


def check_groups(groups: list[list[Sample]], n_samples_per_prompt: int) -> None:
    """Every group holds one entry per sample of its prompt."""
    for group in groups:
        if len(group) != n_samples_per_prompt:
            raise DataError(
                f"A group of {len(group)} samples was returned to the buffer; "
                f"--n-samples-per-prompt is {n_samples_per_prompt}, and groups must come back whole."
            )


def groups_to_state(groups: list[Any]) -> list[Any]:
    """Plain values that share nothing with the samples, so that they stay as they are while the samples grow.

    Going through pickle is about five times as fast as ``copy.deepcopy`` on long token lists.  Attributes that cannot
    be pickled (a client that a hook left on a sample) are left out.
    """
    plain = _to_plain(groups)
    data = try_pickle(plain)
    if data is None:
        data = pickle.dumps(_without_unpicklable(plain), protocol=pickle.HIGHEST_PROTOCOL)
    return pickle.loads(data)


def groups_from_state(state: list[Any]) -> list[Any]:
    """The groups that ``groups_to_state`` stored; they share nothing with ``state``."""
    return _from_plain(pickle.loads(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)))


def _to_plain(value: Any) -> Any:
    return [_to_plain(item) for item in value] if isinstance(value, list) else value.to_dict()


def _without_unpicklable(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_unpicklable(item) for item in value]
    kept = {name: field for name, field in value.items() if try_pickle(field) is not None}
    for name in value.keys() - kept.keys() - _LEFT_OUT:
        _LEFT_OUT.add(name)
        logger.warning("Groups are stored without Sample.%s, which cannot be pickled.", name)
    return kept


def _from_plain(value: Any) -> Any:
    return [_from_plain(item) for item in value] if isinstance(value, list) else Sample.from_dict(value)
