"""Quantizes named tensors into the format that engines hold, given by a checkpoint's quantization config.

    config.json ─▶ read_quantization ─▶ as_stored ─▶ a format (formats.py)   ┐
    names in the index ─▶ quantized_names                                    ┴▶ Quantizer

``block_fp8``, ``group_int`` and ``mxfp4`` hold the maths.  ``formats`` also reads quantized weights back, and defines
which weights converters quantize.
"""

from slime.weights.quantize.quantizer import Quantizer, as_stored, quantized_names, read_format, read_quantization

__all__ = ["Quantizer", "as_stored", "quantized_names", "read_format", "read_quantization"]
