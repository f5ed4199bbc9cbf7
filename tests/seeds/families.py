"""Recipes of families that the documents do not mention, one job each, with trainer and engine on the same devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.tiny_arithmetic.tokenizer import VOCAB_SIZE
from tests.seeds.recipes import (
    COLOCATED,
    CPU_SIZES,
    DENSE,
    GPU_SIZES,
    ONE_GPU,
    TRITON_FP8,
    Form,
    Job,
    Seed,
    torch_dist,
)

CPU_FLAGS = f"{CPU_SIZES} --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --global-batch-size 16"
GPU_FLAGS = f"{GPU_SIZES} --global-batch-size 64"

OLMO_YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 512}
OLMO_LAYERS = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "rope_parameters": OLMO_YARN,
}
OLMO_PREPARE = (torch_dist("olmo3-7B", "Olmo-3-7B-Instruct", "Olmo-3-7B-Instruct_torch_dist"),)

OLMO = Seed(
    title="OLMo-3-7B",
    script="run-olmo3-7B.sh",
    family="olmo3",
    folder="Olmo-3-7B-Instruct",
    cpu=Form(
        sizes=OLMO_LAYERS,
        prepare=OLMO_PREPARE,
        environment={"NUM_GPUS": "4"},
        flags=CPU_FLAGS,
        jobs=(Job("TP2 SP; colocated, two engines", "--rollout-num-gpus-per-engine 1"),),
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024},
            **OLMO_LAYERS,
        },
        weight_std=0.04,
        prepare=OLMO_PREPARE,
        environment={"NUM_GPUS": "4"},
        flags=GPU_FLAGS,
        jobs=(Job("TP2 SP; colocated, an engine of TP2", COLOCATED, bound=0.05),),
    ),
)

GEMMA_PREPARE = (torch_dist("gemma4-31B", "gemma-4-31B-it", "gemma-4-31B-it_torch_dist"),)

GEMMA = Seed(
    title="Gemma-4-31B",
    script="run-gemma4-31B.sh",
    family="gemma4",
    folder="gemma-4-31B-it",
    cpu=Form(
        sizes={"sliding_window": 16, "intermediate_size": 96},
        prepare=GEMMA_PREPARE,
        flags=f"{CPU_FLAGS} --tensor-model-parallel-size 2",
        jobs=(Job("TP2 SP; colocated, two engines", "--rollout-num-gpus-per-engine 1"),),
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024},
            **{"num_global_key_value_heads": 4, "head_dim": 64, "global_head_dim": 128, "sliding_window": 64},
        },
        weight_std=0.04,
        prepare=GEMMA_PREPARE,
        flags=f"{GPU_FLAGS} --tensor-model-parallel-size 2",
        # Its attention scores are not scaled: bf16 alone moves transformers' log-probs by .053.
        jobs=(Job("TP2 SP; colocated, an engine of TP2", COLOCATED, bound=0.1),),
    ),
)

GEMMA_SMALL_SIZES = {"vocab_size_per_layer_input": VOCAB_SIZE}
GEMMA_SMALL = replace(
    GEMMA,
    title="Gemma-4-E4B's layers, by the recipe of 31B",
    family="gemma4-small",
    cpu=replace(GEMMA.cpu, sizes={**GEMMA.cpu.sizes, **GEMMA_SMALL_SIZES}),
    gpu=replace(
        GEMMA.gpu,
        sizes={
            **{name: size for name, size in GEMMA.gpu.sizes.items() if name != "num_global_key_value_heads"},
            **{"hidden_size_per_layer_input": 64, **GEMMA_SMALL_SIZES},
        },
        # Nine layers of the same kind: bf16 alone moves transformers' log-probs by .13.
        jobs=(Job("TP2 SP; colocated, an engine of TP2", COLOCATED, bound=0.3),),
    ),
)

GEMMA_MOE_PREPARE = (torch_dist("gemma4-26B-A4B", "gemma-4-26B-A4B-it", "gemma-4-26B-A4B-it_torch_dist"),)
GEMMA_MOE_FLAGS = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sglang-ep-size 1"

GEMMA_MOE = replace(
    GEMMA,
    title="Gemma-4-26B-A4B",
    script="run-gemma4-26B-A4B.sh",
    family="gemma4-moe",
    folder="gemma-4-26B-A4B-it",
    cpu=Form(
        sizes={"sliding_window": 16, "intermediate_size": 96},
        prepare=GEMMA_MOE_PREPARE,
        flags=f"{CPU_FLAGS} {GEMMA_MOE_FLAGS}",
        jobs=(Job("TP2 EP2 SP; colocated, two engines", "--rollout-num-gpus-per-engine 1"),),
    ),
    gpu=replace(
        GEMMA.gpu,
        sizes={**GEMMA.gpu.sizes, "moe_intermediate_size": 256},
        prepare=GEMMA_MOE_PREPARE,
        flags=f"{GPU_FLAGS} {GEMMA_MOE_FLAGS}",
        # bf16 also changes the choice of experts; it alone moves transformers' log-probs by .27.
        jobs=(Job("TP2 EP2 SP; colocated, an engine of TP2", COLOCATED, bound=0.2),),
    ),
)


def dense(
    title: str,
    models: str,
    folder: str,
    *,
    family: str,
    script: str,
    sizes: dict[str, Any] | None = None,
) -> Seed:
    """Return the seed of a family with ordinary attention; ``sizes`` are those on a GPU."""
    prepare = (torch_dist(models, folder, f"{folder}_torch_dist"),)
    tp2 = "--tensor-model-parallel-size 2 --expert-model-parallel-size 1"
    return Seed(
        title=title,
        script=script,
        family=family,
        folder=folder,
        cpu=Form(
            sizes={},
            prepare=prepare,
            flags=f"{CPU_FLAGS} {tp2} --sglang-ep-size 1",
            jobs=(Job("TP2 SP; colocated, two engines", "--rollout-num-gpus-per-engine 1"),),
        ),
        gpu=Form(
            sizes={**DENSE, **(sizes or {})},
            weight_std=0.04,
            prepare=prepare,
            flags=f"{GPU_FLAGS} {tp2} --sglang-ep-size 1 --sglang-cuda-graph-bs-decode 1 2 4 8 16",
            jobs=(Job("TP2 SP; colocated, an engine of TP2", COLOCATED, bound=0.05),),
        ),
    )


MIXTRAL = dense(
    *("Mixtral-8x7B", "mixtral-8x7B", "Mixtral-8x7B-Instruct-v0.1"),
    family="mixtral",
    script="run-mixtral-8x7B.sh",
    sizes={"intermediate_size": 256, "num_local_experts": 8},
)
SEED_OSS = dense(
    *("Seed-OSS-36B", "seed-oss-36B", "Seed-OSS-36B-Instruct"),
    family="seed_oss",
    script="run-seed-oss-36B.sh",
)
MISTRAL = dense(
    *("Mistral-Small-3.1-24B", "mistral-small-3.1-24B", "Mistral-Small-3.1-24B-Instruct-2503"),
    family="mistral3",
    script="run-mistral-small-3.1-24B.sh",
)

KIMI_FOLDER = "Kimi-K2.5"
KIMI_POSITIONS = {
    "rope_theta": 50000.0,
    "rope_scaling": {
        **{"type": "yarn", "factor": 64.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "original_max_position_embeddings": 64,
    },
}
"""YaRN like Kimi-K2.5's, with a range beyond what the engine serves."""
ONE_STAGE = "--pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers none --context-parallel-size 1"
KIMI = Seed(
    title="Kimi-K2.5",
    script="run-kimi-k2.5.sh",
    family="kimi_k25",
    folder=KIMI_FOLDER,
    cpu=Form(
        sizes=KIMI_POSITIONS,
        prepare=(torch_dist("kimi-k2-thinking", KIMI_FOLDER, f"{KIMI_FOLDER}_torch_dist"),),
        flags=f"""
            {CPU_SIZES} {ONE_STAGE} --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --over-sampling-batch-size 12
        """,
        jobs=(
            Job(
                "TP2 EP2 SP; colocated, two engines",
                "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --rollout-num-gpus-per-engine 1",
                shows=("eval", "filter"),
            ),
            Job(
                "CP2 EP2; an engine of TP2",
                """--tensor-model-parallel-size 1 --context-parallel-size 2 --expert-model-parallel-size 2
                --rollout-num-gpus-per-engine 2""",
                shows=("eval", "filter"),
                goes_on=True,
            ),
        ),
        gpu_only="int4 engine, DeepEP",
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
            **{"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8},
            **KIMI_POSITIONS,
        },
        weight_std=0.04,
        prepare=(torch_dist("kimi-k2-thinking", KIMI_FOLDER, f"{KIMI_FOLDER}_torch_dist"),),
        flags=f"{GPU_SIZES} {ONE_STAGE} --over-sampling-batch-size 24",
        jobs=(
            Job(
                "TP2 EP2 SP, Adam on the host; a bf16 engine of TP2",
                f"{COLOCATED} --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
                shows=("eval", "filter"),
                bound=0.1,
            ),
        ),
    ),
)

