"""The position of a checkpoint in the data, whatever has been generated ahead of it."""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from slime.rollout.observer import GroupObserver

logger = logging.getLogger(__name__)


class CheckpointPosition:
    """Positions of data source and observers, always of one moment: before a rollout began.

    ``train_async.py`` saves rollout k while k+1 is under way; its prompts must not count as consumed.

    Invariant: ``_before[k]`` is what all of them said just before rollout k began.  A rollout begins before a save or
    after it, never while one is written.
    """

    def __init__(self, source: Any, observers: Sequence[GroupObserver] = ()) -> None:
        self._source = source
        self._observers = observers
        self._before: dict[int, tuple[bytes | None, list[Any]]] = {}
        self._lock = threading.Lock()

    def begin(self, rollout_id: int) -> None:
        """Keep the positions from before rollout ``rollout_id`` takes groups from the data source."""
        with self._lock:
            state = self._frozen_state()
            self._before[rollout_id] = state, [observer.position(rollout_id) for observer in self._observers]
            for old in [known for known in self._before if known < rollout_id - 1]:
                del self._before[old]

    def _frozen_state(self) -> bytes | None:
        """Freeze the state by pickling: it shares its samples with the rollout, which continues to change them."""
        state_of = getattr(self._source, "state_dict", None)
        return None if state_of is None else pickle.dumps(state_of())

    def save(self, rollout_id: int) -> None:
        """Write the positions after ``rollout_id``.

        A user's data source that has no ``state_dict``, or whose ``save`` takes no ``state``, is saved as it is now.
        """
        with self._lock:
            is_ahead = rollout_id + 1 in self._before
            state, positions = self._before.get(rollout_id + 1, (None, [None] * len(self._observers)))
            if state is not None and "state" in inspect.signature(self._source.save).parameters:
                self._source.save(rollout_id, state=pickle.loads(state))
            else:
                if is_ahead:
                    logger.warning(
                        "%s is saved after rollout %d while the next one takes groups from it: after a crash those "
                        "may be missing. Give its save() a parameter `state`, a state_dict() to write.",
                        type(self._source).__name__,
                        rollout_id,
                    )
                self._source.save(rollout_id)
            for observer, position in zip(self._observers, positions, strict=True):
                observer.save(rollout_id, position)
