"""Long lists whose items repeat, as the distinct ones and a column of numbers.

A push of a large model names tens of thousands of tensors and has a few hundred kinds of shapes, slices and copies:
told once, they cost neither text nor objects for each tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def numbered(items: Iterable[Item]) -> tuple[list[Item], list[int]]:
    """Return the distinct items in the order in which they first come, and the position of each item among them."""
    numbers: dict[Item, int] = {}
    column = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), column
