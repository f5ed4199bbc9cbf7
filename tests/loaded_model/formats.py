"""Folders that the conversion tools write, loaded by SGLang's own model classes: every family in every format.

    python -m tests.loaded_model.formats [FAMILY ...]

Of each model the parameters are scribbled over, the folder is loaded, and every tensor of the folder must then be
found in a parameter, bit for bit: alone, joined with its siblings (q, k, v; gate, up), or stacked (experts).  Nothing
is computed: without CUDA, SGLang has no kernels for these formats.  It asks for the kind of GPU: an H100, it hears.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime.backends.sglang_utils import cpu_shim
from slime.weights.hf_rewrite.run import rewrite_folder
from slime.weights.hf_rewrite.to_quantized import to_fp8, to_int4
from tests.loaded_model.rank import UNWRITTEN, _describe, _enter_world

SIZES = {
    **{"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False},
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
ROUTED = {
    **{"moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
LATENT = {
    **{"kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    "num_key_value_heads": 4,
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 128},
    "glm4_moe": SIZES | ROUTED | {"use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": SIZES | ROUTED | LATENT,
    "qwen3_next": SIZES
    | EXPERTS
    | {"shared_expert_intermediate_size": 128, "num_hidden_layers": 3, "full_attention_interval": 3}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "minimax_m2": SIZES | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
}
FORMATS = {
    "block": to_fp8(),
    "block ue8m0": to_fp8("block", None, "ue8m0"),
    "channel": to_fp8("channel"),
    "tensor": to_fp8("tensor"),
    "int4": to_int4(32),
}
UNKNOWN_TO_SGLANG = {("qwen3_next", "tensor"), ("qwen3_next", "int4")}
"""Its loader of ``in_proj_qkvz`` wants four scales where there is one of the whole matrix, and no packed integers."""
LEFT_OUT_OF_NAMES = {"qwen3_next": ".self_attn"}
"""What the names of the engine's parameters lack of the folder's."""
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
STACKED = (
    # parameter -> the matrices of an expert in it, by either of the names that families have for them
    *(("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))),
    *(("w13", ("w1", "w3")), ("w2", ("w2",))),
)


def build(folder: Path, store: str) -> torch.nn.Module:
    """SGLang's model of a folder, its weights not prepared for any kernel."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    server_args, model_config = _describe(str(folder), 1, "bfloat16")
    _enter_world(server_args, model_config, 0, 1, store)
    load_config = LoadConfig(load_format="dummy")
    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        return _initialize_model(model_config, load_config, _get_quantization_config(model_config, load_config))


def missing(tensors: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> list[str]:
    """The tensors of a folder that no parameter holds; what describes shapes is left out."""
    found = {name for name in tensors if name.endswith("weight_shape")}
    for name, parameter in held.items():
        if name in tensors and same(parameter, [tensors[name]]):
            found.add(name)
        for joined, parts in JOINED.items():
            names = [name.replace(joined, part) for part in parts]
            if f".{joined}." in name and all(part in tensors for part in names):
                if same(parameter, [tensors[part] for part in names]):
                    found.update(names)
        for stacked, parts in STACKED:
            if f".experts.{stacked}_" in name:
                for expert, matrix in enumerate(parameter):
                    names = [name.replace(f"{stacked}_", f"{expert}.{part}.") for part in parts]
                    pieces = [tensors[part] for part in names if part in tensors]
                    # Marlin's kernels want packed integers the other way round.
                    if len(pieces) == len(parts) and (same(matrix, pieces) or same(matrix.T, pieces)):
                        found.update(names)
    return sorted(tensors.keys() - found)


def same(parameter: torch.Tensor, pieces: list[torch.Tensor]) -> bool:
    """Whether a parameter is these tensors one after the other, up to a cast that loses nothing."""
    flat = torch.cat([piece.reshape(-1).float() for piece in pieces])
    return torch.equal(parameter.reshape(-1).float(), flat)


def check(family: str, work: Path) -> bool:
    """Write a model, convert it to every format, load each; prints one line for each."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]), dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    source = work / family
    model.save_pretrained(source, max_shard_size="1MB")
    config = UNWRITTEN.get(family, {}) | json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config))
    is_good = True
    for name, recipe in FORMATS.items():
        if (family, name) in UNKNOWN_TO_SGLANG:
            print(f"{family:12} {name:12} cannot be read by SGLang")
            continue
        folder = work / f"{family} {name}"
        rewrite_folder(recipe, source, folder)
        AutoConfig.from_pretrained(folder)
        tensors = {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}
        engine = build(folder, str(work / "store"))
        for parameter in engine.parameters():
            parameter.data.reshape(-1).view(torch.uint8).fill_(0x5B)
        engine.load_weights(iter(tensors.items()))
        left_out = LEFT_OUT_OF_NAMES.get(family, "")
        tensors = {key.replace(left_out, ""): tensor for key, tensor in tensors.items()}
        lost = missing(tensors, {key: parameter.data for key, parameter in engine.named_parameters()})
        print(f"{family:12} {name:12} {len(tensors):4} tensors, {len(lost)} not found {lost[:3] or ''}", flush=True)
        is_good = is_good and not lost
    return is_good


def main() -> None:
    """All families, or those of the command line."""
    cpu_shim.install()
    if not torch.cuda.is_available():
        torch.cuda.get_device_capability = lambda *_: (9, 0)
    with tempfile.TemporaryDirectory() as work:
        results = [check(family, Path(work)) for family in sys.argv[1:] or FAMILIES]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
