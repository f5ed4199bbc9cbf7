"""Waiting on Ray with an owner and a deadline.

``wait_for`` is the only way this package blocks on remote work.  It names what it waits for, logs while it waits, and
raises at the first failure among its calls, because the others may hang in a collective with the dead one.  It also
raises if any *watched* actor of the job dies, if a call registered with ``watch_start`` fails, or if one of Ray's own
processes ends, even if the current wait does not depend on them.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slime.ray.cluster import RAY_SERVERS
from slime.utils.errors import DeadlineError, EngineDiedError

logger = logging.getLogger(__name__)

SIGTERM_POLL_S = 1.0
"""Seconds between checks for SIGTERM to this process."""
WATCH_GROUP = "watch"
"""Concurrency group in which an actor runs :meth:`stay_alive` while it works."""

# Module state, because a process drives one job.  A sentinel does not complete while its actor lives.
_sentinels: dict[ray.ObjectRef, str] = {}
_names: dict[str, str] = {}
"""Actor id -> name, for calls that fail before their actor's sentinel does."""
_starting: dict[ray.ObjectRef, str] = {}
"""Calls that nobody waits for yet -> what they start."""


class Interrupted(BaseException):
    """SIGTERM has asked the job to exit; ``__cause__``, if set, has details."""


class Sigterm:
    """The driver's reaction to SIGTERM (``ray job stop``) to itself or a process of its job: exit at once.

    The handler only sets a flag: an exception raised from it inside a Ray call would become a SystemError.
    """

    def __init__(self) -> None:
        self.has_come = False

    def listen(self) -> None:
        """Install this handler for SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def check(self) -> None:
        """Raise Interrupted if the job must exit; every wait checks at least once a second."""
        if self.has_come:
            raise Interrupted

    def reached(self, name: str) -> None:
        """React to a SIGTERM that a watched actor received."""
        signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True


_reactions = [Sigterm()]


def sigterm() -> Sigterm:
    """Return the reaction of this driver."""
    return _reactions[-1]


def react_by(reaction: Sigterm) -> None:
    """Replace this driver's reaction to SIGTERM."""
    _reactions[:] = [reaction]


