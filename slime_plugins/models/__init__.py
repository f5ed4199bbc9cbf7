"""Model families.  Each is a file, or a folder with the files below, which are found by name.  No other code names a
family, except the table of vision towers by model type.

family.py         defines ``FAMILIES`` (``slime.backends.megatron_utils.models``); imports neither Megatron nor SGLang
layers.py         layers that megatron-core's options cannot describe; ``--spec`` names them through the folder
sglang_hooks.py   fixes in SGLang (``slime.backends.sglang_utils.hooks``)
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_of_layers(folder: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a family's folder, which forwards the names that ``--spec`` uses to ``layers.py``.

    These are names that start with ``get_``, and ``check_stages``: called with the model's config, ``--hf-checkpoint``
    and whether both post-norm flags are given, it raises ConfigError for flags that the layers do not support.  The
    first access imports the layers.
    """

    def get(name: str) -> Any:
        if name != "check_stages" and not name.startswith("get_"):
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        import slime.backends.megatron_utils  # noqa: F401  # before layers import megatron.core

        return getattr(import_module(f"{folder}.layers"), name)

    return get
