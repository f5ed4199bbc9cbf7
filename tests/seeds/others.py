"""Recipes beyond the documents: precisions and kinds of pushes that no document mentions, and families.py.

``python -m tests.seeds --only NAME``; without ``--only`` the recipes of the documents run.
"""

from __future__ import annotations

from tests.seeds.families import FAMILIES
from tests.seeds.four_gpus import ON_FOUR_GPUS
from tests.seeds.recipes import (
    COLOCATED,
    CPU_SIZES,
    DENSE,
    GPU_SIZES,
    ONE_ENGINE,
    TRITON_FP8,
    Form,
    Job,
    Seed,
    fp8,
    torch_dist,
)

NO_DEEPEP = "--moe-token-dispatcher-type alltoall --sglang-cuda-graph-bs-decode 1 2 4 8 16"
TP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1"

MINIMAX_STAGES = "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 2 --expert-model-parallel-size 1"
MINIMAX_EXPERTS = (
    "--pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers none --expert-model-parallel-size 2"
)
MINIMAX_SIZES = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"head_dim": 128, "rotary_dim": 64, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
}

MINIMAX = Seed(
    title="MiniMax-M2",
    script="run-minimax-m2.sh",
    family="minimax_m2",
    folder="MiniMax-M2-bf16",
    cpu=None,
    gpu=Form(
        sizes=MINIMAX_SIZES,
        weight_std=0.04,
        prepare=(
            fp8("MiniMax-M2-bf16", "MiniMax-M2"),
            torch_dist("minimax-m2", "MiniMax-M2-bf16", "MiniMax-M2_torch_dist"),
        ),
        environment=TRITON_FP8,
        flags=f"""
            {GPU_SIZES} {ONE_ENGINE} {NO_DEEPEP} --tensor-model-parallel-size 1 --context-parallel-size 1
            --over-sampling-batch-size 24 --sglang-ep-size 2 --sglang-fp8-gemm-backend triton
            --sglang-moe-runner-backend triton
        """,
        jobs=(
            Job("PP2, Adam on the host; an FP8 engine of TP2, EP2", MINIMAX_STAGES, bound=0.2),
            Job("EP2; the same engine", MINIMAX_EXPERTS, goes_on=True, bound=0.2),
        ),
    ),
)

NEXT_FOLDER = "Qwen3-Next-80B-A3B-Thinking"
NEXT_PREPARE = (torch_dist("qwen3-next-80B-A3B", NEXT_FOLDER, f"{NEXT_FOLDER}_torch_dist"),)
NEXT_STAGE = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size"

NEXT = Seed(
    title="Qwen3-Next-80B-A3B",
    script="run-qwen3-next-80B-A3B.sh",
    family="qwen3_next",
    folder=NEXT_FOLDER,
    cpu=None,
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
            **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 256},
            **{"intermediate_size": 1024, "shared_expert_intermediate_size": 256, "num_experts": 8},
            **{"num_experts_per_tok": 2},
        },
        weight_std=0.04,
        prepare=NEXT_PREPARE,
        flags=f"""
            {GPU_SIZES} {ONE_ENGINE} {NO_DEEPEP} --over-sampling-batch-size 24 --sglang-ep-size 2
            --expert-model-parallel-size 2
        """,
        jobs=(
            Job(
                "TP2 EP2 SP, Adam on the host; an engine of TP2, EP2",
                f"{NEXT_STAGE} 2 --context-parallel-size 1",
                bound=0.1,
            ),
            Job("CP2 EP2; the same engine", f"{NEXT_STAGE} 1 --context-parallel-size 2", goes_on=True, bound=0.1),
        ),
    ),
)

INT4 = Seed(
    title="Qwen3-30B-A3B in int4",
    script="low_precision/run-qwen3-30B-A3B-int4.sh",
    family="qwen3_moe",
    folder="Qwen3-30B-A3B",
    cpu=None,
    gpu=Form(
        sizes={**DENSE, "mlp_only_layers": [], "moe_intermediate_size": 256, "num_experts": 8},
        weight_std=0.04,
        prepare=(
            "python3 tools/convert_hf_to_int4_direct.py --group-size 128 --ignore-rules re:.*self_attn "
            "--model-dir {base}/Qwen3-30B-A3B --save-dir {base}/Qwen3-30B-A3B-INT4",
            torch_dist("qwen3-30B-A3B", "Qwen3-30B-A3B", "Qwen3-30B-A3B_torch_dist"),
        ),
        flags=f"{GPU_SIZES} {ONE_ENGINE} --global-batch-size 64 --sglang-cuda-graph-bs-decode 1 2 4 8 16",
        jobs=(
            Job(
                "TP2 EP2 SP, int4 in forward passes; an int4 engine of TP2",
                f"{TP2} --expert-model-parallel-size 2 --sglang-ep-size 1",
                bound=0.1,
            ),
        ),
    ),
)

