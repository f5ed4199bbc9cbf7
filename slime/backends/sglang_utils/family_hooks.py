"""What model families mend in SGLang: the files ``sglang_hooks.py`` in their folders.

One defines ``HOOKS``: for each function of SGLang, its import path, the function called in its place or beside it,
and when (``before``, ``after``, ``around``, ``replace``).  Being there registers it in every process of every engine;
SGLang's classes are imported inside of the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from slime.weights.family_files import family_files

Hook = tuple[str, Callable[..., Any], str]


def family_hooks() -> tuple[Hook, ...]:
    """Return the hooks of all families."""
    modules = map(import_module, family_files("*/sglang_hooks.py"))
    return tuple(hook for module in modules for hook in module.HOOKS)
