"""A group of flags: what declares them, what follows from them, and what cannot work.

The core's groups are listed in ``slime.flags.parse``.  An extension has its ``GROUP`` in ``flags.py``, and
``slime.compose`` puts it behind the core's.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Derive = Callable[[Namespace], None]
Rule = tuple[str, str, str]
"""Attributes of two flags, and the reason of the rule between them; ``name=value`` is a flag with this value."""


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one subject; every stage walks the groups in their order."""

    add: Callable[[argparse.ArgumentParser], None] | None = None
    """Declares the flags."""
    derive: tuple[Derive, ...] = ()
    """Each fills in what follows from the flags, and may rely on what the groups before have filled in."""
    check: tuple[Callable[[Namespace], Iterator[str]], ...] = ()
    """Each yields a message for every combination that cannot work."""
    needs: tuple[Rule, ...] = ()
    """The first flag has no effect without the second, or without one of several."""
    excludes: tuple[Rule, ...] = ()
    """The two flags contradict each other."""
    advise: tuple[Derive, ...] = ()
    """Each logs what works, but may not be what was meant."""
    complete: tuple[Derive, ...] = ()
    """Each fills in and checks what follows from the complete flags of a trainer; a run without one skips them."""
    once: tuple[Derive, ...] = ()
    """Those of ``derive`` that concern the run as a whole, so that a critic's args skip them."""
    chosen_by: str = ""
    """A flag, as in a ``Rule``: a run without it skips ``derive``, ``check``, ``advise`` and ``complete``."""

    def is_chosen(self, args: Namespace) -> bool:
        """Return whether the run of ``args`` has this subject at all."""
        return not self.chosen_by or _holds(vars(args), self.chosen_by)


def declare_all(parser: argparse.ArgumentParser, groups: Iterable[FlagGroup]) -> None:
    """Add the flags of every group to ``parser``."""
    for group in groups:
        if group.add is not None:
            group.add(parser)


def derive_all(args: Namespace, groups: Iterable[FlagGroup], *, of_the_run: bool = True) -> None:
    """Fill in every derived attribute of ``args``; ``of_the_run=False`` for a second role in the run."""
    for group in groups:
        for derive in group.derive if group.is_chosen(args) else ():
            if of_the_run or derive not in group.once:
                derive(args)


def advise_all(args: Namespace, groups: Iterable[FlagGroup]) -> None:
    """Log what works, but may not be what was meant."""
    for group in groups:
        for advise in group.advise if group.is_chosen(args) else ():
            advise(args)


def complete_all(args: Namespace, groups: Iterable[FlagGroup]) -> None:
    """Fill in and check what follows from the complete flags of a trainer.

    Raises:
        SlimeError: a combination that cannot work, or a damaged file.
    """
    if not args.debug_rollout_only:
        for group in groups:
            for complete in group.complete if group.is_chosen(args) else ():
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
        checks = group.check if group.is_chosen(args) else ()
        found += [message for check in checks for message in check(args)]
    return found


def flag_of(attribute: str) -> str:
    """Return ``--num-layers`` of ``num_layers``."""
    return "--" + attribute.replace("_", "-")


def _holds(values: Mapping[str, Any], rule: str) -> bool:
    name, _, wanted = rule.partition("=")
    value = values.get(name)  # a backend that the run lacks has no flags
    return str(value) == wanted if wanted else bool(value)


def _as_given(values: Mapping[str, Any], rule: str) -> str:
    name = rule.partition("=")[0]
    value = values[name]
    shown = " ".join(map(str, value)) if isinstance(value, list) else value
    return flag_of(name) if value is True else f"{flag_of(name)} {shown}"
