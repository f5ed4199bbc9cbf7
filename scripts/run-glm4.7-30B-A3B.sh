#!/usr/bin/env bash
# GRPO on math with GLM-4.7-Flash (30B-A3B) on two nodes of 8 GPUs, its MTP layer trained and used for drafts.
#
#   scripts/run-glm4.7-30B-A3B.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR: a folder shared by all nodes, with GLM-4.7-Flash, GLM-4.7-Flash_torch_dist, dapo-math-17k and
# aime-2024.
# MASTER_ADDR, HOSTFILE: see scripts/nodes.sh.  SOCKET_IFNAME (eth0): the network interface of all nodes.
#
# ACTOR_NUM_NODES (2).  One node alone: ACTOR_NUM_NODES=1 and --tensor-model-parallel-size 2.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/nodes.sh"
source "${SCRIPT_DIR}/models/glm4.7-30B-A3B.sh"

need BASE_DIR
SOCKET_IFNAME="${SOCKET_IFNAME:-eth0}"

NUM_NODES="${ACTOR_NUM_NODES:-2}"

CKPT_ARGS=(
    # the weights that SGLang starts with, and the tokenizer
    --hf-checkpoint "${BASE_DIR}/GLM-4.7-Flash"
    # the reference model
    --ref-load "${BASE_DIR}/GLM-4.7-Flash_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${BASE_DIR}/GLM-4.7-Flash_slime/"
    --save "${BASE_DIR}/GLM-4.7-Flash_slime/"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-max-response-len 32768
    --rollout-temperature 1

    --global-batch-size 1024
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 32768
    --eval-top-p 1
)

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --context-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    # 47 layers do not divide by 2
    --decoder-last-pipeline-num-layers 23

    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 32768
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    # The optimizer's state is spread over the nodes; on one node add Adam on the host:
    # --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
)

MTP_ARGS=(
    --mtp-num-layers 1
    --enable-mtp-training
    --mtp-loss-scaling-factor 0.2
)

WANDB_ARGS=(
    # --use-wandb
    # --wandb-project slime
    # --wandb-group glm4.7-30B-A3B
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.8
    # 20 heads do not divide by 8: attention in data-parallel ranks, as on one node
    --sglang-enable-dp-attention
    --sglang-dp-size 8
    --sglang-enable-dp-lm-head
    --sglang-moe-dense-tp-size 1

    --sglang-speculative-algorithm EAGLE
    --sglang-speculative-num-steps 3
    --sglang-speculative-eagle-topk 1
    --sglang-speculative-num-draft-tokens 4

    --sglang-cuda-graph-max-bs-decode 64
    --sglang-max-running-requests 512
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash

    # DeepEP in the trainer
    --moe-enable-deepep
    --moe-token-dispatcher-type flex
)

start_nodes "${NUM_NODES}" 8

JOB_ENV="$(job_env \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "GLOO_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "TP_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "NCCL_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "NCCL_NVLS_ENABLE=$(has_nvlink)" \
    NCCL_CUMEM_ENABLE=0)"
submit_job train.py \
    --actor-num-nodes "${NUM_NODES}" \
    --actor-num-gpus-per-node 8 \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "${MTP_ARGS[@]}" \
    "$@"
