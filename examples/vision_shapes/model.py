"""A random Qwen3-VL model of half a million parameters, its tokenizer and its processor, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken

from examples.tiny_arithmetic import model as tiny
from examples.tiny_arithmetic.tokenizer import END_ID, VOCAB_SIZE, build_tokenizer
from slime.utils.processing_utils import import_torchvision

PATCH = 8
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START_ID, STOP_ID, IMAGE_ID, VIDEO_ID = range(VOCAB_SIZE, VOCAB_SIZE + len(VISION_TOKENS))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

TEXT_CONFIG = {
    **{key: tiny.HF_CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
    **{key: tiny.HF_CONFIG[key] for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")},
    "vocab_size": VOCAB_SIZE + len(VISION_TOKENS),
    "max_position_embeddings": 512,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0},
        **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
}
VISION_CONFIG = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "in_channels": 3},
    **{"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"num_position_embeddings": 36, "out_hidden_size": tiny.HIDDEN_SIZE, "deepstack_visual_indexes": [0]},
}
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    **{"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 1024, "longest_edge": 65536}},
}


def write_processor(folder: Path) -> None:
    """Write the tokenizer of the arithmetic task with the tokens of images, and the files of a Qwen3-VL processor."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    processor = {"processor_class": "Qwen3VLProcessor"}
    video = {**IMAGE_PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    for name, content in (("preprocessor", IMAGE_PROCESSOR), ("video_preprocessor", video)):
        (folder / f"{name}_config.json").write_text(json.dumps(content | processor, indent=2) + "\n")


def write_model(folder: Path, seed: int) -> int:
    """Write config, weights and processor into ``folder``; gives the number of parameters."""
    import_torchvision()  # transformers looks for it
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=dict(TEXT_CONFIG),
        vision_config=dict(VISION_CONFIG),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=START_ID,
        vision_end_token_id=STOP_ID,
        tie_word_embeddings=False,
        eos_token_id=END_ID,
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * tiny.INIT_STD)
    model.generation_config.eos_token_id = END_ID
    model.save_pretrained(folder)
    write_processor(folder)
    return sum(parameter.numel() for parameter in model.parameters())
