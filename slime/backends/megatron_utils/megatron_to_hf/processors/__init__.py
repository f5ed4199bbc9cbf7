"""Old import path of the quantization of exported weights, see ``slime.backends.megatron_utils.megatron_to_hf``."""

from slime.backends.megatron_utils.megatron_to_hf.quantization import quantize_params

__all__ = ["quantize_params"]
