"""Hooks in the processes of prefill and decode engines (``request_halves``), and a transfer engine without a GPU."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.hooks import register_hooks
from slime.ext.prefill_decode.request_halves import HOOKS, LONELY_ROOMS, end_lonely_rooms


class Patience:
    """How long a decode engine of this process waits for a prefill engine to get its half of a request."""

    seconds = 30.0
    """In an engine that somebody else started."""


def register(patience_s: float | None = None) -> None:
    """Register the hooks; again, as SGLang does by the entry point in slime's own engines: no effect."""
    if patience_s is not None:
        Patience.seconds = patience_s
    if cpu_shim.is_needed() and "mooncake" not in sys.modules and find_spec("mooncake") is None:
        install_transfer_engine()
    register_hooks((*HOOKS, (LONELY_ROOMS, _end_lonely_rooms, "after")), only_version=cpu_shim.TESTED_SGLANG)


def _end_lonely_rooms(result: Any, queue: Any, *args: Any, **options: Any) -> None:
    end_lonely_rooms(queue, patience_s=Patience.seconds)


def install_transfer_engine() -> None:
    """Let prefill and decode engines of this machine move keys and values; see ``transfer_engine``."""

    def attribute(name: str) -> Any:
        if name != "TransferEngine":
            raise AttributeError(name)
        from slime.ext.prefill_decode.transfer_engine import TransferEngine

        return TransferEngine

    package = ModuleType("mooncake", "Only the part that SGLang's prefill/decode disaggregation imports.")
    package.__path__ = []  # a package: any other submodule is not found
    package.__spec__ = ModuleSpec("mooncake", None, is_package=True)
    engine = ModuleType("mooncake.engine")
    engine.__spec__ = ModuleSpec("mooncake.engine", None)
    engine.__getattr__ = attribute  # type: ignore[method-assign]
    package.engine = engine  # type: ignore[attr-defined]
    sys.modules |= {"mooncake": package, "mooncake.engine": engine}
