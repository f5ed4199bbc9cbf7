"""Comparison of gradients and checkpoints: plain functions of two sets of named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def gradient_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """For each parameter ``|difference| / max(|gradient|, a thousandth of the global norm)``.

    A parameter with zero gradient on both sides has error 0.  Names that only one side has are errors,
    unless they have no gradient: the reference omits MTP, which is frozen here.
    """
    global_norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    assert global_norm > 0, "the reference has no gradient at all"
    errors = {}
    for name in [*expected, *(name for name in actual if name not in expected)]:
        sides = [side[name].double() for side in (actual, expected) if name in side]
        if len(sides) == 2 and sides[0].shape != sides[1].shape:
            errors[f"{name} (shapes {tuple(sides[0].shape)} and {tuple(sides[1].shape)})"] = math.inf
        elif len(sides) == 2:
            difference, norm = float((sides[0] - sides[1]).norm()), float(sides[1].norm())
            error = difference / max(norm, 1e-3 * global_norm)
            errors[name] = math.inf if math.isnan(error) else error
        elif sides[0].any():
            errors[f"{name} (on one side only)"] = math.inf
    return errors


def differing_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are missing, extra, or differ in dtype, shape or any bit; with the reason."""
    problems = [f"{name} is missing" for name in expected if name not in actual]
    problems += [f"{name} is too many" for name in actual if name not in expected]
    for name, tensor in expected.items():
        other = actual.get(name)
        if other is None:
            continue
        if other.dtype != tensor.dtype:
            problems.append(f"{name} is {other.dtype} instead of {tensor.dtype}")
        elif other.shape != tensor.shape:
            problems.append(f"{name} is {tuple(other.shape)} instead of {tuple(tensor.shape)}")
        elif not torch.equal(_bits(other), _bits(tensor)):
            problems.append(f"{name} differs by {float((other.double() - tensor.double()).abs().max()):.3g}")
    return problems


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that signs of zero and nans count."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
