"""The failure policy of graders, and the threads that slow graders run in.

A grader that hangs (``--rm-timeout-s``), raises, or returns something that is no reward costs its response, not the
run: the error goes to the log and to ``sample.metadata["reward_error"]``, and ``--rm-failure-policy`` decides:

    failed   status FAILED, and it does not train (``remove_sample``): its reward of 0 stands for none, and no
             statistic of rewards has it (``Sample.is_graded``)
    zero     reward 0, and it trains
    raise    nothing: the run ends

When nothing can be graded any more (``--rm-max-failures`` calls in a row) the run ends with the first cause, whatever
the policy.  Mistakes in the flags always end it.
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
"""Errors that every response would meet: they always end the run."""
UNGRADED_STATUS = "ungraded_status"
"""Key of the metadata of a sample that is FAILED because nothing graded it: the status that it had."""
_NUM_TRACEBACKS = 3


class FailureCount:
    """Number of failed calls, in a row and in total, and the first error of the row."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0
        self.first: BaseException | None = None

    def succeeded(self) -> None:
        """Record a response that was graded: the row ends."""
        self.in_a_row = 0
        self.first = None

    def failed(self, error: BaseException) -> None:
        """Record a response that was not."""
        self.first = self.first or error
        self.in_a_row += 1
        self.total += 1


FAILURES = FailureCount()
"""Of this process."""


async def within(
    timeout_s: float, call: Awaitable[Any], late: str = "no reward within {:g} s (--rm-timeout-s)"
) -> Any:
    """Await ``call`` for at most ``timeout_s``, even when it swallows its cancellation.

    Raises:
        TimeoutError: it did not come; its text is ``late``.
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
    may_vary: bool = True,
) -> Sequence[Any]:
    """Return the rewards that ``grade`` gives to ``samples``, or those of ``--rm-failure-policy``.

    Args:
        config: of the run's rewards.
        samples: to grade.
        grade: gives one reward for each sample.
        may_vary: the form of a reward may differ from one response to the next, so it is checked.

    Raises:
        ConfigError, HookError, NotImplementedError, ImportError: as ``grade`` raised them.
        GraderError: ``--rm-max-failures`` calls in a row have failed.
    """
    try:
        rewards = await grade()
    except _MISTAKES:
        raise
    except Exception as error:
        _record_failure(config, samples, error)
        return [_failed_reward(config, sample, error) for sample in samples]
    if not is_one_each(rewards, samples):
        return rewards  # the caller checks the shape, and names the function
    graded = []
    for sample, reward in zip(samples, map(plain_reward, rewards), strict=True):
        problem = problem_with_reward(config, reward) if may_vary else None
        if problem is None:
            FAILURES.succeeded()
            graded.append(reward)
        else:
            failure = ValueError(problem)
            _record_failure(config, [sample], failure)
            graded.append(_failed_reward(config, sample, failure))
    return graded


def leave_out(config: RewardConfig, sample: Sample, failure: Exception) -> None:
    """Make ``sample`` FAILED, with what the trainer needs of a sample that trains nothing.

    A reward that it has stays; else ``--rm-failure-policy`` gives one.  The failure counts as one of a grader does, so
    that a run in which nothing can be played ends.

    Raises:
        ConfigError, HookError, NotImplementedError, ImportError: ``failure`` is one of these.
        GraderError: ``--rm-max-failures`` responses in a row have failed.
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


def is_one_each(rewards: Any, samples: Sequence[Sample]) -> bool:
    """Return True for a list, or what is like one, with a reward for each sample."""
    is_list = hasattr(rewards, "__len__") and not isinstance(rewards, str | bytes | Mapping | set)
    return is_list and len(rewards) == len(samples)


def problem_with_reward(config: RewardConfig, reward: Any) -> str | None:
    """Return why training cannot use a reward; None when it can.

    What is neither a number nor a dict is left to ``--custom-reward-post-process-path``, which may know it; a number
    in the place of a dict comes from a grader without entries, as an evaluation set may have.
    """
    keys, values = _reward_keys(config), [reward]
    reads_entry = config.reward_key is not None or not config.custom_reward_post_process_path
    if keys and reads_entry and reward is not None and not isinstance(reward, Real):
        if not isinstance(reward, Mapping):
            shown = str(reward)[:200]
            return f"the reward is {shown!r}; with --reward-key {keys[0]} it must be an object with that key"
        values = [reward[key] for key in keys if key in reward]
        if not values:
            entries = ", ".join(map(str, reward)) or "no entries"
            return f"the reward has {entries}; --reward-key wants {' or '.join(keys)}"
    for value in values:
        if isinstance(value, Real) and not is_finite(value):
            return f"the reward is {value}; it must be finite"
    return None


def _reward_keys(config: RewardConfig) -> list[str]:
    return list(dict.fromkeys(name for name in (config.reward_key, config.eval_reward_key) if name))


def _record_failure(config: RewardConfig, samples: Sequence[Sample], error: Exception) -> None:
    """Log a failure; end the run when the policy or their number says so."""
    FAILURES.failed(error)
    indices = ", ".join(str(sample.index) for sample in samples)
    with_traceback = FAILURES.total <= _NUM_TRACEBACKS and error.__traceback__ is not None
    logger.warning(
        "The response of sample %s could not be graded: %s: %s (--rm-failure-policy %s)",
        indices,
        type(error).__name__,
        error,
        config.rm_failure_policy,
        exc_info=error if with_traceback else None,
    )
    if config.rm_failure_policy == "raise":
        raise error
    if 0 < config.rm_max_failures <= FAILURES.in_a_row:
        first = FAILURES.first or error
        notes = "".join(f"\n{note}" for note in getattr(first, "__notes__", ()))
        raise GraderError(
            f"The last {FAILURES.in_a_row} gradings failed (--rm-max-failures); the first of them with "
            f"{type(first).__name__}: {first}. Look at --rm-type, --custom-rm-path or the server of --rm-url.{notes}"
        ) from first


def _failed_reward(config: RewardConfig, sample: Sample, error: Exception) -> Any:
    sample.metadata = {**(sample.metadata or {}), "reward_error": f"{type(error).__name__}: {error}"}
    if config.rm_failure_policy == "failed":
        if not sample.remove_sample:  # what a restart asks the grader with again
            sample.metadata[UNGRADED_STATUS] = sample.status.value
        sample.status, sample.remove_sample = Sample.Status.FAILED, True
    keys = _reward_keys(config)
    return dict.fromkeys(keys, 0.0) if keys else 0.0


# Threads for slow graders.  A thread cannot be stopped: one whose grading is overdue is left to end, if it ever does,
# and its place is free for the next grading.  All are daemons: none holds up the exit.


NUM_THREADS = 8


class GraderThreads:
    """At most ``num_threads`` gradings at a time that somebody waits for, each in a new thread."""

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
        """Run ``function(*args)`` in a thread; returns or raises what it does.  Cancelled, it is not begun any more.

        Raises:
            TimeoutError: it did not return within ``timeout_s`` of its start; its text is ``late``.  The time before
                is not counted: it is bounded by the deadlines of those that came first.
        """
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._num_threads))
        async with places:
            outcome: Future[Any] = Future()
            outcome.set_running_or_notify_cancel()  # now only the thread ends it
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
    except CancelledError as error:  # of the grader's own; awaited, it would pass for its caller's end
        outcome.set_exception(GraderError(f"the grader's own work was cancelled: {error!r}"))
    except BaseException as error:  # raised where the grading is awaited
        outcome.set_exception(error)


GRADER_THREADS = GraderThreads()
"""The pool of this process."""
