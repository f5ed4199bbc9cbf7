"""Named tensors in the format in which the engines hold them, as the quantization config of a checkpoint says.

    config.json ─▶ read_quantization ─▶ as_stored ─▶ a format (formats.py)   ┐
    names in the index ─▶ quantized_names                                    ┴▶ Quantizer

``block_fp8`` and ``group_int`` are the mathematics; ``formats`` reads quantized weights back, too, and says what
converters quantize.
"""

from slime.weights.quantize.quantizer import Quantizer, as_stored, quantized_names, read_format, read_quantization

__all__ = ["Quantizer", "as_stored", "quantized_names", "read_format", "read_quantization"]
