# DeepSeek-V3 shortened to 20 layers
MODEL_ARGS_NUM_LAYERS=20
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
