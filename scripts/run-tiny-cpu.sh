#!/usr/bin/env bash
# GRPO on the tiny arithmetic task, on two CPU cores: one SGLang engine behind the router and one Megatron rank, sharing
# one logical GPU.  scripts/demo.sh makes its inputs and prints its results.
#
#   scripts/run-tiny-cpu.sh [FLAG...]           more flags for train.py; a later flag overrides an earlier one
#   SAVE_DIR=runs/tiny/control scripts/run-tiny-cpu.sh --lr 0     the control: nothing is learned
#
# LOOP (sync): "async" uses train_async.py: generation never stops, and engine and trainer have a GPU each;
# "ahead" is like "async", but generation stops for each push and is one rollout ahead of the trainer;
# "apart" takes turns like "sync", with a GPU each.
# PROMPTS: with "own", the FLAGs give prompts, chat template and reward, because these cannot be unset.
# TINY_DIR (runs/tiny): task/ and the warm start sft/.  SEED (1): of sampling and data order.  The result is in
# SAVE_DIR (TINY_DIR/grpo-seed1); the same command resumes a run that was killed.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

TINY_DIR="${TINY_DIR:-runs/tiny}"
SEED="${SEED:-1}"
SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/grpo-seed${SEED}}"
LOOP="${LOOP:-sync}"
need_file "${TINY_DIR}/task/hf/config.json" "Run make demo first, or name its folder in TINY_DIR."

CKPT_ARGS=(
    --hf-checkpoint "${TINY_DIR}/task/hf"
    --ref-load "${TINY_DIR}/sft"
    --load "${SAVE_DIR}"
    --save "${SAVE_DIR}"
    --save-interval 10
    --save-hf "${SAVE_DIR}/hf/{rollout_id}"
)

PROMPT_ARGS=(
    --prompt-data "${TINY_DIR}/task/data/grpo.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --custom-rm-path examples.tiny_arithmetic.reward.reward
)
[[ "${PROMPTS:-}" != own ]] || PROMPT_ARGS=()

ROLLOUT_ARGS=(
    --rollout-shuffle
    --rollout-seed "${SEED}"
    --seed "${SEED}"
    --num-rollout 40
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 32
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 5
    --eval-config "${TINY_DIR}/task/eval.yaml"
)

PERF_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
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
    --lr 5e-4
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --clip-grad 1.0
)

TRACKING_ARGS=(
    --use-tensorboard
    # --use-wandb
    # --wandb-mode offline
    # --wandb-dir "${SAVE_DIR}"
    # --wandb-project slime-tiny
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-server-concurrency 256
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
)

if [[ "${LOOP}" == async ]]; then
    SCRIPT=train_async.py
    LOOP_ARGS=(
        --rollout-num-gpus 1
        --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
        --eval-function-path slime.rollout.sglang_rollout.generate_rollout
        --max-staleness 2
    )
    start_ray 2
elif [[ "${LOOP}" == ahead ]]; then
    SCRIPT=train_async.py
    LOOP_ARGS=(--rollout-num-gpus 1)
    start_ray 2
elif [[ "${LOOP}" == apart ]]; then
    SCRIPT=train.py
    LOOP_ARGS=(--rollout-num-gpus 1)
    start_ray 2
elif [[ "${LOOP}" == sync ]]; then
    SCRIPT=train.py
    LOOP_ARGS=(--colocate)
    start_ray 1
else
    echo "run-tiny-cpu.sh: LOOP is ${LOOP}; it must be sync, async, apart or ahead" >&2
    exit 2
fi

JOB_ENV="$(job_env "TENSORBOARD_DIR=${SAVE_DIR}/tensorboard")" submit_job "${SCRIPT}" \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    "${LOOP_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${PROMPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${TRACKING_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
