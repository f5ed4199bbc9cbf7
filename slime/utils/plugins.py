"""Imports and calls plug-ins so that every failure names the plug-in: its flag, its import path, and the sample.

An exception from a plug-in is passed on unchanged, with a note: one line with flag, path and sample, followed by the
plug-in's own frames.  ``SystemExit``, which would silently end the process or the event loop, becomes a HookError.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from slime.utils.errors import HookError, did_you_mean

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 600.0
"""Timeout in seconds for importing a plug-in's module; the default of ``--plugin-import-timeout-s``."""
IMPORT_WARNING_S = 30.0
"""Seconds after which a slow import is logged."""
_MAX_FRAMES = 12
_SLIME = str(Path(__file__).parents[1])
_MACHINERY = ("<frozen", str(importlib.__file__))


@dataclass(frozen=True, slots=True)
class PluginCall:
    """One call of a plug-in, for error messages."""

    flag: str
    path: str
    subject: Any = None
    """The sample, or the list of samples, that the call is about."""

    def __str__(self) -> str:
        about = _name_of(self.subject)
        return f"{self.flag} {self.path}" + (f", called for {about}," if about else "")

    def describe(self, error: BaseException) -> str:
        """Return one line with the plug-in's exception, followed by the plug-in's own frames."""
        return f"{self} raised {said_by(error)}\n{frames_of(error)}"


def said_by(error: BaseException) -> str:
    """Return an exception's type and text, even if its own ``__str__`` fails."""
    try:
        text = str(error)
    except Exception as other:  # the class is the user's and may raise anything
        text = f"(its text is unavailable: {type(other).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _name_of(subject: Any) -> str:
    count = len(subject) if isinstance(subject, list) else 1
    while isinstance(subject, list) and subject:
        subject = subject[0]
    if isinstance(subject, list | tuple | str) or getattr(subject, "index", None) is None:
        return ""
    first = f"sample {subject.index} of group {getattr(subject, 'group_index', None)}"
    return first if count == 1 else f"{count} samples from {first} on"


