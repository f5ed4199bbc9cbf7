# DeepSeek-V3 shortened to 5 layers
MODEL_ARGS_NUM_LAYERS=5
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
