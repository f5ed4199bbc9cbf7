"""The errors that slime raises on purpose, one class for each kind of cause.

A message has three parts: what is wrong, with the value received; what is allowed or why; what to do, naming the
flag or the file.  Anything else that escapes is a bug.
"""


class SlimeError(Exception):
    """Base of every error that slime raises on purpose."""


class ConfigError(SlimeError, ValueError):
    """A flag, a file of flags, or a combination of them cannot work."""


class DataError(SlimeError, ValueError):
    """A data file, a checkpoint or a sample breaks its contract."""


class HookError(SlimeError, TypeError):
    """A user's plug-in cannot be imported, or does not fit the call that is made of it."""


class EngineError(SlimeError, RuntimeError):
    """A process of the job (engine, router, trainer) died, refused or did not answer in time."""


class WeightSyncError(SlimeError, RuntimeError):
    """The weights in an engine are not those of the trainer."""


class CheckError(SlimeError, AssertionError):
    """A number is not what a check of the user's asked for (``--ci-test``)."""
