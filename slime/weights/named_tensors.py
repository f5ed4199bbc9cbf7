"""Names, dtypes and sizes of HF-named tensors on their way to an engine."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import ConfigError, DataError

Header = tuple[str, tuple[int, ...], torch.dtype]
"""HF name, shape and dtype of a tensor as it travels."""
NamedTensors = list[tuple[str, Tensor]]
"""HF name and full (unsharded) tensor, in the order in which they were made."""


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def check_finite(tensor: Tensor, what: str) -> None:
    """Refuse a weight with NaN or infinity in it; one pass over its elements.

    Args:
        tensor: any; only floating-point ones of 16 bits and more are looked at.

    Raises:
        DataError: with the place of the first such element.
    """
    # No dtype for the sum: with one, torch converts the whole tensor first, at a tenth of the speed.
    if not tensor.is_floating_point() or tensor.itemsize < 2 or bool(torch.isfinite(tensor.sum())):
        return
    wrong = torch.nonzero(~torch.isfinite(tensor))  # none where the sum alone was too large
    if len(wrong):
        place = wrong[0].tolist()
        raise DataError(
            f"{what} is {float(tensor[tuple(place)])} at {place}, one of {len(wrong)} such elements; weights must be "
            "finite. Copy or convert the checkpoint again, or use an earlier one."
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name an engine knows the dtype by: ``bfloat16``, not ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def config_dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """Return the floating-point dtype in which the files of a checkpoint with this HF config hold its parameters.

    Reads ``dtype`` (transformers 5) or ``torch_dtype``, in the text part of a multimodal config when the top has
    neither; bfloat16 when no part says anything.

    Raises:
        ConfigError: the config names something that is not a floating-point dtype of torch.
    """
    for part in (hf_config, hf_config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if name is None:
            continue
        if (dtype := parse_dtype(name)) is None:
            raise ConfigError(
                f"the config.json of --hf-checkpoint says dtype {name!r}, which is no floating-point dtype of torch; "
                "write bfloat16, float16 or float32 there"
            )
        return dtype
    return torch.bfloat16


def parse_dtype(name: Any) -> torch.dtype | None:
    """Return the floating-point dtype of this name, as torch or SGLang spells it (``half``); None for another."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def pushed_dtype(engine_dtypes: Iterable[str], trainer_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a push: that in which the engines compute, the widest where they differ.

    Args:
        engine_dtypes: ``EngineProxy.dtype`` of each; "" for the trainer's.
    """
    dtypes = [parse_dtype(name) or trainer_dtype for name in engine_dtypes]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else trainer_dtype
