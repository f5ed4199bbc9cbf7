"""A thread per server group that finds engines which no longer answer (``--use-fault-tolerance``).

A dead engine is killed and its slot freed; the router sends its requests elsewhere, and the next weight update starts
a new engine in its place.  Monitoring pauses while engines are busy with weights or have given their memory away.
"""

from __future__ import annotations

import logging
import threading
from argparse import Namespace
from typing import TYPE_CHECKING

from slime.ray.waiting import wait_for

if TYPE_CHECKING:
    from slime.ray.rollout_servers import ServerGroup

logger = logging.getLogger(__name__)


class RolloutHealthMonitor:
    """Watches the engines of one group; starts paused."""

    def __init__(self, args: Namespace, group: ServerGroup) -> None:
        self._group = group
        self._interval_s = args.rollout_health_check_interval
        self._timeout_s = args.rollout_health_check_timeout
        self._first_wait_s = args.rollout_health_check_first_wait
        self._running = threading.Event()
        self._stopped = threading.Event()
        self._needs_first_wait = True
        self._thread = threading.Thread(target=self._loop, name="health-monitor", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Check again, after the grace period."""
        self._needs_first_wait = True
        self._running.set()

    def pause(self) -> None:
        """Check no more until :meth:`resume`."""
        self._running.clear()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._running.set()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._running.wait()  # no deadline: a paused monitor waits for resume() or stop(), which both set it
            if self._needs_first_wait:
                self._needs_first_wait = False
                self._stopped.wait(self._first_wait_s)
            for index, engine in enumerate(self._group.engines):
                if engine is not None and self._running.is_set() and not self._stopped.is_set():
                    self._check(index, engine)
            self._stopped.wait(self._interval_s)

    def _check(self, index: int, engine: object) -> None:
        try:
            wait_for(
                engine.health_generate.remote(timeout=self._timeout_s),  # type: ignore[attr-defined]
                what=f"the health of engine {index}",
                timeout_s=self._timeout_s + 5,
            )
        except Exception:  # whatever keeps an engine from answering, the cure is the same
            if self._running.is_set():
                logger.exception("engine %d is unhealthy: it is stopped and will be started again", index)
                self._group.mark_dead(index)
