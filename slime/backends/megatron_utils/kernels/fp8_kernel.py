"""Old import path of the FP8 block cast, which lives in ``slime.weights.quantize.block_fp8``."""

from slime.weights.quantize.block_fp8 import quantize_block as blockwise_cast_to_fp8_triton

__all__ = ["blockwise_cast_to_fp8_triton"]
