"""The failure policy of graders, and the threads for slow graders.

A grader that hangs (``--rm-timeout-s``), raises, or returns an unusable reward affects only its response, not the run.
The error is logged and stored in ``sample.metadata["reward_error"]``.  ``--rm-failure-policy`` decides what follows:

    failed   the sample gets status FAILED and is not trained (``remove_sample``); its reward of 0 is a placeholder
             that reward statistics ignore (``Sample.is_graded``)
    zero     the sample gets reward 0 and is trained
    raise    the run ends

After ``--rm-max-failures`` consecutive failures, or a rollout of failures alone, the run ends with the first error,
whatever the policy.
Mistakes in the flags always end the run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

from slime.flags.reward import RewardConfig
from slime.rollout.base_types import plain_reward
from slime.train_data.convert import is_finite
from slime.utils.errors import ConfigError, GraderError, HookError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_MISTAKES = (ConfigError, HookError, NotImplementedError, ImportError)
"""Errors that would occur for every response; they always end the run."""
UNGRADED_STATUS = "ungraded_status"
"""Metadata key with the previous status of a sample that is FAILED because it could not be graded."""
_NUM_TRACEBACKS = 3


class FailureCount:
    """Counts consecutive and total failures, and keeps the first error of the current row."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0
        self.first: BaseException | None = None

    def succeeded(self) -> None:
        """Record a graded response, which ends the row of failures."""
        self.in_a_row = 0
        self.first = None

    def failed(self, error: BaseException) -> None:
        """Record a response that could not be graded."""
        self.first = self.first or error
        self.in_a_row += 1
        self.total += 1


FAILURES = FailureCount()
"""The count of this process."""


