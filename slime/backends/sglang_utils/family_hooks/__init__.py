"""What model families mend in SGLang, one file each.

A file defines ``HOOKS``: for each function of SGLang, its import path, the function called in its place or beside it,
and when (``before``, ``after``, ``around``, ``replace``).  Being here registers it in every process of every engine;
SGLang's classes are imported inside of the functions.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

Hook = tuple[str, Callable[..., Any], str]


def family_hooks() -> tuple[Hook, ...]:
    """Return the hooks of all files of this package."""
    modules = (import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    return tuple(hook for module in modules for hook in module.HOOKS)
