"""The flags of the hook table, and what docs/hooks.md says about each."""

from __future__ import annotations

import argparse
import inspect

from slime.arguments.hooks import HOOKS, Hook


def add_hook_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each row of ``HOOKS`` to ``parser``."""
    group = parser.add_argument_group(
        "plug-ins", "Your own code by import path, package.module.attribute. Contracts: slime/arguments/hooks.py."
    )
    for hook in HOOKS:
        if hook.repeatable:
            group.add_argument(
                hook.flag, action="append", default=None, metavar="PATH", help=f"{purpose(hook)} May be repeated."
            )
        else:
            group.add_argument(hook.flag, default=hook.default, metavar="PATH", help=purpose(hook))


def purpose(hook: Hook) -> str:
    """The first sentence of the protocol's docstring, fit for argparse."""
    first_line = (inspect.getdoc(hook.protocol) or "").splitlines()[0]
    return first_line.replace("%", "%%")
