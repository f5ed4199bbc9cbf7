"""The recipes of the five documents that the project started from, and MiMo's: models, conversions, jobs.

Each job is the recipe's own script with more flags: paths, sizes and parallel degrees of a small machine.
``{base}`` is the script's BASE_DIR, ``{model}`` stands for the model flags of the small config.json, ``{save}`` for
the job's checkpoint folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
ONE_BY_ONE = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1"
NO_DP = "--sglang-dp-size 1 --sglang-ep-size 1 --sglang-moe-dense-tp-size none --sglang-moe-a2a-backend none"
"""With one data-parallel rank, SGLang runs its attention like an ordinary one."""
ONE_GPU = f"""
    {ONE_BY_ONE} {NO_DP} --expert-model-parallel-size 1 --decoder-first-pipeline-num-layers none
    --decoder-last-pipeline-num-layers none --colocate
    --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
"""
"""Flags appended to a job for two GPUs to run it on one."""
CPU_SIZES = """
    --rollout-batch-size 8 --n-samples-per-prompt 2 --rollout-max-response-len 24 --max-tokens-per-gpu 1024
    --eval-max-response-len 16 --n-samples-per-eval-prompt 2 --sglang-mem-fraction-static 0.1
"""
GPU_SIZES = """
    --rollout-batch-size 16 --n-samples-per-prompt 4 --rollout-max-response-len 128 --max-tokens-per-gpu 4096
    --eval-max-response-len 64 --n-samples-per-eval-prompt 4 --sglang-mem-fraction-static 0.8
    --sglang-max-total-tokens 65536 --sglang-server-concurrency 64 --sglang-max-running-requests 64
    --sglang-cuda-graph-max-bs-decode 16 --sglang-attention-backend triton --sglang-sampling-backend pytorch
"""
ONE_ENGINE = "--actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2"
COLOCATED = f"--colocate --rollout-num-gpus 2 {ONE_ENGINE}"
DENSE = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"head_dim": 64, "intermediate_size": 1024},
}
"""Sizes on a GPU of a model with ordinary attention."""
ALL = """
    --rm-type random --lr 1e-5 --save-interval 1 --eval-interval 1
    --load {save} --save {save} --save-debug-rollout-data {save}/dump/{{rollout_id}}.pt {model}
"""
"""Flags of every job.  A random model answers no question, so rewards are random."""
TRITON_FP8 = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
"""DeepGEMM would compile for many minutes."""


@dataclass(frozen=True)
class Job:
    """One run of the recipe's script."""

    layout: str
    """Placement of trainer and engines, for the table."""
    flags: str
    shows: tuple[str, ...] = ("eval",)
    """What its record must show; keys of outcome.SIGNS."""
    goes_on: bool = False
    """True if it loads the previous job's save; otherwise it begins with the reference."""
    num_rollouts: int = 2
    num_gpus: int = 2
    """Number of GPUs; on a machine with one GPU the job uses that one."""
    bound: float = 1e-4
    """Bound on the mean log-prob difference between trainer and engine in each step, in nats."""


@dataclass(frozen=True)
class Form:
    """A seed on one kind of machine."""

    sizes: Mapping[str, Any]
    """Keys of config.json that override those of the family's case in tests/matrix/families."""
    jobs: tuple[Job, ...]
    flags: str
    """Bound of all jobs."""
    prepare: tuple[str, ...]
    """Commands that convert ``{base}/{folder}``, a bf16 (CPU: fp32) folder, for the script."""
    weight_std: float = 0.12
    environment: Mapping[str, str] = field(default_factory=dict)
    compares: bool = True
    """Whether every push is compared; a plain push cannot be."""
    gpu_only: str = ""
    """Parts of the recipe that this machine cannot run."""


@dataclass(frozen=True)
class Seed:
    """One recipe."""

    title: str
    script: str
    family: str
    folder: str
    """Name under which the small model is written."""
    cpu: Form | None
    """None if SGLang needs a GPU for it."""
    gpu: Form
    has_pictures: bool = False
    """The model is one of examples/vision_shapes, with its sizes, and questions have images."""