CHANNELS = Seed(
    title="Qwen3-4B in FP8 by channel",
    script="run-qwen3-4B.sh",
    family="qwen3",
    folder="Qwen3-4B",
    cpu=None,
    gpu=Form(
        sizes=DENSE,
        weight_std=0.04,
        prepare=(
            "python3 tools/convert_hf_to_fp8.py --strategy channel --model-dir {base}/Qwen3-4B "
            "--save-dir {base}/Qwen3-4B-FP8",
            torch_dist("qwen3-4B", "Qwen3-4B", "Qwen3-4B_torch_dist"),
        ),
        environment={"NUM_GPUS": "2"},
        flags=f"{GPU_SIZES} --hf-checkpoint {{base}}/Qwen3-4B-FP8 --global-batch-size 64",
        jobs=(Job("TP2 SP; an FP8 engine of TP2", "", bound=0.2),),
    ),
)

GLM4_PREPARE = (torch_dist("glm4-9B", "GLM-Z1-9B-0414", "GLM-Z1-9B-0414_torch_dist"),)
APART = """
    --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1 --tensor-model-parallel-size 1
    --context-parallel-size 1
"""

HALF = Seed(
    title="GLM4-9B in fp16",
    script="run-glm4-9B.sh",
    family="glm4",
    folder="GLM-Z1-9B-0414",
    cpu=None,
    gpu=Form(
        sizes=DENSE,
        weight_std=0.04,
        prepare=GLM4_PREPARE,
        flags=GPU_SIZES,
        jobs=(Job("1 GPU; an engine on the other", f"{APART} --fp16 --sglang-dtype float16", bound=0.02),),
    ),
)

BF16 = Seed(
    title="GLM4-9B in bf16",
    script="run-glm4-9B.sh",
    family="glm4",
    folder="GLM-Z1-9B-0414",
    cpu=Form(
        sizes={"num_hidden_layers": 2},
        prepare=GLM4_PREPARE,
        flags=f"{CPU_SIZES} --bf16 --sglang-dtype bfloat16",
        jobs=(Job("1 rank; an engine apart", APART, bound=0.05),),
    ),
    gpu=Form(
        sizes=DENSE,
        weight_std=0.04,
        prepare=GLM4_PREPARE,
        flags=GPU_SIZES,
        jobs=(Job("1 GPU; an engine on the other", APART, bound=0.05),),
    ),
)

DELTA_FLAGS = """
    --update-weight-transport disk --update-weight-mode delta --update-weight-disk-dir {save}/shared
    --update-weight-local-checkpoint-dir {save}/local
"""

DELTA = Seed(
    title="GLM4-9B, changes pushed over disk",
    script="run-glm4-9B.sh",
    family="glm4",
    folder="GLM-Z1-9B-0414",
    cpu=Form(
        sizes={"num_hidden_layers": 2},
        prepare=GLM4_PREPARE,
        flags=CPU_SIZES,
        jobs=(Job("1 rank; an engine apart", f"{APART} {DELTA_FLAGS}"),),
    ),
    gpu=Form(
        sizes=DENSE,
        weight_std=0.04,
        prepare=GLM4_PREPARE,
        flags=GPU_SIZES,
        jobs=(Job("1 GPU; an engine on the other", f"{APART} {DELTA_FLAGS}", bound=0.05),),
    ),
)

PLAIN = Seed(
    title="GLM4-9B, plain push",
    script="run-glm4-9B.sh",
    family="glm4",
    folder="GLM-Z1-9B-0414",
    cpu=Form(
        sizes={"num_hidden_layers": 2},
        prepare=GLM4_PREPARE,
        flags=f"{CPU_SIZES} --weight-push plain",
        compares=False,
        jobs=(Job("1 rank; an engine apart", APART),),
    ),
    gpu=Form(
        sizes=DENSE,
        weight_std=0.04,
        prepare=GLM4_PREPARE,
        flags=f"{GPU_SIZES} --weight-push plain",
        compares=False,
        jobs=(
            Job("1 GPU; an engine on the other", APART, bound=0.05),
            Job("TP2 SP; colocated, an engine of TP2", f"{TP2} {COLOCATED}", bound=0.05),
            Job(
                "TP2 SP; an engine of TP2 on two others",
                f"{TP2} {ONE_ENGINE} --rollout-num-gpus 2",
                num_gpus=4,
                bound=0.05,
            ),
        ),
    ),
)

OTHERS = {
    **{"minimax-m2": MINIMAX, "qwen3-next": NEXT, "qwen3-30b-int4": INT4, "qwen3-4b-fp8-channel": CHANNELS},
    **{"glm4-9b-fp16": HALF, "glm4-9b-bf16": BF16, "glm4-9b-delta": DELTA, "glm4-9b-plain": PLAIN},
    **FAMILIES,
    **ON_FOUR_GPUS,
}
