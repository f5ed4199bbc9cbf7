"""Health monitors: one thread per engine group finds failed engines and reports them to the group (``lifecycle``).

With ``--use-fault-tolerance``, an engine can fail in three ways, each detected differently:

* its process ended: detected within ``EXIT_POLL_S``, whatever the check interval;
* it hangs: ``/health_generate`` does not answer within ``--rollout-health-check-timeout``.  SGLang counts any token of
  any request as a sign of life, so a full queue is not a hang;
* it answers wrongly: a request for one token returns something else.

So a failed engine is found within interval + timeout.  Monitoring pauses while engines take weights or have released
their memory, because then they need not answer.

Without fault tolerance, nothing is restarted.  Ended engines are found by the wait for the rollout
(``EngineFleet.check``), so the monitor only looks for hangs: an engine without a sign of life for
``--rollout-stall-timeout-s`` ends the run.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from ray.exceptions import RayError

from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import SERVES, EngineEvent
from slime.ray.waiting import wait_for
from slime.utils.errors import ProcessError

logger = logging.getLogger(__name__)

EXIT_POLL_S = 2.0
ACTOR_MARGIN_S = 10.0
"""Extra seconds for an engine's actor to report that a check's deadline passed."""


class HealthMonitor:
    """Watches the engines of one group; starts paused."""

    def __init__(self, group: EngineGroup, *, interval_s: float, timeout_s: float, first_wait_s: float) -> None:
        self._group = group
        self._interval_s, self._timeout_s, self._first_wait_s = interval_s, timeout_s, first_wait_s
        self._running = threading.Event()
        self._stopped = threading.Event()
        self._next_check_s = 0.0
        self._num_pauses = 0
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="health-monitor", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Resume checking; after a pause, the first probe comes after ``first_wait_s`` seconds."""
        if not self._running.is_set():
            self._next_check_s = time.monotonic() + self._first_wait_s
        self._running.set()

    def pause(self) -> None:
        """Stop checking until :meth:`resume` and discard the result of a check in progress.

        No probe is sent after this returns, so later calls reach an engine after all probes.
        """
        with self._sending:
            self._num_pauses += 1
            self._running.clear()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._running.set()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._running.wait()  # no deadline: a paused monitor waits for resume() or stop(), which both set it
            try:
                self._check()
            except Exception:  # thread boundary: a monitor must not die silently
                logger.exception("A health check raised an error; the next check is in %.0f s", self._interval_s)
            self._stopped.wait(min(EXIT_POLL_S, self._interval_s))

    def _check(self) -> None:
        pauses = self._num_pauses
        for index, sentence in self._find_exited().items():
            self._report(index, EngineEvent.DIED, sentence, pauses)
        if time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + self._interval_s
            self._probe_all(pauses)

    def _find_exited(self) -> dict[int, str]:
        return self._group.find_exited(timeout_s=EXIT_POLL_S)

    def _probe_all(self, pauses: int) -> None:
        """Probe all serving engines in parallel, so that a slow one does not delay the verdict on the others.

        Engines that take or await weights are skipped: they need not answer, the push has its own deadlines, and
        deaths are detected without a probe.  Engines that are being registered are skipped too, because they answer
        only afterwards, however slow the router is.  A probe that arrives after a request to release memory would
        kill the engine.
        """
        with self._sending:
            asked = {
                index: self._probe(engine)
                for index in self._group.indices(*SERVES)
                if (engine := self._group.engines[index]) is not None
                and self._group.is_listed[index]
                and self._is_valid(pauses)
            }
        deadline_s = time.monotonic() + self._timeout_s + ACTOR_MARGIN_S
        for index, ref in asked.items():
            try:
                what = f"the health of {self._group.name_of(index)}"
                wait_for(ref, what=what, timeout_s=max(0.1, deadline_s - time.monotonic()))
            except (ProcessError, RayError) as error:
                self._judge(index, str(error), pauses)
            else:
                self._judge(index, None, pauses)

    def _probe(self, engine: Any) -> Any:
        """Start a check; the returned reference fails if the engine has failed."""
        return engine.check_health.remote(timeout_s=self._timeout_s)

    def _judge(self, index: int, problem: str | None, pauses: int) -> None:
        """Report a probe's outcome.  A failed probe had its full timeout."""
        event = EngineEvent.HEALTHY if problem is None else EngineEvent.FAILED
        self._report(index, event, problem or "", pauses)

    def _report(self, index: int, event: EngineEvent, reason: str, pauses: int) -> None:
        """Report a verdict unless monitoring paused since the check began: during a pause engines need not answer."""
        if self._is_valid(pauses):
            self._group.report(index, event, reason)

    def _is_valid(self, pauses: int) -> bool:
        return pauses == self._num_pauses and self._running.is_set() and not self._stopped.is_set()


class StallMonitor(HealthMonitor):
    """Reports an engine as failed once it has shown no sign of life for ``--rollout-stall-timeout-s``."""

    def __init__(self, group: EngineGroup, *, interval_s: float, timeout_s: float, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._alive_s: dict[int, float] = {}
        interval_s, timeout_s = min(interval_s, stall_timeout_s), min(timeout_s, stall_timeout_s)
        super().__init__(group, interval_s=interval_s, timeout_s=timeout_s, first_wait_s=interval_s)

    def resume(self) -> None:
        """Resume checking; silence before the pause does not count."""
        self._alive_s.clear()
        super().resume()

    def _find_exited(self) -> dict[int, str]:
        return {}

    def _probe(self, engine: Any) -> Any:
        return engine.health_generate.remote(self._timeout_s)

    def _judge(self, index: int, problem: str | None, pauses: int) -> None:
        now_s = time.monotonic()
        silent_s = now_s - self._alive_s.setdefault(index, now_s - self._timeout_s)
        if problem is None or not self._is_valid(pauses):
            self._alive_s[index] = now_s
            self._report(index, EngineEvent.HEALTHY, "", pauses)
        elif silent_s < self._stall_timeout_s:
            self._report(index, EngineEvent.FAILED_PROBE, f"it shows no sign of life: {problem}", pauses)
        else:
            reason = (
                f"it has shown no sign of life for {silent_s:.0f} s "
                f"(--rollout-stall-timeout-s {self._stall_timeout_s:g}): {problem}"
            )
            self._report(index, EngineEvent.FAILED, reason, pauses)