class Watched:
    """Mixin for actors whose death must end the job: gives the driver a call to wait on."""

    _is_told_to_leave = False

    def heed_sigterm(self) -> None:
        """Make SIGTERM to this process notify the driver instead of ending the process; call in the constructor."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._is_told_to_leave = True

        signal.signal(signal.SIGTERM, on_signal)

    @ray.method(concurrency_group=WATCH_GROUP)
    def stay_alive(self) -> None:
        """Block while the actor lives, or until it receives SIGTERM (:meth:`heed_sigterm`).

        The object reference fails when the actor dies.
        """
        while not self._is_told_to_leave:
            time.sleep(SIGTERM_POLL_S)


def watch(actor: Any, name: str) -> None:
    """Once ``actor`` has died, end every later wait in this process with an error that names it ``name``."""
    _sentinels[actor.stay_alive.remote()] = name
    name_actor(actor, name)


def name_actor(actor: Any, name: str) -> None:
    """Set the name of ``actor`` in errors of waits for it."""
    _names[actor._actor_id.hex()] = name


def watch_start(ref: ray.ObjectRef, what: str) -> None:
    """If the call ``ref``, which starts ``what``, fails, end every later wait in this process with its error."""
    _starting[ref] = what


def forget_all() -> None:
    """Stop watching all actors, because the job is being shut down on purpose."""
    for known in (_sentinels, _names, _starting):
        known.clear()


def forget(name: str) -> None:
    """Stop watching the actors named ``name`` and the calls that start things on them."""
    for ref in [ref for ref, watched in _sentinels.items() if watched == name]:
        del _sentinels[ref]
    for ref in [ref for ref in _starting if _actor_name(ref) == name]:
        del _starting[ref]
    for actor_id in [actor_id for actor_id, watched in _names.items() if watched == name]:
        del _names[actor_id]


@contextmanager
def unwatched(names: Collection[str]) -> Iterator[None]:
    """Suspend watching the actors in ``names`` during the block; a death in it ends the first wait after it."""
    kept = {ref: name for ref, name in _sentinels.items() if name in names}
    for ref in kept:
        del _sentinels[ref]
    try:
        yield
    finally:
        _sentinels.update(kept)


def find_death(names: Collection[str], *, timeout_s: float) -> EngineDiedError | None:
    """Return the death of one of the watched actors in ``names``, waiting up to ``timeout_s`` for Ray to notice it.

    Raises:
        ProcessError: one of Ray's own processes has ended, so more than an actor is lost.
    """
    RAY_SERVERS.check()
    sentinels = [ref for ref, name in _sentinels.items() if name in names]
    dead, _ = ray.wait(sentinels, timeout=timeout_s) if sentinels else ([], [])
    return next((death for ref in dead if (death := _death(ref))), None)


def wait_for(
    refs: ray.ObjectRef | Sequence[ray.ObjectRef],
    *,
    what: str,
    timeout_s: float,
    report_every_s: float = 30.0,
    meanwhile: Callable[[], None] | None = None,
    meanwhile_every_s: float = 5.0,
) -> Any:
    """Return the results of ``refs``, in order (a single reference gives a single result).

    Args:
        refs: references to wait for.
        what: the work, as a phrase that completes "waiting for ...".
        timeout_s: deadline in seconds from now.
        report_every_s: seconds between log lines while waiting.
        meanwhile: called every ``meanwhile_every_s`` seconds while waiting; an exception it raises ends the wait.

    Raises:
        DeadlineError: the deadline passed.
        EngineDiedError: an actor died.
        ProcessError: one of Ray's own processes ended or hangs.
        Exception: the error of the first remote call that fails, including calls passed to :func:`watch_start`.
        Interrupted: the driver's reaction to SIGTERM asks the job to exit.
    """
    single = isinstance(refs, ray.ObjectRef)
    ordered = [refs] if single else list(refs)
    pending = list(dict.fromkeys(ordered))
    results: dict[ray.ObjectRef, Any] = {}
    start = time.monotonic()
    next_report = start + report_every_s
    next_act = start + meanwhile_every_s if meanwhile is not None else float("inf")
    while pending:
        sigterm().check()
        RAY_SERVERS.check()
        now = time.monotonic()
        if now - start >= timeout_s:
            raise DeadlineError(
                f"waited {timeout_s:.0f} s for {what}: {len(pending)} of {len(ordered)} calls have not returned"
                f"{_unanswered(pending)}. "
                "Raise the matching --*-timeout-s flag if the work is truly that long; "
                "otherwise look at the log of the actor that hangs."
            )
        slice_s = max(0.01, min(next_report, next_act, start + timeout_s, now + SIGTERM_POLL_S) - now)
        beside = [*_sentinels, *_starting]
        ready, _ = ray.wait(pending + beside, num_returns=1, timeout=slice_s)
        sigterm().check()  # the same signal may have killed other processes of the job
        for ref in ready:
            if ref in _sentinels:
                if death := _death(ref):
                    RAY_SERVERS.check()  # the actor may have died because a Ray process ended
                    raise death
                continue
            if ref in _starting:
                _get(ref, _starting.pop(ref))
                continue
            results[ref] = _get(ref, what)
            pending.remove(ref)
        if meanwhile is not None and pending and time.monotonic() >= next_act:
            meanwhile()
            next_act = time.monotonic() + meanwhile_every_s
        if time.monotonic() >= next_report:
            logger.info("Still waiting for %s: %.0f s so far", what, time.monotonic() - start)
            next_report += report_every_s
    values = [results[ref] for ref in ordered]
    return values[0] if single else values


def _unanswered(refs: Sequence[ray.ObjectRef]) -> str:
    """Return the names of the called actors as a parenthesis; empty if none has a name."""
    names = dict.fromkeys(name for ref in refs if (name := _actor_name(ref)))
    return f" ({', '.join(names)})" if names else ""


def _actor_name(ref: ray.ObjectRef) -> str | None:
    """Return the name of the called actor, or None."""
    return _names.get(ref.task_id().actor_id().hex())


def _get(ref: ray.ObjectRef, what: str) -> Any:
    """Return the value of a finished reference; Ray's own errors are translated."""
    try:
        return ray.get(ref, timeout=60)
    except GetTimeoutError as error:
        raise DeadlineError(f"the result of {what} is ready but could not be fetched within 60 s: {error}") from error
    except RayTaskError as error:
        # Raise the error as it was raised remotely; its cause carries the remote traceback.
        raised = error.cause if isinstance(error.cause, Exception) else error
        if name := _actor_name(ref):
            raised.add_note(f"Raised by {name} while the job waited for {what}.")
        raise raised from error
    except RayActorError as error:
        name = _names.get(str(error.actor_id))
        dead = f"{name} died" if name else "an actor died"
        raise EngineDiedError(f"{dead} during {what}: {error}") from error


def _death(ref: ray.ObjectRef) -> EngineDiedError | None:
    """Return the death of a completed sentinel's actor; None if the actor lives and received SIGTERM."""
    name = _sentinels[ref]
    try:
        ray.get(ref, timeout=10)
    except RayError as error:
        return EngineDiedError(f"{name} died: {error}")
    logger.warning("SIGTERM to %s", name)
    forget(name)
    sigterm().reached(name)
    return None
