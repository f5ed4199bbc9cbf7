"""The live model as a Hugging Face folder (``--save-hf``)."""

from __future__ import annotations

import json
import logging
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.gather import HostWeights, iter_hf_tensors
from slime.utils.errors import ConfigError
from slime.weights.hf_files import HfFolderWriter
from slime.weights.named_tensors import wire_dtype

logger = logging.getLogger(__name__)


def save_hf_model_to_path(
    args: Namespace,
    output_dir: str | Path,
    model: Sequence[torch.nn.Module],
    *,
    model_name: str,
    quantization_config: dict[str, Any] | None = None,
    host_weights: HostWeights | None = None,
) -> None:
    """Write the model under its HF names, in the dtype of ``--hf-checkpoint``'s config.  Collective; rank 0 writes.

    Raises:
        ConfigError: ``--hf-checkpoint`` is not a local folder, or is the target itself.
    """
    source = Path(args.hf_checkpoint)
    if not source.is_dir():
        raise ConfigError(f"--hf-checkpoint {source} is not a folder; config and tokenizer are copied from it")
    start = time.monotonic()
    dtype = wire_dtype(json.loads((source / "config.json").read_text()))
    writer = HfFolderWriter(output_dir, assets_from=source) if dist.get_rank() == 0 else None
    tensors = iter_hf_tensors(
        args,
        model,
        model_name=model_name,
        dtype=dtype,
        quantization_config=quantization_config,
        host_weights=host_weights,
    )
    for name, tensor in tensors:
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
        logger.info(
            "wrote the HF model %s: %.2f GiB in %.1f s",
            output_dir,
            writer.total_bytes / 2**30,
            time.monotonic() - start,
        )
    dist.barrier()
