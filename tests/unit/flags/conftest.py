"""A model folder, a prompt file and a minimal command, for tests of flags."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.flags.parse import GROUPS
from slime.flags.parser import Parser

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with all files; its weights are empty."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Two rows with the columns input and label."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": "4"}\n')
    return file


@pytest.fixture
def command(model_folder: Path, prompt_file: Path) -> list[str]:
    """The minimal complete command, without the model's shape."""
    return [
        *("--hf-checkpoint", str(model_folder), "--ref-load", str(model_folder)),
        *("--prompt-data", str(prompt_file), "--label-key", "label", "--rm-type", "math"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--num-rollout", "1", "--num-steps-per-rollout", "1"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    ]


@pytest.fixture
def make_args(command: list[str]) -> Callable[..., Namespace]:
    """Parse the minimal command and more words with slime's own flags, without deriving or checking anything."""

    def make(*words: str, without: tuple[str, ...] = ()) -> Namespace:
        kept = list(command)
        for flag in without:
            position = kept.index(flag)
            del kept[position : position + 2]
        # Megatron flags that slime's rules read.
        megatron = Namespace(
            bf16=False, fp16=False, ckpt_step=None, no_load_optim=False, no_load_rng=False, finetune=False
        )
        return Parser(GROUPS).parse_args([*kept, *words], namespace=megatron)

    return make
