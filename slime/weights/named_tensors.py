"""Names, dtypes and sizes of HF-named tensors that are pushed to engines."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import ConfigError, DataError

Header = tuple[str, tuple[int, ...], torch.dtype]
"""HF name, shape and dtype of a tensor as sent."""
NamedTensors = list[tuple[str, Tensor]]
"""(HF name, full unsharded tensor) pairs, in the order of creation."""


def tensor_bytes(tensor: Tensor) -> int:
    """Return the size of the tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def check_finite(tensor: Tensor, what: str) -> None:
    """Check that a weight has no NaN or infinity, in one pass over its elements.

    Args:
        tensor: any tensor; only floating-point tensors of at least 16 bits are checked.
        what: the tensor's name in the message.

    Raises:
        DataError: the message gives the index of the first such element.
    """
    # sum() without dtype: with one, torch converts the whole tensor first, at a tenth of the speed.
    if not tensor.is_floating_point() or tensor.itemsize < 2 or bool(torch.isfinite(tensor.sum())):
        return
    wrong = torch.nonzero(~torch.isfinite(tensor))  # empty if only the sum overflowed
    if len(wrong):
        place = wrong[0].tolist()
        raise DataError(
            f"{what} is {float(tensor[tuple(place)])} at {place}, one of {len(wrong)} such elements; weights must be "
            "finite. Copy or convert the checkpoint again, or use an earlier one."
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in engines: ``bfloat16``, not ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def config_dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """Return the floating-point dtype of the parameters in a checkpoint with this HF config.

    Reads ``dtype`` (transformers 5) or ``torch_dtype``, from ``text_config`` if the top level has neither; defaults to
    bfloat16.

    Raises:
        ConfigError: the value is not a floating-point dtype of torch.
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
    """Return the floating-point dtype named as in torch or SGLang (``half``); None for anything else."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def pushed_dtype(engine_dtypes: Iterable[str], trainer_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a push: the engines' compute dtype, or the widest if they differ.

    Args:
        engine_dtypes: ``EngineProxy.dtype`` of each engine; "" means ``trainer_dtype``.
        trainer_dtype: the dtype without engines.
    """
    dtypes = [parse_dtype(name) or trainer_dtype for name in engine_dtypes]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else trainer_dtype
