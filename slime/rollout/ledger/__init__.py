"""The write-ahead ledger: nothing lost, nothing twice.

    engine ─▶ response ─▶ finished ─▶ filtered | returned | handed ─▶ trained ─▶ saved ─▶ published
                            each is a record in an append-only segment file

``books`` is what the rollout manager holds; ``ledger`` writes; ``story`` adds records up; ``recovery`` gives them to
the next process.  The rollout path calls the functions below, which do nothing while no ledger is in use (evaluations,
runs without ``--save``, ``--no-rollout-ledger``).
"""

from __future__ import annotations

from typing import Any

_IN_USE: list[Any] = []
"""The ledger of this process; a list, because the rollout path must see a change at once."""


def use(ledger: Any | None) -> None:
    """Make ``ledger`` the one that the rollout path writes to."""
    _IN_USE[:] = [] if ledger is None else [ledger]


def response(sample: Any, entry: Any) -> None:
    """An engine's answer arrived: ``entry`` is what the generate function made of ``sample``."""
    for ledger in _IN_USE:
        ledger.response(sample, entry)


def finished(group: list[Any]) -> None:
    """Every execution of the group is answered and rewarded."""
    for ledger in _IN_USE:
        ledger.finished(group)


def filtered(group: list[Any], reason: str | None) -> None:
    """The group is not trained, for the reason given."""
    for ledger in _IN_USE:
        ledger.filtered(group, reason)