QWEN_VL_FOLDER = "Qwen2.5-VL-7B-Instruct"
QWEN_VL_PREPARE = (torch_dist("qwen2.5-vl-7B", QWEN_VL_FOLDER, f"{QWEN_VL_FOLDER}_torch_dist"),)
QWEN_VL_SIZES = """
    --eval-interval none --rollout-batch-size 6 --n-samples-per-prompt 4 --global-batch-size 24
    --rollout-max-response-len 12 --max-tokens-per-gpu 1024
"""
QWEN_VL = Seed(
    title="Qwen2.5-VL-7B",
    script="run-qwen2.5-vl-7B.sh",
    family="qwen2_5_vl",
    folder=QWEN_VL_FOLDER,
    has_pictures=True,
    cpu=Form(
        sizes={},
        prepare=QWEN_VL_PREPARE,
        flags=f"""
            {QWEN_VL_SIZES} --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1
            --sglang-mem-fraction-static 0.1
        """,
        jobs=(Job("TP2 SP; colocated, two engines", "", shows=()),),
    ),
    gpu=Form(
        sizes={},
        prepare=QWEN_VL_PREPARE,
        flags=f"{GPU_SIZES} {QWEN_VL_SIZES} --sglang-mm-attention-backend triton_attn",
        jobs=(Job("TP2 SP; colocated, an engine of TP2", COLOCATED, shows=(), bound=0.05),),
    ),
)

