#!/usr/bin/env bash
# Run the tiny job from start to summary: task and model, conversion, warm start, GRPO.  `make demo` calls it.
# Stages whose output exists are skipped; a run that was killed resumes.
#
#   scripts/demo.sh [FLAG...]          more flags for the GRPO run
#
# TINY_DIR (runs/tiny): folder of all files.  SEED (1): seed of the GRPO run; each seed has its own folder.
# UNTIL: "warm_start" stops after the warm start.
# DEVICE (cpu): "gpu" runs GRPO with scripts/run-tiny-gpu.sh, on one GPU, and the warm start on it as well.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SEED="${SEED:-1}"
DEVICE="${DEVICE:-cpu}"
RUN_DIR="${TINY_DIR}/grpo-seed${SEED}"
if [[ "${DEVICE}" == gpu ]]; then
    RUN_DIR="${TINY_DIR}/grpo-gpu-seed${SEED}"
elif [[ "${DEVICE}" != cpu ]]; then
    echo "demo: DEVICE is ${DEVICE}; it must be cpu or gpu" >&2
    exit 2
fi
DEMO_START=${SECONDS}

# stage TITLE COMMAND...: run the command under a title, and print its time.
stage() {
    local title="$1" start=${SECONDS}
    shift
    echo "==== ${title}"
    "$@"
    echo "==== ${title}: $((SECONDS - start)) s"
}

# iteration DIR: print the last iteration saved there ("release" for a converted model), or nothing.
iteration() { cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || true; }

make_task() { python3 examples/tiny_arithmetic/make_task.py --output "${TINY_DIR}/task"; }

convert() {
    if [[ -n "$(iteration "${TINY_DIR}/torch_dist")" ]]; then
        echo "${TINY_DIR}/torch_dist exists; skipped"
        return
    fi
    python3 tools/convert_hf_to_torch_dist.py \
        --hf-checkpoint "${TINY_DIR}/task/hf" --save "${TINY_DIR}/torch_dist"
}

warm_start() {
    if [[ -f "${TINY_DIR}/sft/fit" ]]; then
        echo "${TINY_DIR}/sft exists; skipped"
        return
    fi
    scripts/run-tiny-cpu-sft.sh
    python3 examples/tiny_arithmetic/hf_accuracy.py --fit-for-grpo \
        --hf "${TINY_DIR}/sft/hf" --data "${TINY_DIR}/task/data/eval.jsonl"
    touch "${TINY_DIR}/sft/fit"
}

grpo() {
    if [[ -f "${RUN_DIR}/done" ]]; then
        echo "${RUN_DIR} exists; skipped"
        return
    fi
    "scripts/run-tiny-${DEVICE}.sh" "$@"
    touch "${RUN_DIR}/done"
}

stage "task, tokenizer and model" make_task
stage "checkpoint conversion" convert
if [[ ! -f "${TINY_DIR}/sft/fit" || ! -f "${RUN_DIR}/done" ]]; then
    stage "Ray" start_ray 1
fi
stage "warm start (supervised)" warm_start
if [[ "${UNTIL:-}" == warm_start ]]; then
    exit 0
fi
stage "GRPO, seed ${SEED}" grpo "$@"
# An independent check of the export: transformers' generate must reach the engine's accuracy.
stage "accuracy of the exported model" python3 examples/tiny_arithmetic/hf_accuracy.py \
    --hf "$(ls -d "${RUN_DIR}"/hf/* | sort -V | tail -n 1)" --data "${TINY_DIR}/task/data/eval.jsonl"
echo "==== summary"
python3 examples/tiny_arithmetic/summary.py "${RUN_DIR}"
python3 tools/report.py "${RUN_DIR}"
echo "==== demo: $((SECONDS - DEMO_START)) s in all"
