"""Seed-OSS: a class that serves it."""

from __future__ import annotations

from typing import Any


def serve_as_qwen2(*_: Any) -> None:
    """Give Seed-OSS, whose layers are Qwen2's with heads of any width, the class of Qwen2.

    SGLang 0.5.15 has none, and would run transformers' layers.
    """
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models.setdefault("SeedOssForCausalLM", ModelRegistry.models["Qwen2ForCausalLM"])


HOOKS = (("sglang.srt.model_loader.utils.get_model_architecture", serve_as_qwen2, "before"),)