def torch_dist(models: str, source: str, target: str, *, processes: int = 1, flags: str = "") -> str:
    """Return the seed's conversion command; flags of the small model override those of the real one."""
    return (
        f"source scripts/models/{models}.sh; python3 -m torch.distributed.run --nproc-per-node {processes} "
        '--master-port {port} tools/convert_hf_to_torch_dist.py "${{MODEL_ARGS[@]}}" {model} '
        f"{flags} --hf-checkpoint {{base}}/{source} --save {{base}}/{target}"
    )


def fp8(source: str, target: str) -> str:
    return (
        f"python3 tools/convert_hf_to_fp8.py --model-dir {{base}}/{source} --save-dir {{base}}/{target} "
        "--strategy block --block-size 128 128 --max-workers 4"
    )


GLM4 = Seed(
    title="GLM4-9B",
    script="run-glm4-9B.sh",
    family="glm4",
    folder="GLM-Z1-9B-0414",
    cpu=Form(
        sizes={"num_hidden_layers": 2},
        prepare=(torch_dist("glm4-9B", "GLM-Z1-9B-0414", "GLM-Z1-9B-0414_torch_dist"),),
        flags=f"""
            {CPU_SIZES} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 1 --over-sampling-batch-size 12
            --dynamic-sampling-filter-path {FILTER} --partial-rollout
            --buffer-filter-path slime.rollout.data_source.pop_first
        """,
        jobs=(
            Job(
                "TP2 SP; an engine apart",
                "--rollout-num-gpus 1 --context-parallel-size 1",
                shows=("eval", "filter", "partial"),
                bound=1e-2,  # answers finished with newer weights
                num_gpus=3,
            ),
            Job(
                "CP2; colocated, two engines",
                "--colocate --rollout-num-gpus 2 --tensor-model-parallel-size 1",
                shows=("eval", "filter", "partial"),
                goes_on=True,
                bound=1e-2,
            ),
        ),
    ),
    gpu=Form(
        sizes=DENSE,
        weight_std=0.04,
        prepare=(torch_dist("glm4-9B", "GLM-Z1-9B-0414", "GLM-Z1-9B-0414_torch_dist"),),
        flags=GPU_SIZES,
        jobs=(
            Job(
                "1 GPU; an engine on the other",
                f"""{ONE_BY_ONE} --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
                --over-sampling-batch-size 24 --dynamic-sampling-filter-path {FILTER} --partial-rollout
                --buffer-filter-path slime.rollout.data_source.pop_first""",
                shows=("eval", "filter", "partial"),
                bound=0.1,
            ),
            Job(
                "TP2 SP; colocated, an engine of TP2",
                """--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2
                --context-parallel-size 1""",
                bound=0.05,
            ),
            Job(
                "CP2; colocated, two engines",
                """--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1
                --tensor-model-parallel-size 1""",
                goes_on=True,
                bound=0.05,
            ),
        ),
    ),
)

GLM45 = Seed(
    title="GLM-4.5-355B-A32B",
    script="run-glm4.5-355B-A32B.sh",
    family="glm4_moe",
    folder="GLM-4.5-355B-A32B",
    cpu=Form(
        sizes={"num_hidden_layers": 4},
        prepare=(
            torch_dist(
                *("glm4.5-355B-A32B", "GLM-4.5-355B-A32B", "GLM-4.5-355B-A32B_torch_dist"),
                flags="--mtp-num-layers 1",
            ),
        ),
        flags=f"""
            {CPU_SIZES} {NO_DP} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2
            --context-parallel-size 1 --over-sampling-batch-size 12 --rollout-stop-token-ids 1
            --mtp-num-layers 1 --enable-mtp-training
        """,
        jobs=(
            Job(
                "TP2 EP2 SP, MTP trained; an engine of TP2",
                "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
                shows=("eval", "filter", "mtp"),
            ),
            Job(
                "PP2; an engine of TP2",
                "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 1",
                shows=("eval", "filter", "mtp"),
                goes_on=True,
            ),
        ),
        gpu_only="FP8 engine, DP attention, DeepEP",
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
            **{"head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8},
            **{"num_experts_per_tok": 2, "first_k_dense_replace": 1},
        },
        weight_std=0.04,
        prepare=(
            fp8("GLM-4.5-355B-A32B", "GLM-4.5-355B-A32B-FP8"),
            torch_dist(
                *("glm4.5-355B-A32B", "GLM-4.5-355B-A32B", "GLM-4.5-355B-A32B_torch_dist"),
                processes=2,
                flags="--mtp-num-layers 1",
            ),
        ),
        environment={"FP8": "1", **TRITON_FP8},
        flags=f"""
            {GPU_SIZES} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 --sglang-dp-size 2
            --sglang-ep-size 2 --sglang-moe-a2a-backend none --sglang-cuda-graph-bs-decode 1 2 4 8 16
            --sglang-fp8-gemm-backend triton --sglang-moe-runner-backend triton
            --context-parallel-size 1 --over-sampling-batch-size 24 --rollout-stop-token-ids 1
            --mtp-num-layers 1 --enable-mtp-training
        """,
        jobs=(
            Job(
                "TP2 EP2 SP, Adam on the host, MTP trained; an FP8 engine of DP attention 2, EP2",
                "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
                shows=("eval", "filter", "mtp"),
                bound=0.2,
            ),
            Job(
                "PP2; the same engine",
                "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 1",
                shows=("eval", "filter", "mtp"),
                goes_on=True,
                bound=0.2,
            ),
        ),
    ),
)

