"""What a checkpoint says of the rollout side: where the data source stands, and where the ledger does."""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
from typing import Any

from slime.rollout.ledger.ledger import NoLedger

logger = logging.getLogger(__name__)


class CheckpointPosition:
    """Both positions, always of one moment: before a rollout began.

    ``train_async.py`` saves rollout k while k+1 is under way; its prompts must not count as consumed.

    Invariant: ``_before[k]`` is what both said just before rollout k began.  A rollout begins before a save or after
    it, never while one is written.
    """

    def __init__(self, ledger: NoLedger) -> None:
        self._ledger = ledger
        self._source = ledger.data_source
        self._before: dict[int, tuple[bytes | None, Any]] = {}
        self._lock = threading.Lock()

    def begin(self, rollout_id: int) -> None:
        """Rollout ``rollout_id`` is about to take groups from the data source."""
        with self._lock:
            self._before[rollout_id] = self._frozen_state(), self._ledger.position(rollout_id)
            for old in [known for known in self._before if known < rollout_id - 1]:
                del self._before[old]

    def _frozen_state(self) -> bytes | None:
        """Frozen by pickling: the state shares its samples with the rollout, which goes on changing them."""
        state_of = getattr(self._source, "state_dict", None)
        return None if state_of is None else pickle.dumps(state_of())

    def save(self, rollout_id: int) -> None:
        """Write where things stand after ``rollout_id``, whatever has been generated ahead of it since.

        A data source of the user's that cannot be asked for its state, or whose ``save`` takes none, is saved as it is
        now.
        """
        with self._lock:
            state, position = self._before.get(rollout_id + 1, (None, None))
            if state is not None and "state" in inspect.signature(self._source.save).parameters:
                self._source.save(rollout_id, state=pickle.loads(state))
            else:
                if position is not None:
                    logger.warning(
                        "%s is saved after rollout %d while the next one takes groups from it: after a crash those "
                        "may be missing. Give its save() a parameter `state`, a state_dict() to write.",
                        type(self._source).__name__,
                        rollout_id,
                    )
                self._source.save(rollout_id)
            self._ledger.save(rollout_id, position)
