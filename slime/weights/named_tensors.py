"""Names, dtypes and sizes of HF-named tensors on their way to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import ConfigError

Header = tuple[str, tuple[int, ...], torch.dtype]
"""HF name, shape and dtype of a tensor as it travels."""
NamedTensors = list[tuple[str, Tensor]]
"""HF name and full (unsharded) tensor, in the order in which they were made."""


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name an engine knows the dtype by: ``bfloat16``, not ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def wire_dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """Return the floating-point dtype in which an engine holds the parameters of this HF config.

    Reads ``dtype`` (transformers 5) or ``torch_dtype``, in the text part of a multimodal config when the top has
    neither; bfloat16 when no part says anything.

    Raises:
        ConfigError: the config names something that is not a floating-point dtype of torch.
    """
    for part in (hf_config, hf_config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if name is None:
            continue
        dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(
                f"the config.json of --hf-checkpoint says dtype {name!r}, which is no floating-point dtype of torch; "
                "write bfloat16, float16 or float32 there"
            )
        return dtype
    return torch.bfloat16
