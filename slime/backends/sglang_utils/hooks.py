"""Registers functions as hooks in SGLang's processes through SGLang's plugin registry, without changing its files.

Processes of engines that slime starts call the ``register`` of each plug-in; in external engines SGLang finds the same
functions through the entry points of the installed package.

A model family lists its hooks in a tuple ``HOOKS`` in ``sglang_hooks.py`` in its folder.  They are registered in every
process of every engine, and import SGLang's classes inside the functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

from slime.weights.family_files import family_files

logger = logging.getLogger(__name__)

Hook = tuple[str, Callable[..., Any], str]
"""Import path of an SGLang function, the function to call, and when: ``before``, ``after``, ``around`` or ``replace``.
"""

_registered: set[Hook] = set()
"""Hooks that this process has registered."""


def register_hooks(hooks: Iterable[Hook], *, only_version: str | None = None) -> None:
    """Register hooks; SGLang applies them when it starts its scheduler and its server.

    Hooks that this process has already registered are skipped, so both slime and SGLang may call a plug-in.

    Args:
        hooks: the hooks to register.
        only_version: the version of SGLang that they need; with another version none is registered.
    """
    if not _has_plugins():
        return
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if only_version not in (None, sglang.__version__):
        return
    for hook in hooks:
        if hook not in _registered:
            _registered.add(hook)
            target, function, when = hook
            HookRegistry.register(target, function, HookType(when))


@cache  # it warns
def _has_plugins() -> bool:
    try:
        import sglang.srt.plugins.hook_registry  # noqa: F401 - is it there
    except ImportError:
        logger.warning("This SGLang has no plugins: it runs without slime's hooks")
        return False
    return True


def family_hooks() -> tuple[Hook, ...]:
    """Return the hooks of all families."""
    modules = map(import_module, family_files("*/sglang_hooks.py"))
    return tuple(hook for module in modules for hook in module.HOOKS)
