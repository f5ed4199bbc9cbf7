"""Exports the live model as a Hugging Face folder (``--save-hf``)."""

from __future__ import annotations

import functools
import logging
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from slime.backends.megatron_utils.hf_to_megatron.tensors import in_layout_of, in_stored_dtype, stored_dtypes
from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer, hf_form
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.errors import ConfigError
from slime.utils.files import read_model_config
from slime.weights.hf_files import HfFolderWriter
from slime.weights.named_tensors import config_dtype, tensor_bytes
from slime.weights.quantize import Quantizer

logger = logging.getLogger(__name__)


def save_hf_model_to_path(
    args: Namespace,
    output_dir: str | Path,
    model: Sequence[torch.nn.Module],
    *,
    model_name: str | None = None,
    quantization_config: dict[str, Any] | None = None,
    progress_desc: str = "export",
) -> None:
    """Write the model under its HF names, in the dtypes of ``--hf-checkpoint``.  Collective; rank 0 writes.

    Tensors that are quantized in ``--hf-checkpoint`` are quantized here too, after a cast to the dtype of its config,
    which is copied.  Tensors that the trainer does not have (a vision tower, MTP layers) are copied.

    Args:
        model_name: selects the HF names; by default the model type of ``--hf-checkpoint``.
        quantization_config: of the HF config; by default that of ``--hf-checkpoint``.
        progress_desc: label of the progress bar.

    Raises:
        ConfigError: ``--hf-checkpoint`` is not a local folder, is the target itself, or is quantized in an unsupported
            way.
    """
    source = Path(args.hf_checkpoint)
    if not source.is_dir():
        raise ConfigError(f"--hf-checkpoint {source} is not a folder; config and tokenizer are copied from it")
    start = time.monotonic()
    config = read_model_config(source)
    dtype = config_dtype(config)
    quantizer = checkpoint_quantizer(source, quantization_config or config.get("quantization_config"), dtype=dtype)
    writer = HfFolderWriter(output_dir, assets_from=source) if dist.get_rank() == 0 else None
    form = hf_form(args, model_name or config["model_type"])
    tensors = iter_hf_tensors(form, model, dtype=None)
    if writer is None:
        for _ in tensors:  # gathering is collective
            pass
    else:
        with tqdm(desc=progress_desc, unit="B", unit_scale=True, disable=None) as bar:
            dtypes = stored_dtypes(str(source))
            cast = ((name, in_stored_dtype(name, tensor, dtypes, dtype)) for name, tensor in tensors)
            stored = _as_stored(cast, quantizer, bar)
            is_left_out = functools.partial(form.weight_map.is_left_out, shape=form.dims)
            writer.add_all(in_layout_of(source, is_left_out, stored, verify=args.verify_checkpoint))
        writer.close()
        logger.info(
            "Wrote the HF model %s: %.2f GiB in %.1f s",
            output_dir,
            writer.total_bytes / 2**30,
            time.monotonic() - start,
        )
    dist.barrier(group=init_gloo_group())


def _as_stored(
    tensors: Iterable[tuple[str, torch.Tensor]], quantizer: Quantizer | None, bar: tqdm
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as it is stored, quantized if needed, and advance the progress bar."""
    for name, tensor in tensors:
        yield from [(name, tensor)] if quantizer is None else quantizer.quantize(name, tensor)
        bar.update(tensor_bytes(tensor))
