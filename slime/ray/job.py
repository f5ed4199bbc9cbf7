"""From the command line to a running job and back: connect to Ray, report the first cause of a failure, clean up.

Ray ends every actor of a driver that has gone, and an engine's server or a router ends itself when its actor has: so
whatever happens to the driver, nothing of the job is left.  What is done here makes that quick and the message clear.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable
from types import FrameType

import ray
import torch
from ray.exceptions import RayError

from slime.arguments import parse_args
from slime.observability.logging_utils import configure_logger
from slime.planning.command import asks_for_plan, plan_of_train
from slime.planning.layout import plan_gpus
from slime.ray.waiting import forget_all
from slime.utils import env
from slime.utils.errors import ConfigError, DataError, HookError, SlimeError

logger = logging.getLogger(__name__)

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
CONNECT_TIMEOUT_S = 120.0


class Interrupted(BaseException):
    """SIGTERM (``ray job stop``) reached the driver."""


def run(train: Callable[[Namespace], None], check: Callable[[Namespace], None] | None = None) -> None:
    """Parse the command line, connect, run ``train(args)``, and leave with an exit code that says how it went.

    0 success, 1 failure, 2 bad input, 130 interrupted.  ``check(args)`` raises for what this ``train`` cannot do.
    """
    configure_logger()
    if asks_for_plan(sys.argv[1:]):
        sys.exit(plan_of_train(sys.argv[1:]))
    signal.signal(signal.SIGTERM, _raise_interrupted)
    code = EXIT_FAILED
    try:
        args = parse_args()
        if check is not None:
            check(args)
        connect(args)
        signal.signal(signal.SIGTERM, _raise_interrupted)  # ray.init may have put its own there
        train(args)
        code = 0
    except (ConfigError, DataError, HookError) as error:
        code = EXIT_BAD_INPUT
        _report("slime cannot start this run", error)
    except SlimeError as error:
        _report("slime job failed", error)
    except (KeyboardInterrupt, Interrupted):
        code = EXIT_INTERRUPTED
        print("\nslime job interrupted: stopping its engines and trainers", file=sys.stderr, flush=True)
    except Exception as error:  # the edge of the process: everything that is not foreseen ends here
        traceback.print_exc()
        _report("slime job failed", error)
    finally:
        forget_all()
        if ray.is_initialized():
            ray.shutdown()
    sys.exit(code)


def connect(args: Namespace) -> None:
    """Join the Ray cluster of ``RAY_ADDRESS`` or of this machine; without one, start a private one.

    ``RAY_ADDRESS=local`` asks for a private one outright.  The private cluster of a machine without GPUs has as many
    logical GPUs as the run needs.

    Raises:
        ConfigError: a cluster is there but does not let this process in.
    """
    if ray.is_initialized():
        return
    address = env.get_str("RAY_ADDRESS", "auto")
    if address != "local":
        outcome = _join(address)
        if outcome is None:
            return
        if not isinstance(outcome, ConnectionError):
            raise outcome
    num_gpus = None if torch.cuda.is_available() else plan_gpus(args).num_gpus
    num_cpus = None if num_gpus is None else 2 * num_gpus + 4
    logger.info("no Ray cluster is named or running here: starting a private one (%s logical GPUs)", num_gpus or "no")
    # From the main thread: Ray's servers end when the thread that started them does.
    ray.init(address="local", num_gpus=num_gpus, num_cpus=num_cpus, include_dashboard=False, log_to_driver=True)


def _join(address: str | None) -> Exception | None:
    """Join a running cluster, with a deadline; gives the error it ended with.

    In a thread of its own, because Ray tries for many minutes to join a cluster whose token it does not have.
    """
    outcome: list[Exception | None] = []

    def initialise() -> None:
        try:
            ray.init(address=address, log_to_driver=True)
            outcome.append(None)
        except Exception as error:  # carried to the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=initialise, name="ray-init", daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    if not outcome:
        return ConfigError(
            f"the Ray cluster at {address} does not let this process in within {CONNECT_TIMEOUT_S:.0f} s. "
            "If it is not the one you mean, set RAY_ADDRESS (RAY_ADDRESS=local starts a private one); if it is, give "
            "this process its token (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)."
        )
    return outcome[0]


def _raise_interrupted(signum: int, frame: FrameType | None) -> None:
    raise Interrupted


def _report(title: str, error: BaseException) -> None:
    """Print the error and its first cause; the log above has the consequences."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause.__cause__, RayError):
        cause = cause.__cause__
    bar = "-" * 100
    print(f"\n{bar}\n{title}: {type(error).__name__}: {error}", file=sys.stderr)
    if cause is not error and str(cause) not in str(error):
        print(f"first cause: {type(cause).__name__}: {cause}", file=sys.stderr)
    print(bar, file=sys.stderr, flush=True)
