"""Whether the backend lives, for everybody who asks it for something."""

from __future__ import annotations

import logging
from collections.abc import Callable

from slime.ext.training_api.backend import BackendDied
from slime.ext.training_api.errors import Refused
from slime.ext.training_api.futures import Promises

logger = logging.getLogger(__name__)


class BackendLife:
    """The one place that knows of the backend's end.

    Args:
        promises: answered with the error when the backend has ended.
        on_death: called then; ``dead`` says why.
    """

    def __init__(self, promises: Promises, on_death: Callable[[], None] | None) -> None:
        self.dead: Exception | None = None
        """Why the backend has ended."""
        self._promises, self._on_death = promises, on_death

    def check(self) -> None:
        """Refuse a request to a backend that has ended.

        Raises:
            Refused: it has.
        """
        if self.dead is not None:
            raise Refused(f"Trainer or engines have ended, and so will the server: {self.dead}", 410)

    def note(self, error: BaseException) -> None:
        """Take notice of what the backend raised."""
        if isinstance(error, BackendDied) and self.dead is None:
            logger.error("The backend has ended: %s", error)
            self.dead = error
            self._promises.fail_all(error)
            if self._on_death is not None:
                self._on_death()
