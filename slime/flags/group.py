"""A flag group: declares flags, derives values from them, and checks combinations.

``slime.flags.parse`` lists the core's groups.  An extension defines its ``GROUP`` in ``flags.py``, and
``slime.compose`` appends it to the core's.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Derive = Callable[[Namespace], None]
Rule = tuple[str, str, str]
"""Attributes of two flags, and the reason of the rule between them; ``name=value`` means the flag with this value."""


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one subject.  Each stage visits the groups in order."""

    add: Callable[[argparse.ArgumentParser], None] | None = None
    """Declares the flags."""
    derive: tuple[Derive, ...] = ()
    """Functions that set derived attributes; they may use those of earlier groups."""
    check: tuple[Callable[[Namespace], Iterator[str]], ...] = ()
    """Functions that yield a message per invalid combination."""
    needs: tuple[Rule, ...] = ()
    """The first flag has no effect without the second, or without one of several."""
    excludes: tuple[Rule, ...] = ()
    """The two flags contradict each other."""
    advise: tuple[Derive, ...] = ()
    """Functions that log settings that are valid, but may not be intended."""
    complete: tuple[Derive, ...] = ()
    """Functions that derive and check values from a trainer's complete flags; skipped in a run without a trainer."""
    once: tuple[Derive, ...] = ()
    """Those functions of ``derive`` that concern the whole run; skipped for a critic's args."""
    chosen_by: str = ""
    """A flag, as in a ``Rule``; a run without it skips ``derive``, ``check``, ``advise`` and ``complete``."""

    def is_chosen(self, flags: Mapping[str, Any]) -> bool:
        """Return True if a run with these flags, by attribute, uses this group."""
        return not self.chosen_by or _holds(flags, self.chosen_by)


def declare_all(parser: argparse.ArgumentParser, groups: Iterable[FlagGroup]) -> None:
    """Add the flags of every group to ``parser``."""
    for group in groups:
        if group.add is not None:
            group.add(parser)


def derive_all(args: Namespace, groups: Iterable[FlagGroup], *, of_the_run: bool = True) -> None:
    """Set every derived attribute of ``args``; ``of_the_run=False`` for the second role of a run."""
    for group in groups:
        for derive in group.derive if group.is_chosen(vars(args)) else ():
            if of_the_run or derive not in group.once:
                derive(args)


def advise_all(args: Namespace, groups: Iterable[FlagGroup]) -> None:
    """Log settings that are valid, but may not be intended."""
    for group in groups:
        for advise in group.advise if group.is_chosen(vars(args)) else ():
            advise(args)


def complete_all(args: Namespace, groups: Iterable[FlagGroup]) -> None:
    """Derive and check values from the complete flags of a trainer.

    Raises:
        SlimeError: a combination is invalid, or a file is damaged.
    """
    if not args.debug_rollout_only:
        for group in groups:
            for complete in group.complete if group.is_chosen(vars(args)) else ():
                complete(args)


def problems_of(args: Namespace, groups: Iterable[FlagGroup]) -> list[str]:
    """Return the messages of every check, in the order of the groups."""
    found: list[str] = []
    values = vars(args)
    for group in groups:
        for name, needed, reason in group.needs:
            if _holds(values, name) and not any(_holds(values, one) for one in needed.split()):
                others = " or ".join(flag_of(one).replace("=", " ") for one in needed.split())
                given = _as_given(values, name)
                found.append(f"{given} has no effect without {others}: {reason}. Add it, or drop this one.")
        for name, other, reason in group.excludes:
            if _holds(values, name) and _holds(values, other):
                both = f"{_as_given(values, name)} and {_as_given(values, other)}"
                found.append(f"{both} contradict each other: {reason}. Drop one of them.")
        checks = group.check if group.is_chosen(values) else ()
        found += [message for check in checks for message in check(args)]
    return found


def flag_of(attribute: str) -> str:
    """Return ``--num-layers`` of ``num_layers``."""
    return "--" + attribute.replace("_", "-")


def _holds(values: Mapping[str, Any], rule: str) -> bool:
    name, _, wanted = rule.partition("=")
    value = values.get(name)  # flags of a backend that the run does not have are missing
    return str(value) == wanted if wanted else bool(value)


def _as_given(values: Mapping[str, Any], rule: str) -> str:
    name = rule.partition("=")[0]
    value = values[name]
    shown = " ".join(map(str, value)) if isinstance(value, list) else value
    return flag_of(name) if value is True else f"{flag_of(name)} {shown}"
