"""Waiting on Ray with an owner and a deadline.

``wait_for`` is the only way this package blocks on remote work: it names what it waits for, logs that it still waits,
fails at the first failure among the calls (the others may hang in a collective with the dead one), and fails as well
when any *watched* actor of the job dies, or what starts beside it fails, even if the present wait does not concern it,
and when Ray's own processes do.
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
"""Until SIGTERM to this process is looked for."""
WATCH_GROUP = "watch"
"""Concurrency group in which an actor runs :meth:`stay_alive`, beside its real work."""

# One job, one driver: the sentinels of its actors.  A sentinel never completes while its actor lives.
_sentinels: dict[ray.ObjectRef, str] = {}
_names: dict[str, str] = {}
"""Name of each watched actor by its id, for a call that fails before the sentinel of its actor does."""
_starting: dict[ray.ObjectRef, str] = {}
"""Calls that nobody waits for yet, and what they start."""


class Interrupted(BaseException):
    """SIGTERM has told the job to leave; its cause, if it has one, says more."""


class Sigterm:
    """The driver's reaction to SIGTERM (``ray job stop``), its own or of a process of its job: it leaves at once.

    The handler only takes note: an exception out of it, in the middle of a call of Ray, becomes a SystemError.
    """

    def __init__(self) -> None:
        self.has_come = False

    def listen(self) -> None:
        """Take the place of the present handler."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def check(self) -> None:
        """Raise Interrupted when the job must leave; every wait asks at least once a second."""
        if self.has_come:
            raise Interrupted

    def reached(self, name: str) -> None:
        """React to the SIGTERM that a watched actor got."""
        signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True


_reactions = [Sigterm()]


def sigterm() -> Sigterm:
    """Return the reaction of this driver."""
    return _reactions[-1]


def react_by(reaction: Sigterm) -> None:
    """Have this driver react to SIGTERM in another way from now on."""
    _reactions[:] = [reaction]


class Watched:
    """Mixin of an actor whose death must end the job: it gives the driver something to wait on."""

    _is_told_to_leave = False

    def heed_sigterm(self) -> None:
        """Have SIGTERM to this process tell the driver, instead of ending it; to be called by the constructor."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._is_told_to_leave = True

        signal.signal(signal.SIGTERM, on_signal)

    @ray.method(concurrency_group=WATCH_GROUP)
    def stay_alive(self) -> None:
        """Block for as long as the actor lives, or until SIGTERM tells it to leave (:meth:`heed_sigterm`).

        The object reference fails when the actor dies.
        """
        while not self._is_told_to_leave:
            time.sleep(SIGTERM_POLL_S)


def watch(actor: Any, name: str) -> None:
    """End every later wait of this process with an error that names ``actor`` once it has died."""
    _sentinels[actor.stay_alive.remote()] = name
    name_actor(actor, name)


def name_actor(actor: Any, name: str) -> None:
    """Call ``actor`` so in errors of waits for it."""
    _names[actor._actor_id.hex()] = name


def watch_start(ref: ray.ObjectRef, what: str) -> None:
    """End every later wait of this process with the error of a call that starts ``what``, should it fail."""
    _starting[ref] = what


def forget_all() -> None:
    """Stop watching: the job is being taken down on purpose."""
    for known in (_sentinels, _names, _starting):
        known.clear()


def forget(name: str) -> None:
    """Stop watching the actors registered under ``name``, and what they start: others come in their place, or none."""
    for ref in [ref for ref, watched in _sentinels.items() if watched == name]:
        del _sentinels[ref]
    for ref in [ref for ref in _starting if _actor_name(ref) == name]:
        del _starting[ref]
    for actor_id in [actor_id for actor_id, watched in _names.items() if watched == name]:
        del _names[actor_id]


@contextmanager
def unwatched(names: Collection[str]) -> Iterator[None]:
    """Watch the actors under ``names`` only after the block: a death within it ends the next wait behind it."""
    kept = {ref: name for ref, name in _sentinels.items() if name in names}
    for ref in kept:
        del _sentinels[ref]
    try:
        yield
    finally:
        _sentinels.update(kept)


def find_death(names: Collection[str], *, timeout_s: float) -> EngineDiedError | None:
    """Return the death of one of the actors watched under ``names``, of which Ray may learn within ``timeout_s``.

    Raises:
        ProcessError: Ray's own processes have ended, and with them more than an actor.
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
        report_every_s: how often to log that the wait lasts, in seconds.
        meanwhile: called every ``meanwhile_every_s`` seconds while the wait lasts; what it raises ends the wait.

    Raises:
        DeadlineError: the deadline passed.
        EngineDiedError: an actor died.
        ProcessError: one of Ray's own processes ended or hangs, or what starts beside this failed.
        Exception: the remote call's own error, as soon as the first of the calls fails.
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
        sigterm().check()  # of the same signal other processes of the job may have died
        for ref in ready:
            if ref in _sentinels:
                if death := _death(ref):
                    RAY_SERVERS.check()  # its end may be what actors died of
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
            logger.info("still waiting for %s: %.0f s so far", what, time.monotonic() - start)
            next_report += report_every_s
    values = [results[ref] for ref in ordered]
    return values[0] if single else values


def _unanswered(refs: Sequence[ray.ObjectRef]) -> str:
    """Return the actors of calls, as the end of a sentence; empty where none has a name."""
    names = dict.fromkeys(name for ref in refs if (name := _actor_name(ref)))
    return f" ({', '.join(names)})" if names else ""


def _actor_name(ref: ray.ObjectRef) -> str | None:
    """Return the name of the actor of a call; None where it has none."""
    return _names.get(ref.task_id().actor_id().hex())


def _get(ref: ray.ObjectRef, what: str) -> Any:
    """Return the value of a finished reference; Ray's own errors are translated."""
    try:
        return ray.get(ref, timeout=60)
    except GetTimeoutError as error:
        raise DeadlineError(f"the result of {what} is ready but could not be fetched within 60 s: {error}") from error
    except RayTaskError as error:
        # The caller gets the error as it was raised over there; the remote traceback stays with it as its cause.
        raised = error.cause if isinstance(error.cause, Exception) else error
        if name := _actor_name(ref):
            raised.add_note(f"It was raised by {name}, when the job waited for {what}.")
        raise raised from error
    except RayActorError as error:
        name = _names.get(str(error.actor_id))
        dead = f"{name} died" if name else "an actor died"
        raise EngineDiedError(f"{dead} during {what}: {error}") from error


def _death(ref: ray.ObjectRef) -> EngineDiedError | None:
    """Return how the actor of a sentinel died; None when it lives and got SIGTERM."""
    name = _sentinels[ref]
    try:
        ray.get(ref, timeout=10)
    except RayError as error:
        return EngineDiedError(f"{name} died: {error}")
    logger.warning("SIGTERM to %s", name)
    forget(name)
    sigterm().reached(name)
    return None
