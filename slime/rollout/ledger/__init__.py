"""The write-ahead ledger: nothing lost, nothing trained twice.

    engine ─▶ response ─▶ finished ─▶ filtered | returned | handed ─▶ trained ─▶ saved ─▶ published
                            each is a record in an append-only segment file

``ledger`` wraps the data source and is held by the rollout manager; ``journal`` writes records (``records``), samples
as bytes (``sample_codec``), into files (``segments``); ``recovery`` gives them to the next process.
"""

from __future__ import annotations

from typing import Any

_IN_USE: list[Any] = []
"""The journal of this process; a list, because the rollout path must see a change at once."""


def use(journal: Any | None) -> None:
    """Make ``journal`` the one that the rollout path writes to."""
    _IN_USE[:] = [] if journal is None else [journal]


def response(sample: Any, entry: Any) -> None:
    """Record that the generate function made ``entry`` of ``sample``."""
    for journal in _IN_USE:
        journal.record_response(sample, entry)


def finished(group: list[Any]) -> None:
    """Record that every execution of the group is answered and rewarded."""
    for journal in _IN_USE:
        journal.record_finished(group)


def filtered(group: list[Any], reason: str | None) -> None:
    """Record that the group is not trained, for the reason given."""
    for journal in _IN_USE:
        journal.record_filtered(group, reason)
