"""e4m3 and its block quantization in plain numpy, from the format's definition: a table of its 256 numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def e4m3_value(byte: int) -> float:
    """Sign, four bits of exponent with bias 7, three bits of mantissa; all ones is NaN, there is no infinity."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = np.array([e4m3_value(byte) for byte in range(127)])
"""The finite numbers from 0 to 448; a number's index is its byte."""


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """Bytes of the nearest e4m3 numbers, ties to the even byte; magnitudes above 448 give 448."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    upper = np.clip(np.searchsorted(POSITIVE, magnitude), 1, 126)
    below, above = magnitude - POSITIVE[upper - 1], POSITIVE[upper] - magnitude
    is_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return (np.where(is_upper, upper, upper - 1) + 128 * np.signbit(values)).astype(np.uint8)


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales, block by block."""
    matrix = weight.float().numpy()
    rows, columns = matrix.shape
    quantized = np.zeros((rows, columns), dtype=np.uint8)
    scales = np.zeros((-(-rows // block[0]), -(-columns // block[1])), dtype=np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            absmax = np.maximum(np.abs(matrix[part]).max(), np.float32(1e-10))
            scales[i, j] = absmax / np.float32(448)
            quantized[part] = e4m3_bytes(matrix[part] / scales[i, j])
    return quantized, scales


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a one-byte tensor."""
    return tensor.view(torch.uint8).numpy()
