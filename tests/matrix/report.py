"""Cells of the matrix, and the tables that are printed and written into the documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CHECKS = ("log-probs", "gradients", "step", "round trip", "round trip bf16", "live export", "live export bf16")
"""The checks in one process, in the order of the table's columns."""


@dataclass(frozen=True)
class Cell:
    """One check of one family: in one process (``column`` is the check) or under a layout (``column`` is its name).

    A plain value that can be pickled.
    """

    family: str
    column: str
    measured: float
    """The worst measured number; nan if nothing was measured."""
    bound: float
    """Upper limit of ``measured``; 0 for bitwise checks, which count differing tensors."""
    detail: str = ""
    """The tensor (or the step of the check) of ``measured``, or what went wrong."""
    seconds: float = 0.0
    kind: str = "check"
    """``check`` or ``layout``."""

    @property
    def passed(self) -> bool:
        """Whether ``measured`` is within the bound; a nan is not."""
        return self.measured <= self.bound

    def describe(self) -> str:
        """One line with all that is needed to investigate it."""
        verdict = "ok" if self.passed else "FAILED"
        return (
            f"{verdict:6} {self.family} / {self.column}: {self.measured:.3g} (bound {self.bound:g})"
            f"{f', {self.detail}' if self.detail else ''} [{self.seconds:.1f} s]"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def format_number(cell: Cell) -> str:
    """The text of a table cell: the number, or that nothing differs; failures are marked."""
    if cell.passed and cell.bound == 0:
        return "equal"
    return f"{cell.measured:.1e}" if cell.passed else f"**{cell.measured:.1e}**"


def summary(cells: Iterable[Cell]) -> str:
    """The failures in full, and their number."""
    cells = list(cells)
    failed = [cell for cell in cells if not cell.passed]
    lines = [cell.describe() for cell in failed]
    return "\n".join([*lines, f"{len(cells) - len(failed)} of {len(cells)} cells passed"])
