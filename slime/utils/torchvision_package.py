"""Imports torchvision, which image processors and SGLang need, working around an install that does not match torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def import_torchvision() -> bool:
    """Import torchvision, which image processors need; return False if it is not installed or does not work.

    ``make install`` puts it into ``.venv/vision``, which this process searches from here on.  A build for CUDA beside
    a torch without it lacks its operators.  They are then declared, without kernels: preparing images needs none, but
    transformers imports no processor, and few models, beside a torchvision that fails.
    """
    is_hidden = importlib.util.find_spec("torchvision") is None
    if is_hidden:
        folder = Path(sys.prefix) / "vision"
        if not (folder / "torchvision").is_dir():
            return False
        sys.path.append(str(folder))
    for declares in (False, True):
        if declares:
            _declare_operators()
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError, OSError):
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            if is_hidden:
                tell_transformers()
            return True
    return False


def tell_transformers() -> None:
    """Let a transformers that has already looked for torchvision look again.

    SGLang registers image processors with ``AutoImageProcessor`` at import; transformers replaces that class by a
    placeholder when it finds no torchvision; so it does with a module that the docstrings of its models look into.
    """
    loaded = sys.modules.get("transformers.utils.import_utils")
    if loaded is None:
        return
    loaded.is_torchvision_available.cache_clear()
    importlib.import_module("transformers.models.auto.video_processing_auto")
    transformers = sys.modules["transformers"]
    if getattr(type(transformers.AutoImageProcessor), "is_dummy", False):
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        setattr(transformers, "AutoImageProcessor", AutoImageProcessor)  # noqa: B010 (a module, not our class)


@functools.cache
def _declare_operators() -> Any:
    """Declare what torchvision looks up while it is imported; the library lives as long as the process."""
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
