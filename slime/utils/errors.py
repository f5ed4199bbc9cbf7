"""The errors that slime raises on purpose, one class for each kind of cause.

    SlimeError
        ConfigError            a flag, a file of flags, or a combination of them          (ValueError)
        DataError              a data file or a sample                                    (ValueError)
            CheckpointError    a checkpoint that is torn or does not fit
        HookError              a user's plug-in                                           (TypeError)
        ProcessError           a process of the job, or a service it relies on, failed us (RuntimeError)
            EngineError        an engine or router refused, or its answer cannot be used
                EngineDiedError
                    PortTakenError
            DeadlineError      something did not happen in time                           (TimeoutError)
                HangError
            GraderError        a grader failed
        WeightSyncError        the weights in an engine are not the trainer's             (RuntimeError)
        StepError              an optimizer step whose numbers cannot be used             (ArithmeticError)
        CheckError             a number that a check of the user's refuses                (AssertionError)

Catch ``ProcessError`` to continue without a process that failed, whether it died, hung or refused.

A message has three parts: what is wrong, with the value received; what is allowed or why; what to do, naming the
flag or the file.  Anything else that escapes is a bug.
"""


class SlimeError(Exception):
    """Base of every error that slime raises on purpose."""


class ConfigError(SlimeError, ValueError):
    """A flag, a file of flags, or a combination of them cannot work."""


class DataError(SlimeError, ValueError):
    """A data file, a checkpoint or a sample breaks its contract."""


class CheckpointError(DataError):
    """The parts of a checkpoint are not of one save, or do not fit each other."""


class HookError(SlimeError, TypeError):
    """A user's plug-in cannot be imported, or does not fit the call that is made of it."""


class ProcessError(SlimeError, RuntimeError):
    """A process of the job, or a service that it relies on, did not do its part."""


class EngineError(ProcessError):
    """An engine, a router or an actor cannot be reached, refused a request, or gave an answer that cannot be used."""


class EngineDiedError(EngineError):
    """An engine, a router or an actor of the job has ended."""


class PortTakenError(EngineDiedError):
    """A server ended at its start because another process had taken one of its ports; it may start at others."""


class DeadlineError(ProcessError, TimeoutError):
    """Something did not happen before its deadline; the message names what was waited for and the flag to raise."""


class HangError(DeadlineError):
    """A rank of the trainer is alive and does not continue."""


class GraderError(ProcessError):
    """A reward function, reward server or teacher failed, as often as it may."""


class WeightSyncError(SlimeError, RuntimeError):
    """The weights in an engine are not those of the trainer."""


class StepError(SlimeError, ArithmeticError):
    """A loss, a gradient or a rank's weights in an optimizer step are not what they can be (``--on-nan``)."""


class CheckError(SlimeError, AssertionError):
    """A number is not what a check of the user's asked for (``--ci-test``)."""
