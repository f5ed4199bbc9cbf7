"""The division of the FP8 kernel: a product with the reciprocal and one correction, as the hardware computes it.

``triton_fp8._corrected`` runs on GPUs only; here the same steps go through the C library's fused multiply-add.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import random

import numpy as np
import pytest

fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fma.restype = ctypes.c_float
fma.argtypes = [ctypes.c_float] * 3


def quotient(x: float, scale: np.float32) -> float:
    reciprocal = np.float32(1.0) / scale
    first = float(np.float32(x) * reciprocal)
    return fma(fma(first, float(scale), -x), -float(reciprocal), first)


@pytest.mark.parametrize("seed", range(4))
def test_one_correction_gives_the_fp32_quotient_of_a_bf16_number(seed: int):
    choose = random.Random(seed)
    for _ in range(200):
        scale = np.float32((1 + choose.getrandbits(23) / 2**23) * 2.0 ** choose.randint(-30, 30))
        for step in range(0, 128, 3):
            x = choose.choice([-1, 1]) * (1 + step / 128) * 2.0 ** choose.randint(-30, 30)
            assert quotient(x, scale) == float(np.float32(x) / scale), (x, scale)


def test_without_the_correction_many_would_be_wrong():
    x = (1 + np.arange(128) / 128).astype(np.float32)
    scale = (1 + np.arange(1, 1000, dtype=np.float32) / 1000)[:, None].astype(np.float32)
    wrong = x * (np.float32(1) / scale) != x / scale
    assert 0.1 < wrong.mean() < 0.5


def test_zeros_keep_their_sign():
    assert [math.copysign(1, quotient(zero, np.float32(1.37))) for zero in (0.0, -0.0)] == [1, -1]
