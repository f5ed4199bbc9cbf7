"""The composition root: the only file that names extensions.  Each is imported when a command asks for it."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from slime.observability.logging_utils import configure_logger
from slime.ray import job
from slime.ray.parts import Parts

if TYPE_CHECKING:
    from slime.backends.megatron_utils.model_transform import ModelTransform


def run(train: Callable[[Namespace], None], check: Callable[[Namespace], None] | None = None) -> None:
    """Do what the command line asks for: print a plan, watch over a driver, or run ``train(args)`` as a job.

    Ends the process; see :func:`slime.ray.job.run` for ``check`` and the exit codes of a job.
    """
    configure_logger()
    words = sys.argv[1:]
    if any(word.partition("=")[0] == "--plan" for word in words):
        from slime.ext.plan.command import plan_of_train

        sys.exit(plan_of_train(words))
    if "--supervise" in words:
        from slime.ext.recovery.supervisor import supervise

        sys.exit(supervise(sys.argv[0], words))
    job.run(train, check, complete=_fit if "--fit" in words else list)


def parts(args: Namespace) -> Parts:
    """Return the implementations that the flags ask for."""
    transforms: list[type[ModelTransform]] = []
    if args.int4_qat:
        from slime.ext.low_precision.fake_quantize import FakeInt4

        transforms.append(FakeInt4)
    return Parts(transforms=tuple(transforms))


def _fit(words: list[str]) -> list[str]:
    from slime.ext.plan.fit import fitted_here

    return fitted_here(words)
