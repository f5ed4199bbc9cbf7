"""OLMo 3: the rotary settings of its config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rotary_settings(original: Callable[..., None], config: Any, **options: Any) -> None:
    """Set the rotary settings of config.json on the config, in the format of transformers 4 or 5.

    With transformers 5, SGLang 0.5.15 reads neither format: the base is missing, or positions are checked too early.
    """
    given = options.pop("rope_parameters", None) or options.pop("rope_scaling", None) or {}
    base = given.get("rope_theta") or options.get("rope_theta")
    rotary = {"rope_type": "default", **given, "rope_theta": base}
    original(config, **{**options, "rope_theta": base, "rope_scaling": rotary})


HOOKS = (("sglang.srt.configs.olmo3.Olmo3Config.__init__", rotary_settings, "around"),)
