#!/usr/bin/env bash
# The warm start of the examples with tools: teaches the demo's warm start a weak use of search, Python and judging.
#
#   examples/tiny_tools/warm-start.sh [FLAG...]
#   WARM_START=agents examples/tiny_tools/warm-start.sh       tool calls, orders and code instead
#   WARM_START=gym examples/tiny_tools/warm-start.sh          sums of reasoning-gym instead
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in TINY_DIR/tools (TINY_DIR/agents, ..); two to four minutes
# on two cores.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"
source "${REPO_DIR}/scripts/models/tiny-arithmetic.sh"

TINY_DIR="${TINY_DIR:-runs/tiny}"
WARM_START="${WARM_START:-tools}"
TOOLS_DIR="${TINY_DIR}/${WARM_START}"
ROWS_PER_STEP=64

if [[ -f "${TOOLS_DIR}/sft/done" ]]; then
    echo "${TOOLS_DIR}/sft exists already"
    exit 0
fi
python3 examples/tiny_tools/make_task.py --task "${WARM_START}" --output "${TOOLS_DIR}"
NUM_STEPS=$(($(wc -l <"${TOOLS_DIR}/sft.jsonl") / ROWS_PER_STEP))

start_ray 1

submit_job train_async.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    "${MODEL_ARGS[@]}" \
    --hf-checkpoint "${TINY_DIR}/task/hf" \
    --ref-load "${TINY_DIR}/sft" \
    --load "${TOOLS_DIR}/sft" \
    --save "${TOOLS_DIR}/sft" \
    --save-interval 1000 \
    --save-hf "${TOOLS_DIR}/sft/hf" \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
    --prompt-data "${TOOLS_DIR}/sft.jsonl" \
    --input-key messages \
    --num-rollout "${NUM_STEPS}" \
    --rollout-batch-size "${ROWS_PER_STEP}" \
    --global-batch-size "${ROWS_PER_STEP}" \
    --loss-type sft_loss \
    --calculate-per-token-loss \
    --disable-compute-advantages-and-returns \
    --debug-train-only \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --optimizer adam \
    --lr 3e-3 \
    --min-lr 0 \
    --lr-warmup-iters 10 \
    --lr-decay-style WSD \
    --lr-wsd-decay-style linear \
    --lr-wsd-decay-iters 60 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.98 \
    --clip-grad 1.0 \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --accumulate-allreduce-grads-in-fp32 \
    --attention-softmax-in-fp32 \
    "$@"
touch "${TOOLS_DIR}/sft/done"
