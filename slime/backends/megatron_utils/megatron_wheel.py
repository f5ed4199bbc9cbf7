"""Make ``megatron.core`` the installed wheel's, whatever else is on the path.

Recipes put a checkout of Megatron-LM on PYTHONPATH.  ``megatron`` is a namespace package, so the checkout's
``megatron/core``, which is earlier on the path, would be imported in place of the wheel's: another version, with
other signatures.  ``megatron.training`` and the like of a checkout stay importable for plug-ins that want them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

DISTRIBUTION = "megatron-core"


def find_wheel() -> importlib.metadata.Distribution | None:
    """Return the installed megatron-core; metadata that a checkout keeps beside its sources do not count."""
    found = list(importlib.metadata.distributions(name=DISTRIBUTION))
    wheels = [distribution for distribution in found if distribution.read_text("WHEEL") and _folder(distribution)]
    return next(iter(wheels or found), None)


def _folder(distribution: importlib.metadata.Distribution) -> Path | None:
    """Return ``.../megatron`` of an installed distribution; None for one that is installed as a link to
    its sources.
    """
    folder = Path(str(distribution.locate_file("megatron")))
    return folder if (folder / "core/__init__.py").is_file() else None


class WheelFinder(importlib.abc.MetaPathFinder):
    """An import hook that finds ``megatron.core`` in one folder; its submodules follow from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the wheel's spec for ``megatron.core``, nothing for other names."""
        if fullname != "megatron.core":
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(self.folder)])


def pin() -> Path | None:
    """Let ``megatron.core`` come from the wheel; gives the wheel's ``megatron`` folder, None when there is no wheel.

    Raises:
        ConfigError: ``megatron.core`` was imported from elsewhere before.
    """
    wheel = find_wheel()
    folder = _folder(wheel) if wheel is not None else None
    if folder is None or any(isinstance(finder, WheelFinder) for finder in sys.meta_path):
        return folder
    imported = sys.modules.get("megatron.core")
    if imported is not None and Path(imported.__file__ or "").parent != folder / "core":
        raise ConfigError(
            f"megatron.core was imported from {imported.__file__} before slime, which needs the installed wheel in "
            f"{folder}; import slime first, or take the Megatron-LM checkout off PYTHONPATH."
        )
    for entry in sys.path:
        other = Path(entry or ".") / "megatron"
        if other != folder and (other / "core/__init__.py").is_file():
            logger.info("megatron.core comes from the wheel in %s, not from the checkout in %s.", folder, other)
    sys.meta_path.insert(0, WheelFinder(folder))
    return folder


def mend_missing_transformer_engine() -> None:
    """Set names that megatron-core 0.16.1 sets only when TransformerEngine imports, and defaults that need it.

    The faults show on CPU and CUDA alike; nothing happens when TransformerEngine is installed.
    """
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # moe_utils.router_gating_linear reads the name whatever was imported: NameError with --moe-router-dtype.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # multi_latent_attention believes in TransformerEngine although its classes are mocks: isinstance() TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    # CheckpointWithoutOutput takes its default, False, for "fp8 is asked for" (it compares with None), and then wants
    # TransformerEngine's fp8 state: NameError with --recompute-modules layernorm or moe_act.
    if not hasattr(tensor_parallel_random, "FP8GlobalStateManager"):
        tensor_parallel_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
