"""Run a job from the command line: connect to Ray, run the loop, report the root cause of a failure, clean up.

Ray ends all actors of a driver that has exited, and engine servers and routers exit with their actors.  So nothing of
the job survives the driver, however it ends.  This module makes the end quick and its message clear.
"""

from __future__ import annotations

import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from types import FrameType

from ray.exceptions import RayError

from slime.flags.files import check_contents
from slime.observability import telemetry
from slime.observability.text_log import configure_logger
from slime.ray.cluster import connect, disconnect
from slime.ray.waiting import Interrupted, forget_all, sigterm
from slime.utils.errors import ConfigError, DataError, HookError, SlimeError
from slime.utils.redaction import hide_values, redacted_text

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(
    train: Callable[[Namespace], None],
    check: Callable[[Namespace], None] | None = None,
    *,
    parse: Callable[[], Namespace],
) -> None:
    """Parse the command line, connect to Ray, run ``train(args)``, and exit the process.

    Exit codes: 0 success, 1 failure, 2 bad input, 130 interrupted.

    Args:
        train: the training loop.
        check: raises if this ``train`` does not support the args.
        parse: returns the parsed command line.
    """
    configure_logger()
    signal.signal(signal.SIGTERM, _raise_interrupted)
    code = EXIT_FAILED
    try:
        args = parse()
        hide_values(args)
        if check is not None:
            check(args)
        check_contents(args)
        connect(args)
        sigterm().listen()
        train(args)
        code = 0
    except (ConfigError, DataError, HookError) as error:
        code = EXIT_BAD_INPUT
        _report("slime cannot continue this run", error)
    except SlimeError as error:
        _report("slime job failed", error)
    except (KeyboardInterrupt, Interrupted) as interruption:
        if interruption.__cause__ is not None:
            _report("slime cannot continue this run", interruption.__cause__)
        code = _interrupted()
    except Exception as error:  # the process boundary: all unexpected errors end here
        print(redacted_text(traceback.format_exc()), file=sys.stderr)
        _report("slime job failed", error)
    finally:
        if code in (EXIT_FAILED, EXIT_BAD_INPUT) and sigterm().has_come:
            code = _interrupted()  # errors after SIGTERM (a lost node, signalled engines) are not failures of the job
        if code:
            telemetry.event("failed", code=code)
        telemetry.stop()
        forget_all()
        disconnect(keeps_logs=code != 0)
    sys.exit(code)


def _interrupted() -> int:
    """Print that a signal ends the job; return the matching exit code."""
    print("\nslime job interrupted: stopping its engines and trainers", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


def _raise_interrupted(signum: int, frame: FrameType | None) -> None:
    raise Interrupted


def _report(title: str, error: BaseException) -> None:
    """Print the error and its root cause.  The log above shows only the consequences."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause.__cause__, RayError):
        cause = cause.__cause__
    telemetry.event("error", title=title, text=f"{type(cause).__name__}: {cause}"[:4000])
    bar = "-" * 100
    lines = [f"{title}: {type(error).__name__}: {error}"]
    if cause is not error and str(cause) not in str(error):
        lines.append(f"first cause: {type(cause).__name__}: {cause}")
    # Notes describe a plug-in: its flag, path, sample and stack frames.
    lines += dict.fromkeys(getattr(error, "__notes__", []) + getattr(cause, "__notes__", []))
    print(f"\n{bar}", *map(redacted_text, lines), bar, sep="\n", file=sys.stderr, flush=True)
