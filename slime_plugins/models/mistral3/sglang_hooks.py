"""Mistral 3: lookup of the classes of its parts by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def by_name(original: Callable[..., Any], model: Any, auto_model: Any) -> dict[str, Any]:
    """Return the names of transformers' config classes with those of their models, without importing any.

    SGLang 0.5.15 imports every model of transformers to find two, and fails if one cannot be imported: on a CPU, some
    need packages that exist only for CUDA.
    """
    mapping = auto_model._model_mapping
    return {
        config: mapping._model_mapping[kind]
        for kind, config in mapping._config_mapping.items()
        if kind in mapping._model_mapping
    }


HOOKS = (
    (
        "sglang.srt.models.llava.LlavaForConditionalGeneration._config_cls_name_to_arch_name_mapping",
        by_name,
        "around",
    ),
)
