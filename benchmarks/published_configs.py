"""Configs of published models, written by hand: the entries of config.json that define their shape."""

from __future__ import annotations

from typing import Any


def shape(layers: int, hidden: int, ffn: int, heads: int, groups: int | None = None, **more: Any) -> dict[str, Any]:
    values = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        **more,
    }
    return values if groups is None else {**values, "num_key_value_heads": groups}


def qwen25(*sizes: int, tied: bool, vocab: int = 151936, eps: float = 1e-6, base: float = 1e6) -> dict[str, Any]:
    more = {"rms_norm_eps": eps, "rope_theta": base, "vocab_size": vocab, "tie_word_embeddings": tied}
    return shape(*sizes, model_type="qwen2", **more)


def qwen3(*sizes: int, tied: bool, base: float = 1e6) -> dict[str, Any]:
    more = {"rms_norm_eps": 1e-6, "rope_theta": base, "vocab_size": 151936, "tie_word_embeddings": tied}
    return shape(*sizes, 8, model_type="qwen3", head_dim=128, attention_bias=False, **more)


def qwen3_moe(*sizes: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True}
    return {**qwen3(*sizes, tied=False), "num_key_value_heads": 4, "model_type": "qwen3_moe", **experts}


def llama(*sizes: int, head: int, factor: float, tied: bool) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return shape(
        *sizes,
        8,
        model_type="llama",
        head_dim=head,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={**scaling, "original_max_position_embeddings": 8192},
        max_position_embeddings=131072,
        vocab_size=128256,
        tie_word_embeddings=tied,
        attention_bias=False,
    )


def sigmoid_experts(count: int, chosen: int, size: int, dense: int, scaling: float, **more: Any) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": scaling,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        **more,
    }


def latents(q: int | None, nope: int, rope: int, v: int) -> dict[str, Any]:
    sizes = {"q_lora_rank": q, "kv_lora_rank": 512, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope}
    return {**sizes, "v_head_dim": v}


def yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": factor, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {**scaling, "beta_fast": beta_fast, "beta_slow": 1, "original_max_position_embeddings": 4096}


