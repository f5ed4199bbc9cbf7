"""The data source as the rollout function sees it: every group that passes is written down, or brought up to date."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from slime.rollout.ledger.ledger import Ledger
from slime.utils.types import Sample

_OWN = frozenset({"_source", "_ledger", "_take", "_ahead"})


class LedgeredSource:
    """Stands in front of a data source; everything but ``get_samples`` and ``add_samples`` is the source's own.

    It also passes ``isinstance`` checks for the source's class, since rollout functions of users may ask.
    """

    def __init__(
        self, source: Any, ledger: Ledger, take: Callable[[list[Any]], list[Any] | None] = lambda group: None
    ) -> None:
        """Wrap ``source``.

        Args:
            take: gives the recovered state of a group; None when nothing more is known of it.
        """
        self._source = source
        self._ledger = ledger
        self._take = take
        self._ahead: deque[list[Any]] = deque()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_source"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._source, name, value)

    def __len__(self) -> int:
        return len(self._source)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The source's next groups, as far as an earlier process had brought them."""
        groups = self.take_unrecorded(num_samples)
        recovered = [self._take(group) for group in groups]
        groups = [known or group for known, group in zip(recovered, groups, strict=True)]
        self._ledger.issued(num_samples, groups, [known is not None for known in recovered])
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back to the source."""
        self._source.add_samples(samples)
        self._ledger.returned(samples)

    # For recovery

    def take_unrecorded(self, num_samples: int) -> list[list[Any]]:
        """Groups as the source gives them, and no note of it."""
        ahead = [self._ahead.popleft() for _ in range(min(num_samples, len(self._ahead)))]
        return ahead + self._source.get_samples(num_samples - len(ahead)) if len(ahead) < num_samples else ahead

    def add_unrecorded(self, groups: list[list[Any]]) -> None:
        """Give groups back, and no note of it."""
        self._source.add_samples(groups)

    def put_ahead(self, groups: list[list[Any]]) -> None:
        """Groups that the source gave and that come again before its next ones."""
        self._ahead.extend(groups)

    @property
    def ahead(self) -> list[list[Any]]:
        """Those of them that nobody has asked for yet."""
        return list(self._ahead)
