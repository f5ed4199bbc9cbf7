#!/usr/bin/env bash
# GRPO on math with GLM-5.2 (744B-A40B) on 32 nodes of 8 GPUs: trained in bf16, served in FP8, prefill and decode
# apart.
#
#   scripts/run-glm5.2-744B-A40B.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR: a folder shared by all nodes, with GLM-5.2-FP8, GLM-5.2_torch_dist and dapo-math-17k.
# MASTER_ADDR, HOSTFILE: see scripts/nodes.sh.  SOCKET_IFNAME (eth0): the network interface of all nodes.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/nodes.sh"
source "${SCRIPT_DIR}/models/glm5.2-744B-A40B.sh"

need BASE_DIR MASTER_ADDR
SOCKET_IFNAME="${SOCKET_IFNAME:-eth0}"

NUM_NODES="${ACTOR_NUM_NODES:-32}"

CKPT_ARGS=(
    # the weights that SGLang starts with, and the tokenizer
    --hf-checkpoint "${BASE_DIR}/GLM-5.2-FP8"
    # the reference model
    --ref-load "${BASE_DIR}/GLM-5.2_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${BASE_DIR}/GLM-5.2_slime/"
    --save "${BASE_DIR}/GLM-5.2_slime/"
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
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --rollout-max-response-len 65536
    --rollout-temperature 1.0

    --global-batch-size 64
    --balance-data
)

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --context-parallel-size 8
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    # With shared sparse-attention indices each stage must begin at a layer that computes its own: 1, 15, 23, ..., 63.
    --decoder-first-pipeline-num-layers 14
    --decoder-last-pipeline-num-layers 16

    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
    --data-pad-size-multiplier 1024
    --log-probs-chunk-size 16384
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --kl-coef 0.00
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28

    --use-tis
    --tis-clip-low 0.5
    --tis-clip 2.0
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98

    # Adam on the host: its state needs no GPU memory.
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
)

WANDB_ARGS=(
    # --use-wandb
    # --wandb-project slime
    # --wandb-group glm5.2-744B-A40B
)

# One prefill engine of 64 GPUs and three decode engines of 64: DeepEP dispatches to at most 160 ranks.
SGLANG_CONFIG="$(mktemp "${TMPDIR:-/tmp}/glm5.2-engines-XXXXXX.yaml")"
cat >"${SGLANG_CONFIG}" <<'YAML'
sglang:
  - name: default
    server_groups:
      - worker_type: prefill
        num_gpus: 64
        num_gpus_per_engine: 64
        overrides:
          dp_size: 64
          ep_size: 64
          enable_dp_attention: true
          enable_dp_lm_head: true
          moe_dense_tp_size: 1
          load_balance_method: follow_bootstrap_room
          chunked_prefill_size: 131072
          max_running_requests: 512
          deepep_mode: auto
      - worker_type: decode
        num_gpus: 192
        num_gpus_per_engine: 64
        overrides:
          dp_size: 64
          ep_size: 64
          enable_dp_attention: true
          enable_dp_lm_head: true
          moe_dense_tp_size: 1
          max_running_requests: 768
          cuda_graph_max_bs_decode: 12
          deepep_mode: low_latency
          moe_runner_backend: deep_gemm
          disable_overlap_schedule: true
YAML

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 64
    --sglang-mem-fraction-static 0.70
    --sglang-config "${SGLANG_CONFIG}"
    --sglang-enable-dp-attention
    --sglang-ep-size 64
    --sglang-dp-size 64
    --sglang-moe-dense-tp-size 1
    --sglang-enable-dp-lm-head
    --sglang-moe-a2a-backend deepep
    --sglang-deepep-mode auto

    --sglang-page-size 64
    --sglang-kv-cache-dtype fp8_e4m3
    --sglang-dsa-decode-backend flashmla_kv
    --sglang-dsa-prefill-backend flashmla_sparse
    --sglang-attention-backend dsa
    --sglang-cuda-graph-max-bs-decode 8
    --sglang-disable-overlap-schedule
    --sglang-max-running-requests 512
    --sglang-watchdog-timeout 3600

    --sglang-disaggregation-transfer-backend mooncake
    --sglang-disaggregation-ib-device mlx5_100,mlx5_101,mlx5_102,mlx5_103,mlx5_104,mlx5_105,mlx5_106,mlx5_107

    # the model's MTP layer drafts
    --sglang-speculative-algorithm EAGLE
    --sglang-speculative-num-steps 4
    --sglang-speculative-eagle-topk 1
    --sglang-speculative-num-draft-tokens 5
    --sglang-speculative-draft-attention-backend dsa
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --moe-token-dispatcher-type alltoall
    --no-check-for-nan-in-loss-and-grad
    --update-weight-buffer-size 2147483648
)

start_nodes "${NUM_NODES}" 8

# 64: the largest decode batch, 12 requests (cuda_graph_max_bs_decode) x 5 draft tokens = 60, rounded up.
JOB_ENV="$(job_env \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "GLOO_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "TP_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "NCCL_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    NCCL_P2P_LEVEL=NVL \
    NCCL_NVLS_ENABLE=0 \
    NCCL_CUMEM_ENABLE=0 \
    NCCL_NET_GDR_LEVEL=2 \
    NCCL_IB_QPS_PER_CONNECTION=2 \
    NCCL_IB_TC=160 \
    NCCL_IB_TIMEOUT=22 \
    NCCL_PXN_DISABLE=0 \
    NCCL_MIN_CTAS=4 \
    NVTE_FWD_LAYERNORM_SM_MARGIN=8 \
    NVTE_BWD_LAYERNORM_SM_MARGIN=8 \
    INDEXER_ROPE_NEOX_STYLE=0 \
    MC_IB_PCI_RELAXED_ORDERING=1 \
    MLP_SKIP_SORT_RDMA=true \
    SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=64 \
    SGLANG_JIT_DEEPGEMM_PRECOMPILE=true \
    NVSHMEM_DISABLE_NCCL=1)"
submit_job train.py \
    --actor-num-nodes "${NUM_NODES}" \
    --actor-num-gpus-per-node 8 \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
