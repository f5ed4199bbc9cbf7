"""A thread per server group that finds engines which are of no use any more.

With ``--use-fault-tolerance`` there are three ways to be of no use (``RolloutHealthMonitor``), each seen in its way:

* the process has ended: seen within ``EXIT_POLL_S``, whatever the check interval;
* it hangs: ``/health_generate`` gives nothing within ``--rollout-health-check-timeout``.  SGLang counts any token of
  any request as a sign of life, so that a full queue is not a hang;
* it answers nonsense: a request for one token is answered with something else.

So an engine that is of no use is found within interval + timeout.  It is taken out of service and replaced (see
``server_group``); the router sends its requests elsewhere, or clients repeat them until there is an engine again.
Monitoring pauses while engines take weights or have given their memory away: then they answer nothing, rightly.

Without it (``StallMonitor``) nothing is replaced, and the only question is whether an engine hangs: then the run ends.
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from typing import Any

from ray.exceptions import RayError

from slime.ray.server_group import EngineState, ServerGroup
from slime.ray.waiting import wait_for
from slime.utils.errors import ProcessError

logger = logging.getLogger(__name__)

EXIT_POLL_S = 2.0
ACTOR_MARGIN_S = 10.0
"""What an engine's actor gets on top of the check's own deadline, to report that it has passed."""


class RolloutHealthMonitor:
    """Watches the engines of one group; starts paused."""

    def __init__(self, args: Namespace, group: ServerGroup) -> None:
        self._group = group
        self._interval_s = args.rollout_health_check_interval
        self._timeout_s = args.rollout_health_check_timeout
        self._first_wait_s = args.rollout_health_check_first_wait
        self._running = threading.Event()
        self._stopped = threading.Event()
        self._next_check_s = 0.0
        self._num_pauses = 0
        self._thread = threading.Thread(target=self._loop, name="health-monitor", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Check again; the first full check comes after the grace period."""
        if not self._running.is_set():
            self._next_check_s = time.monotonic() + self._first_wait_s
        self._running.set()

    def pause(self) -> None:
        """Check no more until :meth:`resume`; the verdict of a check that is under way does not count."""
        self._num_pauses += 1
        self._running.clear()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._running.set()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._running.wait()  # no deadline: a paused monitor waits for resume() or stop(), which both set it
            try:
                self._look()
            except Exception:  # the edge of the thread: a monitor that ends in silence protects nobody
                logger.exception("a health check failed by itself; the next one is in %.0f s", self._interval_s)
            self._stopped.wait(min(EXIT_POLL_S, self._interval_s))

    def _look(self) -> None:
        pauses = self._num_pauses
        for index, sentence in self._group.find_exited(timeout_s=EXIT_POLL_S).items():
            self._replace(index, sentence, pauses)
        if time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + self._interval_s
            self._check_all()

    def _check_all(self) -> None:
        """Ask every serving engine at once, so that a slow one does not delay the verdict on the others.

        A new engine that waits for its weights, or takes them, answers nothing, rightly: the push has deadlines of its
        own, and its death is noticed without asking.
        """
        pauses = self._num_pauses
        asked = {
            index: self._ask(self._group.engines[index])
            for index in self._group.indices(EngineState.SERVING)
            if self._group.engines[index] is not None
        }
        deadline_s = time.monotonic() + self._timeout_s + ACTOR_MARGIN_S
        for index, ref in asked.items():
            self._judge(index, self._problem(index, ref, deadline_s), pauses)

    def _ask(self, engine: Any) -> Any:
        """The reference of a check, which fails when the engine is of no use."""
        return engine.check_health.remote(timeout_s=self._timeout_s)

    def _judge(self, index: int, problem: str | None, pauses: int) -> None:
        if problem:
            self._replace(index, problem, pauses)

    def _problem(self, index: int, ref: Any, deadline_s: float) -> str | None:
        try:
            wait_for(
                ref,
                what=f"the health of {self._group.name_of(index)}",
                timeout_s=max(0.1, deadline_s - time.monotonic()),
            )
        except (ProcessError, RayError) as error:
            return f"{error}"
        return None

    def _replace(self, index: int, reason: str, pauses: int) -> None:
        """Act on a verdict, unless there was a pause since it was asked for: a paused engine need not answer."""
        if self._is_valid(pauses):
            self._group.replace(index, reason)

    def _is_valid(self, pauses: int) -> bool:
        return pauses == self._num_pauses and self._running.is_set() and not self._stopped.is_set()


class StallMonitor(RolloutHealthMonitor):
    """Gives a group up when an engine of it shows no sign of life for ``--rollout-stall-timeout-s``.

    An engine that has ended is found by whoever waits for the rollout, at once.
    """

    def __init__(self, args: Namespace, group: ServerGroup) -> None:
        self._stall_timeout_s: float = args.rollout_stall_timeout_s
        self._alive_s: dict[int, float] = {}
        super().__init__(args, group)
        self._interval_s = min(self._interval_s, self._stall_timeout_s)
        self._timeout_s = min(self._timeout_s, self._stall_timeout_s)
        self._first_wait_s = self._interval_s

    def resume(self) -> None:
        """Check again; what was before does not count."""
        self._alive_s.clear()
        super().resume()

    def _look(self) -> None:
        if time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + self._interval_s
            self._check_all()

    def _ask(self, engine: Any) -> Any:
        return engine.health_generate.remote(self._timeout_s)

    def _judge(self, index: int, problem: str | None, pauses: int) -> None:
        now_s = time.monotonic()
        silent_s = now_s - self._alive_s.setdefault(index, now_s - self._timeout_s)
        if not problem or not self._is_valid(pauses):
            self._alive_s[index] = now_s
        elif silent_s < self._stall_timeout_s:
            logger.warning("%s shows no sign of life: %s", self._group.name_of(index), problem)
        else:
            self._group.given_up = (
                f"{self._group.name_of(index)} has shown no sign of life for {silent_s:.0f} s "
                f"(--rollout-stall-timeout-s {self._stall_timeout_s:g}): {problem}"
            )