def call_plugin(call: PluginCall, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a plug-in; its exceptions get a note that describes ``call``.

    Raises:
        HookError: the plug-in tried to end the process.
    """
    began = time.monotonic()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        _add_note(call, error)
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ended(call, error) from error
    finally:
        SECONDS[f"{call.flag} {call.path}"] += time.monotonic() - began


def is_coroutine_function(function: Any) -> bool:
    """Return whether calling ``function`` (possibly wrapped, or an object with ``__call__``) returns a coroutine."""
    inner = inspect.unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


async def await_plugin(call: PluginCall, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Call a plug-in and await its result; otherwise like ``call_plugin``."""
    try:
        return await function(*args, **kwargs)
    except Exception as error:
        _add_note(call, error)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise _ended(call, error) from error


SECONDS: defaultdict[str, float] = defaultdict(float)
""""FLAG PATH" -> seconds spent in this process's synchronous plug-ins."""


def calls_under_way() -> dict[str, int]:
    """Return "FLAG PATH" -> number of calls of the plug-in that this event loop's tasks await."""
    found: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        step: Any = task.get_coro()
        while step is not None:
            if getattr(step, "cr_code", None) is await_plugin.__code__ and step.cr_frame is not None:
                call = step.cr_frame.f_locals["call"]
                found[f"{call.flag} {call.path}"] += 1
            step = getattr(step, "cr_await", None)
    return dict(found)


_WRAPPERS = (call_plugin.__code__, await_plugin.__code__)


def _add_note(call: PluginCall, error: Exception) -> None:
    """Name the plug-in in the error, unless the error already names a plug-in that it called.

    slime's own rollout and loss functions are not plug-ins, and a HookError is self-explanatory.
    """
    is_named = any(note.startswith("--") for note in getattr(error, "__notes__", ()))
    is_own = call.subject is None and (not call.path or call.path.startswith("slime."))
    if not is_named and not is_own and not isinstance(error, HookError):
        error.add_note(call.describe(error))


def _ended(call: PluginCall, error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        return error
    return HookError(f"{call.describe(error)}\nA plug-in must not end the process; raise an exception instead.")


# Frames


def frames_of(error: BaseException) -> str:
    """Return the plug-in's own frames of a traceback, without those of slime and the import machinery."""
    return _format([(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)])


def frames_of_thread(thread: threading.Thread) -> tuple[PluginCall | None, str]:
    """Return the plug-in call that a thread is in (or None) and its current frames."""
    found: list[tuple[FrameType, int]] = []
    call = None
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and call is None:
        if frame.f_code in _WRAPPERS:
            call = frame.f_locals["call"]
        else:
            found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return call, _format(found[::-1])


def _format(frames: list[tuple[FrameType, int]]) -> str:
    """Format the last frames like a traceback; frames of slime are included only if there are no others."""
    named = [item for item in frames if not item[0].f_code.co_filename.startswith(_MACHINERY)]
    own = [item for item in named if not item[0].f_code.co_filename.startswith(_SLIME)]
    summary = traceback.StackSummary.extract(iter((own or named)[-_MAX_FRAMES:]))
    return "".join(summary.format()).rstrip()


# Imports


class _Overdue(BaseException):
    """An import exceeded its deadline.  A BaseException, so that no ``except Exception`` of the module swallows it."""


def import_plugin(module_name: str, where: str, timeout_s: float = IMPORT_TIMEOUT_S) -> ModuleType:
    """Import a plug-in's module.

    Raises:
        HookError: the import raised an error, tried to end the process, or exceeded its deadline.
    """
    if module_name in sys.modules:
        return importlib.import_module(module_name)
    try:
        if threading.current_thread() is threading.main_thread():
            with _alarm(module_name, where, timeout_s):
                return importlib.import_module(module_name)
        return _import_in_thread(module_name, where, timeout_s)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module raises, the error must name it
        if isinstance(error, _Overdue):
            raise HookError(str(error)) from None
        hint, frames = "", frames_of(error)
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            hint, frames = did_you_mean(module_name, {found.name for found in pkgutil.iter_modules()}), ""
        raise HookError(
            f"{where}: importing {module_name} raised {said_by(error)}.{hint} The path is "
            "package.module.attribute, importable from here and in Ray's workers (PYTHONPATH)."
            f"\n{frames}".rstrip()
        ) from error


@contextmanager
def _alarm(module_name: str, where: str, timeout_s: float) -> Iterator[None]:
    """Interrupt the main thread at the import's deadline.  Imports stay there because modules may need it."""
    began = time.monotonic()

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        passed_s = time.monotonic() - began
        at = _format([(f, line) for f, line in traceback.walk_stack(frame)][::-1])
        if passed_s < timeout_s - 0.01:
            _warn_of_import(module_name, where, passed_s, at)
            signal.setitimer(signal.ITIMER_REAL, timeout_s - passed_s, 1.0)
            return
        raise _Overdue(_overdue(module_name, where, timeout_s, at))  # repeated every second until it gets through

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, min(IMPORT_WARNING_S, timeout_s), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


def _import_in_thread(module_name: str, where: str, timeout_s: float) -> ModuleType:
    """Import outside the main thread, where alarms cannot interrupt; a module that blocks is abandoned."""
    outcome: list[ModuleType | BaseException] = []

    def work() -> None:
        try:
            outcome.append(importlib.import_module(module_name))
        except BaseException as error:  # raised in the waiting thread
            outcome.append(error)

    thread = threading.Thread(target=work, name=f"import {module_name}", daemon=True)
    thread.start()
    thread.join(min(IMPORT_WARNING_S, timeout_s))
    if not outcome and timeout_s > IMPORT_WARNING_S:
        _warn_of_import(module_name, where, IMPORT_WARNING_S, frames_of_thread(thread)[1])
        thread.join(timeout_s - IMPORT_WARNING_S)
    if not outcome:
        raise _Overdue(_overdue(module_name, where, timeout_s, frames_of_thread(thread)[1]))
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _warn_of_import(module_name: str, where: str, passed_s: float, at: str) -> None:
    logger.warning("%s: importing %s has taken %.0f s so far. It is at:\n%s", where, module_name, passed_s, at)


def _overdue(module_name: str, where: str, timeout_s: float, at: str) -> str:
    return (
        f"{where}: importing {module_name} did not end within {timeout_s:g} s (--plugin-import-timeout-s). Do such "
        f"work in the plug-in's function, or raise the flag. The import is at:\n{at}"
    )
