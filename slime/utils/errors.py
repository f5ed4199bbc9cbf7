"""The errors that slime raises on purpose, one class for each kind of cause.

    SlimeError
        ConfigError            a flag, a file of flags, or a combination of them          (ValueError)
        DataError              a data file or a sample                                    (ValueError)
            CheckpointError    a checkpoint that is torn or does not fit
        HookError              a user's plug-in                                           (TypeError)
        ProcessError           a process of the job, or a service it relies on, failed    (RuntimeError)
            EngineError        an engine or router refused, or its answer is unusable
                EngineDiedError
                    PortTakenError
            DeadlineError      something did not happen in time                           (TimeoutError)
                HangError
            GraderError        a grader failed
        WeightSyncError        the weights in an engine are not the trainer's             (RuntimeError)
        StepError              an optimizer step with unusable numbers                    (ArithmeticError)
        CheckError             a number that fails a user's check                         (AssertionError)

Catch ``ProcessError`` to continue without a process that failed, whether it died, hung or refused.

A message has three parts: what is wrong, with the value received; what is allowed or why; what to do, naming the
flag or the file.  Anything else that escapes is a bug.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SlimeError(Exception):
    """Base of every error that slime raises on purpose."""


class ConfigError(SlimeError, ValueError):
    """A flag, a file of flags, or a combination of them cannot work."""


class DataError(SlimeError, ValueError):
    """A data file, a checkpoint or a sample breaks its contract."""


class CheckpointError(DataError):
    """The parts of a checkpoint are from different saves or do not fit together."""


class HookError(SlimeError, TypeError):
    """A user's plug-in cannot be imported, or does not match the call made to it."""


class ProcessError(SlimeError, RuntimeError):
    """A process of the job, or a service that it relies on, did not do its part."""


class EngineError(ProcessError):
    """An engine, a router or an actor is unreachable, refused a request, or gave an unusable answer."""


class EngineDiedError(EngineError):
    """An engine, a router or an actor of the job has ended."""


class PortTakenError(EngineDiedError):
    """A server failed to start because another process had taken one of its ports; it may start on others."""


class DeadlineError(ProcessError, TimeoutError):
    """A deadline passed; the message names what was waited for and the flag to raise."""


class HangError(DeadlineError):
    """A trainer rank is alive but makes no progress."""


class GraderError(ProcessError):
    """A reward function, reward server or teacher failed in all allowed attempts."""


class WeightSyncError(SlimeError, RuntimeError):
    """The weights in an engine are not those of the trainer."""


class StepError(SlimeError, ArithmeticError):
    """A loss, a gradient or a rank's weights in an optimizer step are unusable (``--on-nan``)."""


class CheckError(SlimeError, AssertionError):
    """A number fails a check requested by the user (``--ci-test``)."""


def did_you_mean(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `` Did you mean NAME?`` with the candidate most similar to ``name``; empty if none is similar.

    Args:
        cutoff: least similarity, 0 to 1, as in ``difflib.get_close_matches``.
    """
    similar = get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return f" Did you mean {similar[0]}?" if similar else ""