GLM4 = {
    "model_type": "glm4",
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "tie_word_embeddings": False,
}
GLM45 = {**GLM4, "model_type": "glm4_moe", "rope_theta": 1e6, "attention_bias": True}
GLM45_355B = shape(92, 5120, 12288, 96, 8, use_qk_norm=True, **sigmoid_experts(160, 8, 1536, 3, 2.5) | GLM45)
GLM5 = {
    **shape(78, 6144, 12288, 64),
    **latents(2048, 192, 64, 256),
    **sigmoid_experts(256, 8, 2048, 3, 2.5),
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "vocab_size": 154880,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
}
DEEPSEEK = {
    **shape(61, 7168, 18432, 128),
    **latents(1536, 128, 64, 128),
    **sigmoid_experts(256, 8, 2048, 3, 2.5, n_group=8, topk_group=4, scoring_func="sigmoid"),
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "rope_theta": 10000,
    "rope_scaling": yarn(40, 32),
    "max_position_embeddings": 163840,
}
DEEPSEEK_V4_FLASH = {
    **{"num_hidden_layers": 43, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_attention_heads": 64},
    **{"num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "vocab_size": 129280},
    **{"o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512},
    **{"sliding_window": 128, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000},
    **{"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": 3, "swiglu_limit": 10.0},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus"},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.5, "topk_method": "noaux_tc", "rms_norm_eps": 1e-6},
    **{"rope_theta": 10000, "max_position_embeddings": 1048576, "tie_word_embeddings": False},
    **{"model_type": "deepseek_v4", "attention_bias": False, "num_nextn_predict_layers": 1},
    "rope_scaling": {
        **{"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1},
        "original_max_position_embeddings": 65536,
    },
}
KIMI = {
    **DEEPSEEK,
    **sigmoid_experts(384, 8, 2048, 1, 2.827, scoring_func="sigmoid"),
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
}
MINIMAX_M2 = {
    **shape(62, 3072, 1536, 48, 8),
    "model_type": "minimax_m2",
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "rms_norm_eps": 1e-6,
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "tie_word_embeddings": False,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_mtp": True,
    "num_mtp_modules": 3,
}
NEMOTRON_H = {
    **{"model_type": "nemotron_h", "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": False},
    **{"layer_norm_epsilon": 1e-5, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2},
    **{"mlp_hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "use_bias": False},
    **{"mamba_hidden_act": "silu", "mamba_proj_bias": False, "use_conv_bias": True, "chunk_size": 128},
    **{"rope_theta": 10000, "partial_rotary_factor": 1.0, "sliding_window": None, "residual_in_fp32": False},
    **{"time_step_min": 0.001, "time_step_max": 0.1, "time_step_limit": [0.0, float("inf")]},
}
QWEN3_NEXT = {
    **qwen3_moe(48, 2048, 5120, 16, expert=512),
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def qwen3_vl(kind: str, text: dict[str, Any], depth: int = 27, hidden: int = 1152, ffn: int = 4304) -> dict[str, Any]:
    """Like :func:`qwen35`, with a vision tower of these sizes, whose features three layers use."""
    tied = text["tie_word_embeddings"]
    text = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    text |= {"model_type": f"{kind}_text", "rope_theta": 5000000}
    text["rope_scaling"] = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    vision = {
        **{"model_type": kind, "depth": depth, "hidden_size": hidden, "intermediate_size": ffn, "num_heads": 16},
        **{"in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2},
        **{"num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"]},
        "deepstack_visual_indexes": [8, 16, 24] if depth == 27 else [5, 11, 17],
    }
    return {
        **{"model_type": kind, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied},
        **{"image_token_id": 151655, "video_token_id": 151656},
    }


GLM46V = {
    "text_config": {
        **shape(46, 4096, 10944, 96, 8, use_qk_norm=False, **sigmoid_experts(128, 8, 1408, 1, 1.0) | GLM45),
        "model_type": "glm4v_moe_text",
        "rope_theta": 500000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        **{"depth": 24, "hidden_size": 1536, "intermediate_size": 10944, "num_heads": 12, "out_hidden_size": 4096},
        **{"in_channels": 3, "image_size": 336, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
    },
    **{"model_type": "glm4v_moe", "tie_word_embeddings": False, "image_token_id": 151363, "video_token_id": 151364},
}


def qwen35(kind: str, layers: int, hidden: int, ffn: int | None, heads: int, groups: int, values: int, tied: bool):
    """The language model's part is in ``text_config``."""
    text = {
        "model_type": f"{kind}_text",
        **{"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads},
        **{"num_key_value_heads": groups, "head_dim": 256, "attn_output_gate": True, "attention_bias": False},
        **{"rms_norm_eps": 1e-6, "vocab_size": 248320, "tie_word_embeddings": tied, "dtype": "bfloat16"},
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        **{"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": values},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
            **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        },
    }
    if ffn is not None:
        text["intermediate_size"] = ffn
    else:
        text |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        text |= {"num_experts": 256, "num_experts_per_tok": 8}
    vision = {"depth": 27, "hidden_size": 1152}
    return {"model_type": kind, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        **shape(layers, 2880, 2880, 64, 8, model_type="gpt_oss", head_dim=64, attention_bias=True),
        **{"num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0},
        **{"rms_norm_eps": 1e-5, "rope_theta": 150000, "vocab_size": 201088, "tie_word_embeddings": False},
        "rope_scaling": {**scaling, "original_max_position_embeddings": 4096},
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "qwen2.5-0.5B": qwen25(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5B": qwen25(28, 1536, 8960, 12, 2, tied=True, base=10000.0),
    "qwen2.5-3B": qwen25(36, 2048, 11008, 16, 2, tied=True),
    "qwen2.5-7B": qwen25(28, 3584, 18944, 28, 4, tied=False, vocab=152064),
    "qwen2.5-32B": qwen25(64, 5120, 27648, 40, 8, tied=False, vocab=152064, eps=1e-5),
    "qwen2.5-vl-7B": {
        **qwen25(28, 3584, 18944, 28, 4, tied=False, vocab=152064),
        **{"model_type": "qwen2_5_vl", "image_token_id": 151655, "video_token_id": 151656},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3},
            **{"out_hidden_size": 3584, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
            **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2},
        },
    },
    "qwen3-0.6B": qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7B": qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4B": qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-4B-Instruct-2507": qwen3(36, 2560, 9728, 32, tied=True, base=5e6),
    "qwen3-8B": qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-14B": qwen3(40, 5120, 17408, 40, tied=False),
    "qwen3-32B": qwen3(64, 5120, 25600, 64, tied=False),
    "qwen3-30B-A3B": qwen3_moe(48, 2048, 6144, 32, expert=768),
    "qwen3-235B-A22B": qwen3_moe(94, 4096, 12288, 64, expert=1536),
    "qwen3-vl-30B-A3B": qwen3_vl(
        "qwen3_vl_moe", {**qwen3_moe(48, 2048, 6144, 32, expert=768), "decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    "qwen3-next-80B-A3B": QWEN3_NEXT,
    "qwen3.5-0.8B": qwen35("qwen3_5", 24, 1024, 3584, 8, 2, 16, True),
    "qwen3.5-4B": qwen35("qwen3_5", 32, 2560, 9216, 16, 4, 32, True),
    "qwen3.5-9B": qwen35("qwen3_5", 32, 4096, 12288, 16, 4, 32, False),
    "qwen3.5-27B": qwen35("qwen3_5", 64, 5120, 17408, 24, 4, 48, False),
    "qwen3.5-35B-A3B": qwen35("qwen3_5_moe", 40, 2048, None, 16, 2, 32, False),
    "gemma3-1B": {
        "model_type": "gemma3_text",
        **{"num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4},
        **{"num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "vocab_size": 262144},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "attention_bias": False},
    },
    "gemma4-31B": {
        **{"model_type": "gemma4", "vision_config": {"model_type": "gemma4_vision"}, "audio_config": None},
        "text_config": {
            **{"model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504},
            **{"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
            **{"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "vocab_size": 262144},
            **{"sliding_window": 1024, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6},
            **{"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        },
    },
    "gemma4-26B-A4B": {
        **{"model_type": "gemma4", "vision_config": {"model_type": "gemma4_vision"}, "audio_config": None},
        "text_config": {
            **{"model_type": "gemma4_text", "num_hidden_layers": 30, "hidden_size": 2816, "intermediate_size": 2112},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2},
            **{"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "vocab_size": 262144},
            **{"sliding_window": 1024, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6},
            **{"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
            **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        },
    },
    "olmo3-7B": shape(
        *(32, 4096, 11008, 32, 32),
        **{"model_type": "olmo3", "vocab_size": 100278, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6},
        **{"sliding_window": 4096, "attention_bias": False, "tie_word_embeddings": False, "rope_theta": 500000},
        rope_scaling={
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
            **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "mixtral-8x7B": shape(
        *(32, 4096, 14336, 32, 8),
        **{"model_type": "mixtral", "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False},
        max_position_embeddings=32768,
    ),
    "seed-oss-36B": shape(
        *(64, 5120, 27648, 80, 8),
        **{"model_type": "seed_oss", "vocab_size": 155136, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0},
        **{"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        **{"max_position_embeddings": 524288, "tie_word_embeddings": False},
    ),
    "mistral-small-3.1-24B": {
        "text_config": shape(
            *(40, 5120, 32768, 32, 8),
            **{"model_type": "mistral", "vocab_size": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e9},
            **{"head_dim": 128, "sliding_window": None, "max_position_embeddings": 131072},
        ),
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "head_dim": 64, "patch_size": 14, "image_size": 1540},
        },
        **{"model_type": "mistral3", "image_token_index": 10},
    },
    "nemotron3-nano-30B-A3B": {
        **shape(52, 2688, 1856, 32, 2, **NEMOTRON_H, mamba_num_heads=64, mamba_head_dim=64),
        **{"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_routed_experts": 128},
        **{"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    },
    "llama3.1-8B-Instruct": llama(32, 4096, 14336, 32, head=128, factor=8.0, tied=False),
    "llama3.2-1B-Instruct": llama(16, 2048, 8192, 32, head=64, factor=32.0, tied=True),
    "llama3.2-3B-Instruct": llama(28, 3072, 8192, 24, head=128, factor=32.0, tied=True),
    "glm4-9B": shape(40, 4096, 13696, 32, 2, **GLM4, attention_bias=True),
    "glm4-32B": shape(61, 6144, 23040, 48, 2, **GLM4, attention_bias=False),
    "glm4.5-355B-A32B": GLM45_355B,
    "glm4.6-355B-A32B": GLM45_355B,
    "glm4.7-355B-A32B": GLM45_355B,
    "glm4.5-106B-A12B": shape(
        46, 4096, 10944, 96, 8, use_qk_norm=False, **sigmoid_experts(128, 8, 1408, 1, 1.0) | GLM45
    ),
    "glm4.6V-106B-A12B": GLM46V,
    "glm4.7-30B-A3B": {
        **shape(47, 2048, 10240, 20),
        **latents(768, 192, 64, 256),
        **sigmoid_experts(64, 4, 1536, 1, 1.8),
        "model_type": "glm4_moe_lite",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 154880,
    },
    "glm5-744B-A40B": {**GLM5, "rope_theta": 1e6},
    "glm5.2-744B-A40B": {**GLM5, "rope_theta": 8e6, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "deepseek-v3": DEEPSEEK,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "deepseek-v3-5layer": {**DEEPSEEK, "num_hidden_layers": 5},
    "deepseek-v3-20layer": {**DEEPSEEK, "num_hidden_layers": 20},
    "kimi-k2": {**KIMI, "rope_scaling": yarn(32, 1.0)},
    "kimi-k2-thinking": {**KIMI, "rope_scaling": yarn(64, 32.0)},
    "moonlight": {
        **shape(27, 2048, 11264, 16),
        **latents(None, 128, 64, 128),
        **sigmoid_experts(64, 6, 1408, 1, 2.446, n_shared_experts=2, scoring_func="sigmoid"),
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "vocab_size": 163840,
    },
    "minimax-m2": MINIMAX_M2,
    "mimo-7B-rl": shape(
        *(36, 4096, 11008, 32, 8),
        model_type="mimo",
        rms_norm_eps=1e-5,
        rope_theta=640000,
        vocab_size=151680,
        tie_word_embeddings=False,
        attention_bias=True,
        max_position_embeddings=32768,
        num_nextn_predict_layers=1,
    ),
}

WITHOUT_A_FILE: dict[str, dict[str, Any]] = {
    "kimi-k2.5": {"model_type": "kimi_k25", "text_config": PUBLISHED["kimi-k2-thinking"], "vision_config": {}},
    "qwen3-vl-2B": qwen3_vl("qwen3_vl", qwen3(28, 2048, 6144, 16, tied=True), 24, 1024, 4096),
    "qwen3-vl-8B": qwen3_vl("qwen3_vl", qwen3(36, 4096, 12288, 32, tied=False)),
    "smollm2-135M": shape(
        *(30, 576, 1536, 9, 3),
        **{"model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000},
        **{"tie_word_embeddings": True, "rope_interleaved": False, "is_llama_config": True, "hidden_act": "silu"},
    ),
    "smollm2-1.7B": shape(
        *(24, 2048, 8192, 32, 32),
        **{"model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 130000},
        **{"tie_word_embeddings": True, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "nemotron-nano-9B-v2": {
        **shape(56, 4480, 15680, 40, 8, **NEMOTRON_H, mamba_num_heads=128, mamba_head_dim=80),
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    },
    "llama3.3-70B": {**llama(80, 8192, 28672, 64, head=128, factor=8.0, tied=False)},
    "mistral-7B-v0.3": shape(
        *(32, 4096, 14336, 32, 8),
        **{"model_type": "mistral", "vocab_size": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
        **{"sliding_window": None, "max_position_embeddings": 32768, "tie_word_embeddings": False},
    ),
    "qwen2.5-72B": qwen25(80, 8192, 29568, 64, 8, tied=False, vocab=152064),
    "phi-4": shape(
        *(40, 5120, 17920, 40, 10),
        **{"model_type": "phi3", "vocab_size": 100352, "rms_norm_eps": 1e-5, "rope_theta": 250000},
        **{"sliding_window": None, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384},
        **{"tie_word_embeddings": False, "partial_rotary_factor": 1.0, "hidden_act": "silu", "rope_scaling": None},
    ),
}
"""Models without a file in ``scripts/models``, because they need none."""

NUM_PARAMETERS = {
    **{"smollm2-135M": 134_515_008, "smollm2-1.7B": 1_711_376_384, "mistral-7B-v0.3": 7_248_023_552},
    **{"llama3.2-1B-Instruct": 1_235_814_400, "llama3.2-3B-Instruct": 3_212_749_824, "phi-4": 14_659_507_200},
    **{"llama3.1-8B-Instruct": 8_030_261_248, "llama3.3-70B": 70_553_706_496, "qwen2.5-0.5B": 494_032_768},
    **{"qwen2.5-1.5B": 1_543_714_304, "qwen2.5-3B": 3_085_938_688, "qwen2.5-7B": 7_615_616_512},
    **{"qwen2.5-32B": 32_763_876_352, "qwen2.5-72B": 72_706_203_648, "qwen3-0.6B": 596_049_920},
    **{"qwen3-1.7B": 1_720_574_976, "qwen3-4B": 4_022_468_096, "qwen3-8B": 8_190_735_360},
    **{"qwen3-14B": 14_768_307_200, "qwen3-32B": 32_762_123_264, "qwen3-30B-A3B": 30_532_122_624},
    **{"qwen3-235B-A22B": 235_093_634_560, "gemma3-1B": 999_885_952, "qwen3-vl-30B-A3B": 31_070_754_032},
    **{
        "qwen2.5-vl-7B": 8_292_166_656,
        "mixtral-8x7B": 46_702_792_704,
        "olmo3-7B": 7_298_011_136,
        "qwen3-vl-2B": 2_127_532_032,
        "qwen3-vl-8B": 8_767_123_696,
    },
    **{"nemotron3-nano-30B-A3B": 31_577_937_344, "nemotron-nano-9B-v2": 8_888_227_328},
}
"""Parameters as stated on the models' pages, or in the index of their weights."""
