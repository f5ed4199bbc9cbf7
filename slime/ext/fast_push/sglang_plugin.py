"""Hooks in SGLang's processes that let layers be pushed which SGLang repacks; see ``repacked_layers``.

The processes of engines that slime starts register them; in an engine of somebody else SGLang finds them by the entry
point of the installed package.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from slime.ext.fast_push.repacked_layers import reload, watch_repacking

_LOADER = "sglang.srt.model_loader.loader"


@cache  # one registry per process
def register() -> None:
    """Register the hooks; again: no effect."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        return  # the core's plugin warns
    HookRegistry.register(f"{_LOADER}._initialize_model", _watch, HookType.AFTER)
    HookRegistry.register(f"{_LOADER}.DefaultModelLoader.load_weights_and_postprocess", reload, HookType.AROUND)


def _watch(model: torch.nn.Module, *args: Any, **options: Any) -> None:
    watch_repacking(model)
