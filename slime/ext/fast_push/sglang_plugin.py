"""Hooks in SGLang's processes for pushes to layers that SGLang repacks (``repacked_layers``) and to engines that have
slept (``kept_tensors``).
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.sglang_utils.hooks import register_hooks
from slime.ext.fast_push.kept_tensors import note_sleep
from slime.ext.fast_push.repacked_layers import reload, watch_repacking

_LOADER = "sglang.srt.model_loader.loader"
_SLEEP = "sglang.srt.managers.scheduler_components.weight_updater"


def register() -> None:
    """Register the hooks; further calls have no effect."""
    register_hooks(
        (
            (f"{_LOADER}._initialize_model", _watch, "after"),
            (f"{_LOADER}.DefaultModelLoader.load_weights_and_postprocess", reload, "around"),
            (f"{_SLEEP}._import_static_state", note_sleep, "after"),
        )
    )


def _watch(model: torch.nn.Module, *args: Any, **options: Any) -> None:
    watch_repacking(model)
