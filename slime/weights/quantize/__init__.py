"""Named tensors in the format in which the engines hold them, as the quantization config of a checkpoint says.

    config.json ─▶ config.read_format ─▶ a format (formats.py)   ┐
    names in the index ─▶ quantized_names                        ┴▶ make_quantizer ─▶ Quantizer

``block_fp8``, ``ue8m0`` and ``group_int`` are the mathematics; ``offline_rules`` is what converters quantize;
``stored`` reads quantized weights back.
"""

from slime.weights.quantize.config import read_format
from slime.weights.quantize.quantizer import Quantizer, make_quantizer, quantized_names

__all__ = ["Quantizer", "make_quantizer", "quantized_names", "read_format"]
