"""DeepSeek-V4: three kinds of attention, four residual streams, experts chosen by a table or by scores.

python -m tests.matrix.families.deepseek_v4 SOURCE TARGET     convert a bf16 folder to the published form
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.matrix.case import (
    SMALL,
    FamilyCase,
    Tensors,
    load_with_transformers,
    read_config,
    read_tensors,
    write_tensors,
    write_with_transformers,
)

PUBLISHED = (
    # names that transformers 5.12.1 saves -> names in published folders, one after the other
    *((r"^model\.hc_head\.hc_", "hc_head_"), (r"^model\.embed_tokens\.", "embed."), (r"^lm_head\.", "head.")),
    *((r"^model\.", ""), (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."), (r"\.q_a_norm\.", ".q_norm.")),
    *((r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm.")),
    *((r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.sinks$", ".attn_sink"), (r"\.position_bias$", ".ape")),
    (r"\.compressor\.indexer\.(scorer\.)?(?=weights_proj|q_b_proj)", ".indexer."),
    *((r"\.compressor\.indexer\.", ".indexer.compressor."), (r"compressor\.kv_norm\.", "compressor.norm.")),
    *(
        (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
        (r"\.kv_proj\.", ".wkv."),
        (r"compressor\.gate_proj\.", "compressor.wgate."),
    ),
    *((r"\.gate\.e_score_correction_bias$", ".gate.bias"), (r"experts\.gate_proj\.", "experts.w1.")),
    *((r"experts\.down_proj\.", "experts.w2."), (r"experts\.up_proj\.", "experts.w3.")),
)


def published_names(tensors: Tensors) -> Tensors:
    """The tensors that transformers 5.12.1 saved, under the names of published folders, which it reads."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, target in PUBLISHED:
            name = re.sub(pattern, target, name)
        renamed[name] = tensor
    return renamed


class Reference(torch.nn.Module):
    """transformers' model, saved under the names of published folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = load_with_transformers(folder)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(ids)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        write_tensors(Path(folder), without_tables(published_names(read_tensors(Path(folder)))))


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """With expert tables, sinks, position biases and streams that matter."""
    count = case.config["num_hidden_layers"]
    kinds = {key: list(itertools.islice(itertools.cycle(case.config[key]), count)) for key in ("layer_types",)}
    kinds["mlp_layer_types"] = ["hash_moe"] + ["moe"] * (count - 1)
    write_with_transformers(replace(case, config={**case.config, **kinds}), folder, seed)
    tensors, generator = published_names(read_tensors(folder)), torch.Generator().manual_seed(seed + 1)
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            scores = torch.rand(len(tensor), case.config["n_routed_experts"], generator=generator)
            tensor.copy_(scores.topk(tensor.size(1)).indices)
        elif name.endswith(("attn_sink", "ape", "_base", "_scale")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    write_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(published_config(read_config(folder)), indent=2))


def published_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers saved, with the keys of published folders, which SGLang reads."""
    kinds, rates, rotary = (config.pop(key) for key in ("layer_types", "compress_rates", "rope_parameters"))
    keys = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    scaling = {"type": "yarn"} | {key: rotary["compress"][key] for key in keys}
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    del config["partial_rotary_factor"]
    return config | {
        **{"compress_ratios": [ratios[kind] for kind in kinds], "rope_scaling": scaling, "topk_method": "noaux_tc"},
        **{"compress_rate_hca": rates["heavily_compressed_attention"], "v_head_dim": config["head_dim"]},
        "num_hash_layers": config.pop("mlp_layer_types").count("hash_moe"),
    }


EIGHT_BITS = re.compile(
    r"layers\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123])\.weight"
)
FOUR_BITS = re.compile(r"layers\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EVEN_FIRST = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""Codes of e2m1, ordered so that the first of the nearest ones ends in 0."""
BLOCK = 128


def publish(source: Path, target: Path) -> None:
    """Write the folder like the published DeepSeek-V4-Flash: FP8 layers, FP4 experts, one-byte scales."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: Tensors = {}
    for name, tensor in read_tensors(source).items():
        scale_name = name.removesuffix("weight") + "scale"
        if EIGHT_BITS.fullmatch(name):
            tensors[name], tensors[scale_name] = in_eight_bits(tensor.float())
        elif FOUR_BITS.fullmatch(name):
            tensors[name], tensors[scale_name] = in_four_bits(tensor.float())
        else:
            tensors[name] = tensor
    write_tensors(target, tensors)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    quantization |= {"weight_block_size": [BLOCK, BLOCK]}
    config = read_config(target) | {"quantization_config": quantization, "expert_dtype": "fp4"}
    (target / "config.json").write_text(json.dumps(config, indent=2))


def power_of_two_above(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each number."""
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp(torch.ones_like(numbers), exponent - (mantissa == 0.5).int())


def in_eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    height, width = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(height * BLOCK, width * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(height, BLOCK, width, BLOCK)
    scale = power_of_two_above(blocks.abs().amax((1, 3)) / 448)
    numbers = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return numbers.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def in_four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.view(len(weight), -1, 32)
    scale = power_of_two_above(groups.abs().amax(2) / 6)
    distances = ((groups / scale[..., None]).abs()[..., None] - FP4[EVEN_FIRST]).abs()
    codes = EVEN_FIRST[distances.argmin(-1)] + 8 * torch.signbit(groups)
    pairs = codes.view(len(weight), -1, 2)
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8).view(torch.int8), scale.to(torch.float8_e8m0fnu)


def without_tables(tensors: Tensors) -> Tensors:
    """The tensors of a folder that a trainer holds."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("tid2eid")}


CASE = FamilyCase(
    name="deepseek_v4",
    config={
        **SMALL,
        "model_type": "deepseek_v4",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.375,
        "q_lora_rank": 20,
        "o_groups": 2,
        "o_lora_rank": 12,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "sliding_window": 5,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 3,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 20,
        "swiglu_limit": 0.55,  # with 0.5 a gate comes within 4e-7 in training, and rounding would decide its gradient
        "rope_theta": 10000.0,
        "compress_rope_theta": 16000.0,
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            **{"beta_fast": 32.0, "beta_slow": 1.0},
        },
        "rms_norm_eps": 1e-6,
    },
    write=write,
    reference=Reference,
    pushed=without_tables,
    has_experts=True,
    about="a window of 5 tokens in all layers; entries of 4 tokens, of which 3 are chosen, in layer 2 of 3, of 6 "
    "in layer 3; 3 streams; experts by a table in layer 1; clamps that bind",
)
ENGINE = replace(
    CASE,
    name="deepseek_v4-128",
    config={
        **{**CASE.config, "head_dim": 32, "partial_rotary_factor": 0.25, "hc_mult": 4},
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
    about="the same with entries of 128 tokens, the only ones that engines have, and 4 streams",
)
QUANTIZED = replace(
    ENGINE,
    name="deepseek_v4-fp4",
    config={
        **{**ENGINE.config, "hidden_size": 128, "q_lora_rank": 128, "head_dim": 64, "partial_rotary_factor": 0.125},
        **{"o_lora_rank": 128, "moe_intermediate_size": 256},
    },
    publish=publish,
    about="the same in whole blocks of FP8, for the form in which it is published",
)
CASES = (CASE, ENGINE, QUANTIZED)

if __name__ == "__main__":
    publish(*map(Path, sys.argv[1:]))