NEMOTRON_FOLDER = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
NEMOTRON = Seed(
    title="Nemotron-3-Nano-30B-A3B",
    script="run-nemotron3-nano-30B-A3B.sh",
    family="nemotron_h",
    folder=NEMOTRON_FOLDER,
    cpu=None,
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
            **{"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
            **{"intermediate_size": 1024, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512},
        },
        weight_std=0.04,
        prepare=(torch_dist("nemotron3-nano-30B-A3B", NEMOTRON_FOLDER, f"{NEMOTRON_FOLDER}_torch_dist"),),
        flags=f"""
            {GPU_FLAGS} --sglang-attention-backend flashinfer --sglang-moe-runner-backend triton --sglang-ep-size 1
            --sglang-cuda-graph-bs-decode 1 2 4 8 16
        """,
        jobs=(
            Job(
                "TP2 EP2 SP, Adam on the host; an engine of TP2",
                f"{COLOCATED} --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
                bound=0.1,
            ),
        ),
    ),
)

V4_FOLDER = "DeepSeek-V4-Flash-bf16"
V4_LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"]
V4_YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    **{"beta_fast": 32.0, "beta_slow": 1.0},
}
DEEPSEEK_V4 = Seed(
    title="DeepSeek-V4-Flash",
    script="run-deepseek-v4-flash.sh",
    family="deepseek_v4-128",
    folder=V4_FOLDER,
    cpu=None,
    gpu=Form(
        # Heads, their width, the window and the entries are those that FlashMLA supports.
        sizes={
            **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 64, "head_dim": 512},
            **{"partial_rotary_factor": 0.125, "q_lora_rank": 256, "o_groups": 8, "o_lora_rank": 128},
            **{"layer_types": V4_LAYERS, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128},
            **{"index_topk": 512, "moe_intermediate_size": 256, "swiglu_limit": 10.0, "rope_parameters": V4_YARN},
        },
        weight_std=0.04,
        prepare=(torch_dist("deepseek-v4-flash", V4_FOLDER, f"{V4_FOLDER}_torch_dist"),),
        environment={
            **{**TRITON_FP8, "SGLANG_OPT_USE_TILELANG_INDEXER": "1", "SGLANG_OPT_FP8_WO_A_GEMM": "0"},
            # Without the kernels that DeepGEMM compiles.
            **{"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_OPT_USE_TILELANG_MHC_POST": "0"},
            "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
        },
        flags=f"""
            {GPU_FLAGS} {ONE_GPU} --sglang-attention-backend dsv4 --sglang-cuda-graph-bs-decode 1 2 4 8 16
            --eval-prompt-data aime {{base}}/aime-2024/aime-2024.jsonl
        """,
        jobs=(Job("1 GPU, Adam on the host; colocated, an FP8 cache", "", num_gpus=1, bound=0.2),),
    ),
)

V4_PUBLISHED = "{base}/DeepSeek-V4-Flash"
DEEPSEEK_V4_FP4 = replace(
    DEEPSEEK_V4,
    title="DeepSeek-V4-Flash as published",
    gpu=replace(
        DEEPSEEK_V4.gpu,
        prepare=(
            *DEEPSEEK_V4.gpu.prepare,
            f"python3 -m tests.matrix.families.deepseek_v4 {V4_PUBLISHED}-bf16 {V4_PUBLISHED}",
        ),
        flags=f"{DEEPSEEK_V4.gpu.flags} --hf-checkpoint {V4_PUBLISHED} --sglang-moe-runner-backend marlin",
        jobs=(Job("1 GPU, Adam on the host; colocated, experts in FP4", "", num_gpus=1, bound=1.0),),
    ),
)

FAMILIES = {
    **{"olmo3-7b": OLMO, "mixtral-8x7b": MIXTRAL, "seed-oss-36b": SEED_OSS, "mistral-small-24b": MISTRAL},
    **{"gemma4-31b": GEMMA, "gemma4-e4b": GEMMA_SMALL, "gemma4-26b": GEMMA_MOE},
    **{"deepseek-v4": DEEPSEEK_V4, "deepseek-v4-fp4": DEEPSEEK_V4_FP4},
    **{"nemotron3-nano-30b": NEMOTRON, "kimi-k2.5": KIMI, "qwen2.5-vl-7b": QWEN_VL},
}
