#!/usr/bin/env bash
# On-policy distillation on two CPU cores, the teacher behind an SGLang server: scripts/run-tiny-cpu.sh, other flags.
#
#   examples/on_policy_distillation/run-tiny-sglang-teacher.sh [FLAG...]
#   TEACHER_URL=http://HOST:PORT/generate examples/on_policy_distillation/run-tiny-sglang-teacher.sh    with yours
#
# TINY_DIR (runs/tiny): output of `make demo`; the student is its warm start, the teacher (TEACHER_HF) its last model,
# served by a server that this script starts and stops.  The result is in SAVE_DIR (TINY_DIR/opd-sglang).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/opd-sglang}"
TEACHER_WAIT_S="${TEACHER_WAIT_S:-600}"
mkdir -p "${SAVE_DIR}"

TEACHER_PID=""
stop_teacher() {
    [[ -z "${TEACHER_PID}" ]] || kill -KILL -- "-${TEACHER_PID}" 2>/dev/null || true
}
trap 'status=$?; stop_teacher; _clean_up "${status}"' EXIT
trap 'stop_teacher; _clean_up 130' INT
trap 'stop_teacher; _clean_up 143' TERM

# start_teacher: a server of TEACHER_HF in a separate process group; sets TEACHER_URL when it answers.
start_teacher() {
    local port device=(--dtype bfloat16) start=${SECONDS}
    TEACHER_HF="${TEACHER_HF:-$(ls -d "${TINY_DIR}"/grpo-seed1/hf/* 2>/dev/null | sort -V | tail -n 1 || true)}"
    need_file "${TEACHER_HF:-${TINY_DIR}/grpo-seed1/hf}/config.json" "Run make demo first, or set TEACHER_HF or TEACHER_URL."
    port="$(free_ports 1)"
    if ! nvidia-smi >/dev/null 2>&1; then
        export SGLANG_USE_CPU_ENGINE=1
        device=(--device cpu --dtype float32 --attention-backend torch_native --disable-overlap-schedule)
    fi
    setsid python3 -m sglang.launch_server --model-path "${TEACHER_HF}" --host 127.0.0.1 --port "${port}" \
        "${device[@]}" --mem-fraction-static 0.1 --max-total-tokens 65536 --skip-server-warmup \
        >"${SAVE_DIR}/teacher.log" 2>&1 &
    TEACHER_PID=$!
    echo "teacher: starting a server of ${TEACHER_HF} (log ${SAVE_DIR}/teacher.log)"
    until python3 - "http://127.0.0.1:${port}/model_info" <<'PY'; do
import sys, urllib.request

try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=5)
except OSError:
    sys.exit(1)
PY
        if ! kill -0 "${TEACHER_PID}" 2>/dev/null || ((SECONDS - start > TEACHER_WAIT_S)); then
            echo "teacher: no server after $((SECONDS - start)) s; the end of its log:" >&2
            tail -n 5 "${SAVE_DIR}/teacher.log" >&2
            return 1
        fi
        sleep 1
    done
    TEACHER_URL="http://127.0.0.1:${port}/generate"
    echo "teacher: answers after $((SECONDS - start)) s at ${TEACHER_URL}"
}

[[ -n "${TEACHER_URL:-}" ]] || start_teacher

# The evaluation sets its own grader, because --custom-rm-path returns the teacher's answer as the reward.
python3 - "${TINY_DIR}/task/eval.yaml" >"${SAVE_DIR}/eval.yaml" <<'PY'
import sys

text = open(sys.argv[1]).read()
print(text.replace("  defaults:\n", "  defaults:\n    custom_rm_path: examples.tiny_arithmetic.reward.reward\n"), end="")
PY

scripts/run-tiny-cpu.sh \
    --use-opd \
    --opd-type sglang \
    --opd-kl-coef 1.0 \
    --rm-url "${TEACHER_URL}" \
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func \
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards \
    --eval-config "${SAVE_DIR}/eval.yaml" \
    --n-samples-per-prompt 4 \
    --global-batch-size 128 \
    --num-rollout 10 \
    "$@"
