"""What one response may cost that cannot be graded: its own reward, not the run.

A grader that hangs (``--rm-timeout-s``), raises, or answers something that is no reward is noted in the log and in
``sample.metadata["reward_error"]``; the response then gets what ``--rm-failure-policy`` says:

    zero     reward 0, and it trains
    failed   reward 0, status FAILED, and it does not train (``remove_sample``)
    raise    nothing: the run ends

When nothing can be graded any more (``--rm-max-failures`` calls in a row) the run ends with the first cause, whatever
the policy.  Mistakes in the flags always end it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from slime.utils.errors import ConfigError, GraderError, HookError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

POLICIES = ("zero", "failed", "raise")
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_POLICY = "zero"
DEFAULT_MAX_FAILURES = 64

_MISTAKES = (ConfigError, HookError, NotImplementedError, ImportError)
"""What is wrong for every response alike."""
_NUM_TRACEBACKS = 3


class FailureCount:
    """Failed calls in a row, and the first of them."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0
        self.first: BaseException | None = None

    def succeeded(self) -> None:
        """A response was graded."""
        self.in_a_row = 0
        self.first = None

    def failed(self, error: BaseException) -> None:
        """One was not."""
        self.first = self.first or error
        self.in_a_row += 1
        self.total += 1


FAILURES = FailureCount()
"""Of this process."""


def timeout_s_of(args: Namespace) -> float:
    """Seconds that one grading may take."""
    return getattr(args, "rm_timeout_s", DEFAULT_TIMEOUT_S)


async def within(timeout_s: float, call: Awaitable[Any]) -> Any:
    """What ``call`` gives, waited for no longer than ``timeout_s`` even when it does not let itself be cancelled.

    Raises:
        TimeoutError: it did not come.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        raise TimeoutError(f"no reward within {timeout_s:g} s (--rm-timeout-s)")
    return task.result()


async def grade_by_policy(
    args: Namespace,
    samples: Sequence[Sample],
    grade: Callable[[], Awaitable[Sequence[Any]]],
    *,
    may_vary: bool = True,
) -> Sequence[Any]:
    """The rewards that ``grade`` gives to ``samples``, or those of ``--rm-failure-policy``.

    Args:
        args: the run's arguments.
        samples: what is graded.
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
        _note(args, samples, error)
        return [_failed_reward(args, sample, error) for sample in samples]
    if rewards is None or len(rewards) != len(samples):
        return rewards  # whoever asked says what is wrong with the function
    graded = []
    for sample, reward in zip(samples, rewards, strict=True):
        problem = problem_with_reward(args, reward) if may_vary else None
        if problem is None:
            FAILURES.succeeded()
            graded.append(reward)
        else:
            failure = ValueError(problem)
            _note(args, [sample], failure)
            graded.append(_failed_reward(args, sample, failure))
    return graded


def problem_with_reward(args: Namespace, reward: Any) -> str | None:
    """Why training could not go on with a reward; None when it can.

    What is neither a number nor a dict is left to ``--custom-reward-post-process-path``, which may know it.
    """
    if isinstance(reward, float) and not math.isfinite(reward):
        return f"the reward is {reward}; it must be finite"
    keys = _reward_keys(args)
    if not keys or reward is None:
        return None
    if isinstance(reward, int | float):
        return None  # of a grader without entries, as an evaluation set may have
    if not isinstance(reward, Mapping):
        return f"the reward is {str(reward)[:200]!r}; with --reward-key {keys[0]} it must be an object with that key"
    values = [reward[key] for key in keys if key in reward]
    if not values:
        return f"the reward has {', '.join(map(str, reward)) or 'no entries'}; --reward-key wants {' or '.join(keys)}"
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            return f"the reward is {value}; it must be finite"
    return None


def _reward_keys(args: Namespace) -> list[str]:
    names = (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None))
    return list(dict.fromkeys(name for name in names if name))


def _note(args: Namespace, samples: Sequence[Sample], error: Exception) -> None:
    """Log a failure; end the run when the policy or their number says so."""
    FAILURES.failed(error)
    limit = getattr(args, "rm_max_failures", DEFAULT_MAX_FAILURES)
    indices = ", ".join(str(sample.index) for sample in samples)
    with_traceback = FAILURES.total <= _NUM_TRACEBACKS and error.__traceback__ is not None
    logger.warning(
        "The response of sample %s could not be graded: %s: %s (--rm-failure-policy %s)",
        indices,
        type(error).__name__,
        error,
        getattr(args, "rm_failure_policy", DEFAULT_POLICY),
        exc_info=error if with_traceback else None,
    )
    if getattr(args, "rm_failure_policy", DEFAULT_POLICY) == "raise":
        raise error
    if 0 < limit <= FAILURES.in_a_row:
        first = FAILURES.first or error
        raise GraderError(
            f"The last {FAILURES.in_a_row} gradings failed (--rm-max-failures); the first of them with "
            f"{type(first).__name__}: {first}. Look at --rm-type, --custom-rm-path or the server of --rm-url."
        ) from first


def _failed_reward(args: Namespace, sample: Sample, error: Exception) -> Any:
    sample.metadata = {**(sample.metadata or {}), "reward_error": f"{type(error).__name__}: {error}"}
    if getattr(args, "rm_failure_policy", DEFAULT_POLICY) == "failed":
        sample.status = Sample.Status.FAILED
        sample.remove_sample = True
    keys = _reward_keys(args)
    return dict.fromkeys(keys, 0.0) if keys else 0.0
