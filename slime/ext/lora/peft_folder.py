"""Folders of adapters as the package ``peft`` writes and reads them.

adapter_config.json         rank, alpha, names of the modules
adapter_model.safetensors   base_model.model.{module}.lora_A.weight [r, K], .lora_B.weight [N, r]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from slime.ext.lora.flags import LoraConfig
from slime.utils.errors import DataError
from slime.utils.files import parse_object, read_outside_file, write_atomically

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # The other beginnings (pissa, olora, corda, loftq, lora_ga) change the weights under the adapters too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
"""Values of plain LoRA."""
_WITHOUT_EFFECT = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("megatron_core", "qalora_group_size", "eva_config"),
)
"""Keys of any value: compared elsewhere, seen from the tensors, or of training with peft.  A key that is neither here
nor above must turn nothing on."""


def tensor_name(module: str, matrix: str) -> str:
    """Return the name of matrix ``A`` or ``B`` of the adapter of a Hugging Face module."""
    return f"{_PREFIX}{module}.lora_{matrix}.weight"


def peft_config(tensors: Mapping[str, Tensor], config: LoraConfig, *, base_model: str) -> dict[str, Any]:
    """Return the content of adapter_config.json; arguments as in :func:`write_peft_folder`."""
    modules = {name.removeprefix(_PREFIX).rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }


def write_peft_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: LoraConfig, *, base_model: str, flag: str
) -> None:
    """Write adapters, the configuration last.

    Args:
        folder: made when it is missing.
        tensors: by :func:`tensor_name`.
        config: of the run.
        base_model: name or folder of the model that they belong to.
        flag: that named the folder, for errors.

    Raises:
        DataError: the disk refuses.
    """
    content = peft_config(tensors, config, base_model=base_model)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    text = json.dumps(content, indent=2).encode()
    write_atomically(folder / TENSOR_FILE, lambda file: file.write(data), what="Adapters", flag=flag)
    write_atomically(folder / CONFIG_FILE, lambda file: file.write(text), what="Adapters", flag=flag)


def read_peft_config(folder: str | Path, *, flag: str, config: LoraConfig | None = None) -> dict[str, Any]:
    """Return the content of a folder's adapter_config.json.

    Args:
        folder: of ``peft``.
        flag: that named the folder, for errors.
        config: of the run; rank and alpha must be the folder's.  None: they may be any.

    Raises:
        DataError: it is missing or damaged, or means another formula than plain LoRA, another rank or another scale.
    """
    try:
        content = parse_object(read_outside_file(Path(folder) / CONFIG_FILE))
    except (OSError, ValueError) as error:
        raise DataError(f"{flag}: {CONFIG_FILE} cannot be read: {error}") from error
    for key, value in {"peft_type": None, **content}.items():
        plain = _PLAIN_LORA.get(key, (None, False, 0, "", [], {}))
        if key not in _WITHOUT_EFFECT and value not in plain:
            known = ", ".join(json.dumps(one) for one in plain) if key in _PLAIN_LORA else "null"
            raise DataError(
                f"{flag}: {CONFIG_FILE} has {key} {str(value)[:80]!r}; only plain LoRA is known here, where it is "
                f"{known}. Convert the adapter with peft, or train from a model with it merged in."
            )
    if config is not None and (theirs := (content.get("r"), content.get("lora_alpha"))) != (config.rank, config.alpha):
        raise DataError(
            f"{flag}: r and lora_alpha are {theirs[0]} and {theirs[1]}; --lora-rank and --lora-alpha are "
            f"{config.rank} and {config.alpha:g}; give the folder's."
        )
    return content


def read_peft_folder(folder: str | Path, config: LoraConfig, *, flag: str) -> dict[str, Tensor]:
    """Return the tensors of a folder.

    Args:
        folder: of ``peft``.
        config: of the run; rank and alpha must be the folder's.
        flag: that named the folder, for errors.

    Raises:
        DataError: files are missing or damaged, or mean another formula, rank or scale than this run's.
    """
    read_peft_config(folder, flag=flag, config=config)
    try:
        return load_file(Path(folder) / TENSOR_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{flag}: {TENSOR_FILE} cannot be read: {error}") from error
