#!/usr/bin/env bash
# Brings what scripts/run-glm4-9B.sh reads into BASE_DIR, and converts the model; what is there already stays.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="${PWD}/.venv/bin:${PATH}"
model="${BASE_DIR:?is not set: the folder for models and data}/GLM-Z1-9B-0414"

hf download zai-org/GLM-Z1-9B-0414 --local-dir "${model}"
hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir "${BASE_DIR}/dapo-math-17k"
hf download --repo-type dataset zhuzilin/aime-2024 --local-dir "${BASE_DIR}/aime-2024"
if [[ ! -e "${model}_torch_dist/latest_checkpointed_iteration.txt" ]]; then
    slime convert hf_to_torch_dist --hf-checkpoint "${model}" --save "${model}_torch_dist"
fi
