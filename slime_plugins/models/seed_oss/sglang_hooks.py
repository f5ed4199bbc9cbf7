"""Seed-OSS: a class that serves it."""

from __future__ import annotations

from typing import Any


def serve_as_qwen2(*_: Any) -> None:
    """Serve Seed-OSS, whose layers are Qwen2's with heads of any width, with the class of Qwen2.

    SGLang 0.5.15 has no class for it, and would run transformers' layers.
    """
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models.setdefault("SeedOssForCausalLM", ModelRegistry.models["Qwen2ForCausalLM"])


def keep_width(layer: Any, config: Any, *_: Any, **__: Any) -> None:
    """Make Qwen2's layers read the head width from the config.

    On a CPU SGLang sets the number of heads before padding, by which Qwen2's layers divide the hidden size.
    """
    if config.model_type == "seed_oss":
        vars(config).pop("original_num_attention_heads", None)


HOOKS = (
    ("sglang.srt.model_loader.utils.get_model_architecture", serve_as_qwen2, "before"),
    ("sglang.srt.models.qwen2.Qwen2DecoderLayer.__init__", keep_width, "before"),
)
