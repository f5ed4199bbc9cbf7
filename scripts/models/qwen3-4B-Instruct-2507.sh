# Qwen3 4B Instruct 2507: Qwen3 4B with another rotary base
MODEL_ARGS_ROTARY_BASE=5000000
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4B.sh"
