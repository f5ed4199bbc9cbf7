"""Who of several processes, all of which have every tensor, deals with which."""

from __future__ import annotations


class Shares:
    """Gives each tensor to the process with the fewest bytes so far.

    Every process sees the same tensors in the same order, so all come to the same result without a word.

    Args:
        num_members: processes.
        member: this one.
    """

    def __init__(self, num_members: int, member: int) -> None:
        self._member = member
        self._loads = [0] * num_members
        self._owners: dict[str, int] = {}

    def is_own(self, name: str, num_bytes: int) -> bool:
        """Whether this process deals with the tensor; the answer never changes."""
        if name not in self._owners:
            owner = self._loads.index(min(self._loads))
            self._owners[name] = owner
            self._loads[owner] += num_bytes
        return self._owners[name] == self._member
