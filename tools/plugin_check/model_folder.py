"""A model's folder made in a moment: the config of a small Qwen3, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime.backends.megatron_utils.models import IS_PARTIAL

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    IS_PARTIAL: True,  # flags are not compared with a config class of transformers, whose import takes seconds
}
SPECIAL = ("<bos>", "<eos>", "<pad>")
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|system|>\\nTools: ' + (tools | tojson) + '\\n<eos>' }}{% endif -%}
{%- for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<eos>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}"""


def write_model(folder: Path) -> Path:
    """Write the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<x{number}>" for number in range(int(CONFIG["vocab_size"]) - len(symbols))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.ones(CONFIG["hidden_size"], np.float32)}, folder / "model.safetensors")
    return folder
