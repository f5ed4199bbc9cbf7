"""Model families: a file, or a folder of which these files are looked for by name.  Nothing else names one, except
the table of vision towers by model type.

family.py         what defines ``FAMILIES`` (``slime.backends.megatron_utils.models``); imports no Megatron, no SGLang
layers.py         what ``--spec`` names by the folder: the layers, where megatron-core's options do not describe them
sglang_hooks.py   what it mends in SGLang (``slime.backends.sglang_utils.hooks``)
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_of_layers(folder: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a family's folder: it has what ``--spec`` asks for, of ``layers.py``.

    These are ``check_stages`` and names that begin with ``get_``; the first of them imports the layers.
    """

    def get(name: str) -> Any:
        if name != "check_stages" and not name.startswith("get_"):
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        import slime.backends.megatron_utils  # noqa: F401  # before layers import megatron.core

        return getattr(import_module(f"{folder}.layers"), name)

    return get