async def within(
    timeout_s: float, call: Awaitable[Any], late: str = "no reward within {:g} s (--rm-timeout-s)"
) -> Any:
    """Await ``call`` for at most ``timeout_s`` seconds, even if it swallows its cancellation.

    Raises:
        TimeoutError: ``call`` did not finish in time; the message is ``late``, formatted with ``timeout_s``.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        raise TimeoutError(late.format(timeout_s))
    return task.result()


async def grade_by_policy(
    config: RewardConfig,
    samples: Sequence[Sample],
    grade: Callable[[], Awaitable[Sequence[Any]]],
    *,
    grader: str | None,
) -> Sequence[Any]:
    """Return the rewards of ``samples`` from ``grade``; failures get the reward of ``--rm-failure-policy``.

    Args:
        config: Reward flags of the run.
        samples: Samples to grade.
        grade: Returns one reward for each sample.
        grader: The grader's name, for errors; None if its rewards need no check.

    Raises:
        ConfigError, HookError, NotImplementedError, ImportError: raised by ``grade``.
        GraderError: ``--rm-max-failures`` consecutive gradings have failed.
        Exception: any error of ``grade``, with ``--rm-failure-policy raise``.
    """
    try:
        rewards = await grade()
    except _MISTAKES:
        raise
    except Exception as error:
        _record_failure(config, samples, error)
        return [_failed_reward(config, sample, error) for sample in samples]
    if not is_one_each(rewards, samples):
        return rewards  # the caller reports the wrong shape and names the function
    graded = []
    for sample, reward in zip(samples, map(plain_reward, rewards), strict=True):
        problem = None if grader is None else problem_with_reward(config, reward)
        if problem is None:
            FAILURES.succeeded()
            graded.append(reward)
        else:
            failure = ValueError(f"{grader}: {problem}")
            _record_failure(config, [sample], failure)
            graded.append(_failed_reward(config, sample, failure))
    return graded


def leave_out(config: RewardConfig, sample: Sample, failure: Exception) -> None:
    """Mark ``sample`` as FAILED and not trained, with the placeholder values that the trainer needs.

    An existing reward is kept; otherwise ``--rm-failure-policy`` gives one.  The failure counts like a grader's
    failure, so a run in which every episode fails ends.

    Raises:
        ConfigError, HookError, NotImplementedError, ImportError: ``failure`` is one of these.
        GraderError: ``--rm-max-failures`` consecutive responses have failed.
        Exception: ``failure`` itself, with ``--rm-failure-policy raise``.
    """
    if isinstance(failure, _MISTAKES):
        raise failure
    _record_failure(config, [sample], failure)
    reward = _failed_reward(config, sample, failure)
    sample.reward = reward if sample.reward is None else sample.reward
    if not sample.response_length:
        sample.tokens = list(sample.tokens) or [0]
        sample.append_response_tokens(tokens=[0], trainable=False)
    sample.status, sample.remove_sample = Sample.Status.FAILED, True


def check_graded(config: RewardConfig, samples: Sequence[Sample]) -> None:
    """Refuse a rollout without a single graded response; a short run has fewer responses than ``--rm-max-failures``.

    Raises:
        GraderError: grading failed for all samples, and ``--rm-max-failures`` is not 0.
    """
    errors = [(sample.metadata or {}).get("reward_error") for sample in samples]
    if config.rm_max_failures and errors and all(errors):
        raise GraderError(
            f"None of the {len(errors)} responses of this rollout could be graded; the first grading failed with "
            f"{errors[0]}. {_advice(config)} --rm-max-failures 0 continues without rewards."
        )


def is_one_each(rewards: Any, samples: Sequence[Sample]) -> bool:
    """Return True for a list-like object with one reward per sample."""
    is_list = hasattr(rewards, "__len__") and not isinstance(rewards, str | bytes | Mapping | set)
    return is_list and len(rewards) == len(samples)


def problem_with_reward(config: RewardConfig, reward: Any) -> str | None:
    """Return why a reward is unusable for training; None if it is usable.

    Numbers must be finite.  If a reward key is set, a reward must be a dict with that key or a plain number, since an
    evaluation set may use a grader that returns numbers.  Without ``--reward-key``, other types are left to a plug-in
    that sees the rewards first, if there is one.
    """
    keys, value = _reward_keys(config), reward
    if config.reward_key is None and config.takes_any_reward and not isinstance(reward, Real):
        return None
    if keys and isinstance(reward, Mapping):
        found = [key for key in keys if key in reward]
        if not found:
            entries = ", ".join(map(str, reward)) or "no entries"
            return f"the reward has {entries}; --reward-key wants {' or '.join(keys)}"
        bad = (key for key in found if not isinstance(reward[key], Real) or not is_finite(reward[key]))
        value = reward[next(bad, found[0])]
    if isinstance(value, Real) and not is_finite(value):
        return f"the reward is {value}; it must be finite"
    if isinstance(value, Real):
        return None
    allowed = f"a number, or an object whose entry {keys[0]!r} (--reward-key) is one" if keys else "a number"
    advice = "; give --reward-key with its entry" if isinstance(value, Mapping) and not keys else ""
    return f"the reward is {repr(value)[:200]} ({type(value).__name__}); it must be {allowed}{advice}"


def _reward_keys(config: RewardConfig) -> list[str]:
    return list(dict.fromkeys(name for name in (config.reward_key, config.eval_reward_key) if name))


def _record_failure(config: RewardConfig, samples: Sequence[Sample], error: Exception) -> None:
    """Log a failure; raise an error if the policy or the number of failures ends the run."""
    FAILURES.failed(error)
    indices = ", ".join(str(sample.index) for sample in samples)
    with_traceback = FAILURES.total <= _NUM_TRACEBACKS and error.__traceback__ is not None
    logger.warning(
        "The response of sample %s could not be graded: %s: %s (--rm-failure-policy %s). %s",
        indices,
        type(error).__name__,
        error,
        config.rm_failure_policy,
        _advice(config) if FAILURES.total <= _NUM_TRACEBACKS else "",
        exc_info=error if with_traceback else None,
    )
    if config.rm_failure_policy == "raise":
        raise error
    if 0 < config.rm_max_failures <= FAILURES.in_a_row:
        first = FAILURES.first or error
        notes = "".join(f"\n{note}" for note in getattr(first, "__notes__", ()))
        raise GraderError(
            f"The last {FAILURES.in_a_row} gradings failed (--rm-max-failures), the first of them with "
            f"{type(first).__name__}: {first}. {_advice(config)}{notes}"
        ) from first


def _advice(config: RewardConfig) -> str:
    if config.custom_rm_path:
        return f"`slime check {config.custom_rm_path}` (--custom-rm-path) calls the function as a run does."
    return "Look at --rm-type, --custom-rm-path or the server of --rm-url."


def _failed_reward(config: RewardConfig, sample: Sample, error: Exception) -> Any:
    sample.metadata = {**(sample.metadata or {}), "reward_error": f"{type(error).__name__}: {error}"}
    if config.rm_failure_policy == "failed":
        if not sample.remove_sample:  # a restart restores this status to grade the sample again
            sample.metadata[UNGRADED_STATUS] = sample.status.value
        sample.status, sample.remove_sample = Sample.Status.FAILED, True
    keys = _reward_keys(config)
    return dict.fromkeys(keys, 0.0) if keys else 0.0


# Threads for slow graders.  A thread cannot be stopped, so an overdue one is abandoned and its slot is freed for the
# next grading.  All threads are daemons, so none blocks the exit.


NUM_THREADS = 8


class GraderThreads:
    """Runs at most ``num_threads`` gradings at a time, not counting abandoned ones, each in a new thread."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float,
        late: str = "no result within {:g} s (--rm-timeout-s)",
    ) -> Any:
        """Run ``function(*args)`` in a thread and return its result or raise its error.

        A call that is cancelled while it waits for a slot is not started.

        Raises:
            TimeoutError: the function did not return within ``timeout_s`` seconds of its start; the message is
                ``late``.  Waiting for a slot does not count; the deadlines of the calls ahead bound it.
        """
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._num_threads))
        async with places:
            outcome: Future[Any] = Future()
            outcome.set_running_or_notify_cancel()  # from here on only the thread can complete it
            threading.Thread(target=_grade, args=(outcome, function, args), name="grader", daemon=True).start()
            result = asyncio.wrap_future(outcome)
            try:
                done, _ = await asyncio.wait({result}, timeout=timeout_s)
            finally:
                result.cancel()
        if not done:
            raise TimeoutError(late.format(timeout_s))
        return result.result()


def _grade(outcome: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        outcome.set_result(function(*args))
    except CancelledError as error:
        # Raised inside the grader; passed on, it would look like the caller's cancellation.
        outcome.set_exception(GraderError(f"the grader's own work was cancelled: {error!r}"))
    except BaseException as error:  # re-raised where the grading is awaited
        outcome.set_exception(error)


GRADER_THREADS = GraderThreads()
"""The pool of this process."""