R1_PREPARE = (
    fp8("DeepSeek-R1-before", "DeepSeek-R1"),
    "python3 tools/fp8_cast_bf16.py --input-fp8-hf-path {base}/DeepSeek-R1 "
    "--output-bf16-hf-path {base}/DeepSeek-R1-bf16",
    torch_dist(
        *("deepseek-v3", "DeepSeek-R1-bf16", "DeepSeek-R1_torch_dist"),
        processes=2,
        flags="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
    ),
)
R1_POSITIONS = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
    }
}
"""YaRN like DeepSeek-R1's, with a range beyond what the engine serves."""
R1_SIZES = {
    **R1_POSITIONS,
    **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    **{"intermediate_size": 128, "moe_intermediate_size": 128},
}

R1 = Seed(
    title="DeepSeek-R1",
    script="run-deepseek-r1.sh",
    family="deepseek_v3",
    folder="DeepSeek-R1-before",
    cpu=Form(
        sizes=R1_SIZES,
        weight_std=0.08,
        prepare=R1_PREPARE,
        flags=f"""
            {CPU_SIZES} {NO_DP} --hf-checkpoint {{base}}/DeepSeek-R1-bf16 --actor-num-gpus-per-node 2
            --rollout-num-gpus-per-engine 2 --tensor-model-parallel-size 1 --context-parallel-size 1
            --over-sampling-batch-size 12
        """,
        jobs=(
            Job(
                "PP2 (3 and 1 layers); an engine of TP2",
                """--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1
                --expert-model-parallel-size 1""",
                shows=("eval", "filter"),
            ),
            Job(
                "EP2; an engine of TP2",
                """--pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers none
                --expert-model-parallel-size 2""",
                shows=("eval", "filter"),
                goes_on=True,
            ),
        ),
        gpu_only="FP8 engine, DP attention, DeepEP",
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
            **{"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 256},
            **{"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
            **R1_POSITIONS,
        },
        weight_std=0.04,
        prepare=R1_PREPARE,
        environment=TRITON_FP8,
        flags=f"""
            {GPU_SIZES} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 --sglang-dp-size 2
            --sglang-ep-size 2 --sglang-moe-a2a-backend none --sglang-fp8-gemm-backend triton
            --sglang-moe-runner-backend triton --tensor-model-parallel-size 1 --context-parallel-size 1
            --over-sampling-batch-size 24
        """,
        jobs=(
            Job(
                "PP2 (3 and 1 layers), Adam on the host; an FP8 engine of DP attention 2, EP2",
                """--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1
                --expert-model-parallel-size 1""",
                shows=("eval", "filter"),
                bound=0.2,
            ),
            Job(
                "EP2; the same engine",
                """--pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers none
                --expert-model-parallel-size 2""",
                shows=("eval", "filter"),
                goes_on=True,
                bound=0.2,
            ),
        ),
    ),
)

FLASH_PREPARE = (
    torch_dist(
        *("glm4.7-30B-A3B", "GLM-4.7-Flash", "GLM-4.7-Flash_torch_dist"),
        processes=2,
        flags="--mtp-num-layers 1",
    ),
)
TRAINED_MTP = "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2"
FLASH_EAGLE = """
    --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 --sglang-speculative-eagle-topk 1
    --sglang-speculative-num-draft-tokens 3
"""

FLASH = Seed(
    title="GLM-4.7-Flash",
    script="run-glm4.7-30B-A3B-8gpus.sh",
    family="glm4_moe_lite",
    folder="GLM-4.7-Flash",
    cpu=Form(
        sizes={"num_hidden_layers": 3},
        prepare=FLASH_PREPARE,
        flags=f"""
            {CPU_SIZES} {NO_DP} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 1
            --global-batch-size 16
        """,
        jobs=(
            Job("EP2; two engines", "--expert-model-parallel-size 2"),
            Job(
                "TP2 SP, MTP trained; an engine of TP2",
                f"""--tensor-model-parallel-size 2 --expert-model-parallel-size 1 --rollout-num-gpus-per-engine 2
                {TRAINED_MTP}""",
                shows=("eval", "mtp"),
                goes_on=False,
            ),
            Job(
                "EP2, MTP trained; two engines",
                f"--expert-model-parallel-size 2 {TRAINED_MTP}",
                shows=("eval", "mtp"),
                goes_on=True,
            ),
        ),
        gpu_only="EAGLE, DP attention",
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
            **{"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
            **{"v_head_dim": 256, "intermediate_size": 1024, "moe_intermediate_size": 256},
            **{"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        },
        weight_std=0.04,
        prepare=FLASH_PREPARE,
        flags=f"""
            {GPU_SIZES} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 --sglang-dp-size 2
            --global-batch-size 64 {FLASH_EAGLE} --sglang-attention-backend flashinfer
        """,
        jobs=(
            Job(
                "EP2, Adam on the host; an engine of DP attention 2, EAGLE 2/1/3",
                "--expert-model-parallel-size 2",
                shows=("eval", "drafts"),
                bound=0.05,
            ),
            Job(
                "EP2, MTP trained; the same engine",
                f"--expert-model-parallel-size 2 {TRAINED_MTP}",
                shows=("eval", "drafts", "mtp"),
                bound=0.05,
            ),
            Job(
                "TP2 SP, MTP trained; the same engine",
                f"--tensor-model-parallel-size 2 --expert-model-parallel-size 1 {TRAINED_MTP}",
                shows=("eval", "drafts", "mtp"),
                goes_on=True,
                bound=0.05,
            ),
        ),
    ),
)

GLM52_PREPARE = (
    torch_dist(
        *("glm5.2-744B-A40B", "GLM-5.2", "GLM-5.2_torch_dist"),
        processes=2,
        flags="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 2",
    ),
)
GLM52_SPARSE = {
    "num_nextn_predict_layers": 1,
    "indexer_types": ["full", "full", "full", "shared", "full"],
}
"""The last entry belongs to the MTP layer, which chooses its own keys."""
GLM52_STAGES = """
    --pipeline-model-parallel-size 2 --context-parallel-size 1 --expert-model-parallel-size 1
    --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2
"""
GLM52_GATHER = """
    --pipeline-model-parallel-size 1 --context-parallel-size 2 --expert-model-parallel-size 2
    --decoder-first-pipeline-num-layers none --decoder-last-pipeline-num-layers none
"""
NO_EAGLE = " ".join(
    f"--sglang-speculative-{name} none"
    for name in ("algorithm", "num-steps", "eagle-topk", "num-draft-tokens", "draft-attention-backend")
)

GLM52 = Seed(
    title="GLM-5.2-744B-A40B",
    script="run-glm5.2-744B-A40B.sh",
    family="glm5_2",
    folder="GLM-5.2",
    cpu=Form(
        # Without CUDA, SGLang has no sparse attention and serves the same layers with dense attention.  With top-k
        # above # the sequence length, the trainer's attention is the same.
        sizes={**GLM52_SPARSE, "num_hidden_layers": 4, "index_topk": 2048},
        prepare=GLM52_PREPARE,
        flags=f"""
            {CPU_SIZES} {NO_DP} {NO_EAGLE} --hf-checkpoint {{base}}/GLM-5.2 --actor-num-gpus-per-node 2
            --rollout-num-gpus-per-engine 1 --tensor-model-parallel-size 1 --global-batch-size 16
            --eval-prompt-data aime {{base}}/aime-2024/aime-2024.jsonl --sglang-config {{base}}/engines.yaml
            --sglang-attention-backend torch_native --sglang-kv-cache-dtype auto --sglang-page-size 1
            --data-pad-size-multiplier 128 --sglang-json-model-override-args
            '{{{{"architectures": ["DeepseekV2ForCausalLM"]}}}}'
        """,
        jobs=(
            Job("PP2 (2 and 2 layers); prefill and decode apart", GLM52_STAGES),
            Job("allgather CP2, EP2; prefill and decode apart", GLM52_GATHER, goes_on=True),
        ),
        gpu_only="sparse attention by FlashMLA (dense here), FP8 engine and cache, EAGLE, DP attention, DeepEP",
    ),
    gpu=Form(
        sizes={
            **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 64},
            **{"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
            **{"v_head_dim": 256, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8},
            **{"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, **GLM52_SPARSE},
            **{"first_k_dense_replace": 1, "max_position_embeddings": 8192},
        },
        weight_std=0.04,
        prepare=(fp8("GLM-5.2", "GLM-5.2-FP8"), *GLM52_PREPARE),
        environment={
            **{**TRITON_FP8, "MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"},
            # The engine would use dense attention for short prompts.
            "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
        },
        flags=f"""
            {GPU_SIZES} {NO_DP} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 1
            --sglang-attention-backend dsa --sglang-fp8-gemm-backend triton
            --sglang-moe-runner-backend triton --tensor-model-parallel-size 1 --global-batch-size 64
            --eval-prompt-data aime {{base}}/aime-2024/aime-2024.jsonl --sglang-config {{base}}/engines.yaml
            --data-pad-size-multiplier 128
        """,
        jobs=(
            Job(
                "PP2 (2 and 2 layers), Adam on the host; FP8 prefill and decode on a GPU each, FlashMLA, EAGLE 4/1/5",
                GLM52_STAGES,
                shows=("eval", "drafts"),
                bound=0.2,
            ),
            Job(
                "allgather CP2, EP2; the same engines",
                GLM52_GATHER,
                shows=("eval", "drafts"),
                goes_on=True,
                bound=0.2,
            ),
        ),
    ),
)

MIMO = Seed(
    title="MiMo-7B-RL",
    script="run-mimo-7B-rl-eagle.sh",
    family="mimo",
    folder="MiMo-7B-RL",
    cpu=Form(
        sizes={"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        prepare=(torch_dist("mimo-7B-rl", "MiMo-7B-RL", "MiMo-7B-RL_torch_dist"),),
        flags=f"""
            {CPU_SIZES} {NO_EAGLE} --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2
            --global-batch-size 16 --sglang-attention-backend torch_native
        """,
        jobs=(
            Job("TP2 SP, MTP trained; an engine of TP2", "", shows=("eval", "mtp")),
            Job(
                "CP2, MTP trained; an engine of TP2",
                "--tensor-model-parallel-size 1 --context-parallel-size 2",
                shows=("eval", "mtp"),
                goes_on=True,
            ),
        ),
        gpu_only="EAGLE",
    ),
    gpu=Form(
        sizes={
            **DENSE,
            "num_nextn_predict_layers": 1,
        },
        weight_std=0.04,
        prepare=(torch_dist("mimo-7B-rl", "MiMo-7B-RL", "MiMo-7B-RL_torch_dist"),),
        flags=f"{GPU_SIZES} --actor-num-gpus-per-node 2 --global-batch-size 64",
        jobs=(
            Job("TP2 SP, MTP trained; two engines, EAGLE 3/1/4", "", shows=("eval", "drafts", "mtp"), bound=0.05),
            Job(
                "CP2, MTP trained; the same engines",
                "--tensor-model-parallel-size 1 --context-parallel-size 2",
                shows=("eval", "drafts", "mtp"),
                goes_on=True,
                bound=0.05,
            ),
        ),
    ),
)

SEEDS = {
    **{"glm4-9b": GLM4, "glm-4.5": GLM45, "deepseek-r1": R1, "glm-4.7-flash": FLASH, "glm-5.2": GLM52},
    "mimo": MIMO,
}
