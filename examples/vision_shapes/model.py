"""Random vision-language models with about half a million parameters, written as Hugging Face folders.

Families: Qwen2.5-VL, Qwen3-VL, Qwen3.5-VL and GLM-4V, the last also with experts.  Folders include tokenizer and
processor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from examples.tiny_arithmetic import model as tiny
from examples.tiny_arithmetic.tokenizer import END_ID, VOCAB_SIZE, build_tokenizer
from slime.utils.torchvision_package import import_torchvision

PATCH = 8
START_ID, STOP_ID, IMAGE_ID, VIDEO_ID = range(VOCAB_SIZE, VOCAB_SIZE + 4)
"""Ids of start and end of an image, and of the image and video placeholders, in every family."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts that differ between families."""

    config_class: str
    """Config class in transformers."""
    processor: str
    """Prefix of the class names of its processors."""
    image_processor: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    more_ids: Mapping[str, int]
    """Additional token ids in config.json."""
    tokens: tuple[str, ...]
    """Special tokens with ids from ``START_ID`` on."""
    video_processor: str = ""
    """Class of the video processor, if its name does not follow from ``processor``."""

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE + len(self.tokens)


_TEXT = {
    **{key: tiny.HF_CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
    **{key: tiny.HF_CONFIG[key] for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")},
    "max_position_embeddings": 512,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_VISION = {
    **{"depth": 2, "hidden_size": 64, "num_heads": 2, "in_channels": 3},
    **{"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": tiny.HIDDEN_SIZE},
}
_QWEN_VISION = {**_VISION, "intermediate_size": 128, "num_position_embeddings": 36}
_QWEN: dict[str, Any] = {
    "processor": "Qwen3VL",
    "image_processor": "Qwen2VLImageProcessor",
    "more_ids": {"vision_start_token_id": START_ID, "vision_end_token_id": STOP_ID},
    "tokens": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
}
_GLM: dict[str, Any] = {
    "processor": "Glm4v",
    "image_processor": "Glm4vImageProcessor",
    "more_ids": {
        **{"image_start_token_id": START_ID, "image_end_token_id": STOP_ID},
        **{"video_start_token_id": VIDEO_ID + 1, "video_end_token_id": VIDEO_ID + 2},
    },
    "tokens": (
        *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        *("<|begin_of_video|>", "<|end_of_video|>"),
    ),
    "vision": {**_VISION, "intermediate_size": 128, "image_size": 6 * PATCH},
}
_GLM_ROPE = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
FAMILIES = {
    "qwen2_5_vl": Family(
        config_class="Qwen2_5_VLConfig",
        text={
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "rope_parameters": {**_ROPE, "mrope_section": [8, 4, 4]},
        },
        # SGLang mistakes patches of any other size for rows of the tower's output.
        vision={
            **_VISION,
            **{"patch_size": 14, "window_size": 4 * 14, "fullatt_block_indexes": [1], "intermediate_size": 128},
        },
        video_processor="Qwen2VLVideoProcessor",
        **{**_QWEN, "processor": "Qwen2_5_VL"},
    ),
    "qwen3_vl": Family(
        config_class="Qwen3VLConfig",
        text={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        vision={**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_QWEN,
    ),
    "qwen3_5": Family(
        config_class="Qwen3_5Config",
        text={
            **_TEXT,
            "partial_rotary_factor": 0.5,  # the engine reads it only from here
            "rope_parameters": {
                **_ROPE,
                **{"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
            },
            "layer_types": ["linear_attention", "full_attention"],
            "full_attention_interval": 2,
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
        },
        vision={**_QWEN_VISION, "deepstack_visual_indexes": []},
        **_QWEN,
    ),
    "glm4v": Family(config_class="Glm4vConfig", text={**_TEXT, "rope_parameters": _GLM_ROPE}, **_GLM),
    "glm4v_moe": Family(
        config_class="Glm4vMoeConfig",
        text={
            **_TEXT,
            "rope_parameters": _GLM_ROPE,
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1},
            **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 1.0, "attention_bias": True},
        },
        **_GLM,
    ),
}
DEFAULT = "qwen3_vl"


def write_processor(folder: Path, family: str = DEFAULT) -> None:
    """Write the tokenizer of the arithmetic task, extended by the image tokens, and the processor files."""
    kind = FAMILIES[family]
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True, normalized=False) for text in kind.tokens]}
    )
    start, stop, image = kind.tokens[:3]
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", start + image + stop)
    tokenizer.save_pretrained(folder)
    shared = {
        **{"patch_size": kind.vision["patch_size"], "merge_size": 2, "temporal_patch_size": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 1024, "longest_edge": 65536}},
        "processor_class": f"{kind.processor}Processor",
    }
    for name, which in (
        ("preprocessor", {"image_processor_type": kind.image_processor}),
        (
            "video_preprocessor",
            {"video_processor_type": kind.video_processor or f"{kind.processor}VideoProcessor"},
        ),
    ):
        (folder / f"{name}_config.json").write_text(json.dumps(which | shared, indent=2) + "\n")


def write_model(folder: Path, seed: int, family: str = DEFAULT) -> int:
    """Write config, weights and processor into ``folder``; return the number of parameters."""
    import_torchvision()  # transformers needs it
    import transformers

    kind = FAMILIES[family]
    config = getattr(transformers, kind.config_class)(
        text_config={**kind.text, "vocab_size": kind.vocab_size},
        vision_config=dict(kind.vision),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        tie_word_embeddings=False,
        eos_token_id=END_ID,
        **kind.more_ids,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * tiny.INIT_STD)
    model.generation_config.eos_token_id = END_ID
    model.save_pretrained(folder)
    write_processor(folder, family)
    return sum(parameter.numel() for parameter in model.parameters())
