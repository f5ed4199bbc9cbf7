"""Functions of every kind that a mutation may patch, to test the patching."""

from __future__ import annotations

import functools
from collections.abc import Callable


def doubled(x: int) -> int:
    """Twice x."""
    return 2 * x


TABLE = {"doubled": doubled}


def plainly(function: Callable[[int], int]) -> Callable[[int], int]:
    """A decorator."""

    @functools.wraps(function)
    def call(x: int) -> int:
        return function(x)

    return call


@plainly
def cached(x: int) -> int:
    """One more than x."""
    return x + 1


class Parent:
    """Has a method that the child calls."""

    def name(self) -> str:
        """Return the name."""
        return "parent"


class Child(Parent):
    """Calls super(), so that its method has a free variable."""

    def name(self) -> str:
        """Return the name, with the parent's."""
        return f"child of {super().name()}"

    @staticmethod
    def made() -> str:
        """Behind a static method."""
        return "made"
