"""Everything that a recipe reads: a small random model of its family with a tokenizer, converted checkpoints, and
arithmetic questions, under the names that the recipe expects."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.tiny_arithmetic import task
from examples.tiny_arithmetic.tokenizer import END_ID, PAD_ID, VOCAB_SIZE, build_tokenizer
from examples.vision_shapes import model as vision
from tests.e2e.vision_jobs import write_rows
from tests.matrix import case as matrix
from tests.matrix.case import FamilyCase, load_cases

NUM_QUESTIONS = {"dapo-math-17k": 64, "aime-2024": 4}
PUBLISHED = {
    "glm4_moe": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe_lite": {
        **{"moe_layer_freq": 1, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    },
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm_moe_dsa": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Keys of published config.json that SGLang needs and transformers does not write."""
MIMO_CONFIG = '''"""The config class of MiMo, as a published folder brings it."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
'''


def write_questions(base: Path) -> None:
    sets = task.split_operands(NUM_QUESTIONS, seed=2026)
    for name, operands in sets.items():
        path = base / name / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in task.prompt_rows(operands)))


def write_model(folder: Path, family: str, sizes: dict[str, Any], *, weight_std: float, dtype: torch.dtype) -> None:
    """Write a random model with a tokenizer of one token per character.

    Args:
        folder: created here, empty.
        family: a case of tests/matrix/families.
        sizes: keys of config.json that override the case's.
        weight_std: standard deviation of the matrices; wide models need less.
        dtype: dtype of the checkpoint.
    """
    given = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, **sizes}
    case = load_cases([family])[family]
    case = replace(case, config={**case.config, **given})
    if given.get("num_nextn_predict_layers"):
        case = _with_mtp(case)
    folder.mkdir(parents=True)
    case.write_checkpoint(folder, seed=3)
    tensors = matrix.read_tensors(folder)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if tensor.dim() > 1:
            tensor *= weight_std / matrix.WEIGHT_STD
        if not name.endswith(matrix.FP32_IN_BF16_CHECKPOINTS):
            tensors[name] = tensor.to(dtype)
    matrix.write_tensors(folder, tensors)
    (folder / "tokenizer.json").unlink()
    build_tokenizer().save_pretrained(folder)
    config = matrix.read_config(folder)
    config |= PUBLISHED.get(config["model_type"], {})
    config |= {"eos_token_id": END_ID, "pad_token_id": PAD_ID, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    if config["model_type"] == "mimo":
        (folder / "configuration_mimo.py").write_text(MIMO_CONFIG)
        config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID, "pad_token_id": PAD_ID}))


def write_pictures(base: Path, folder: str, family: str) -> None:
    """Write a random vision-language model in fp32 with its processor, and questions about images."""
    vision.write_model(base / folder, seed=3, family=family)
    write_rows(base / "geo3k" / "train.parquet")


def _with_mtp(case: FamilyCase) -> FamilyCase:
    """Return the case with a writer of checkpoints with MTP layers, if it has none."""
    from tests.matrix.references.mtp import write_with_mtp

    return case if case.write else replace(case, write=write_with_mtp)


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
