"""Convert a Megatron ``torch_dist`` checkpoint into a Hugging Face folder, in one process and without a GPU.

    python tools/convert_torch_dist_to_hf.py --input-dir RUN/iter_0000012 --output-dir MODEL --origin-hf-dir ORIGINAL

The checkpoint says its own model flags (``common.pt``); ``--origin-hf-dir`` gives config and tokenizer, and the dtype.
Tensors are read one at a time.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.observability.logging_utils import configure_logger
from slime.utils.errors import ConfigError, DataError
from slime.weights.hf_files import DEFAULT_SHARD_BYTES, HfFolderWriter, is_weight_file
from slime.weights.named_tensors import wire_dtype
from tools.cli import clean_exit

logger = logging.getLogger(__name__)

GLOBAL_PREFIX = "module.module."
_STACKED_LAYERS = re.compile(r"^(.*\.layers)\.(?!\d+\.)(.*)$")
_STACKED_EXPERTS = re.compile(r"^(.*\.experts)\.experts\.(linear_fc[12])\.(weight|bias)$")


def parse(argv: list[str]) -> Namespace:
    """The tool's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="checkpoint folder: .../iter_0000012 or .../release")
    parser.add_argument("--output-dir", required=True, help="Hugging Face folder to write")
    parser.add_argument("--origin-hf-dir", help="folder whose config, tokenizer and dtype the result takes")
    parser.add_argument("--model-name", help="name of the model's HF config class; default: from --origin-hf-dir")
    parser.add_argument("--vocab-size", type=int, help="vocabulary without padding; default: the checkpoint's")
    parser.add_argument("--chunk-size", type=int, default=DEFAULT_SHARD_BYTES, help="bytes of a shard at most")
    parser.add_argument("-f", "--force", action="store_true", help="write over an existing folder")
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="take tensors Megatron does not hold from there",
    )
    return parser.parse_args(argv)


def read_model_args(folder: Path) -> Namespace:
    """The arguments of the run that saved the checkpoint."""
    path = folder / "common.pt"
    if not path.exists():
        raise DataError(
            f"--input-dir {folder}: no common.pt in it; name an iter_... or release folder of a checkpoint"
        )
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401 - its classes are in the file

    return torch.load(path, map_location="cpu", weights_only=False)["args"]


def iter_model_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Global Megatron name and tensor of every parameter; stacked layers and experts come one by one."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    for key in sorted(metadata):
        entry = metadata[key]
        if not isinstance(entry, TensorStorageMetadata) or "optimizer" in key or "_state" in key:
            continue
        request = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        dcp.load(request, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        for name, tensor in _unstack_layers(key, request[key]):
            yield from _unstack_experts(name, tensor)


def _unstack_layers(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    match = _STACKED_LAYERS.match(name)
    if match is None:
        yield name, tensor
        return
    for index, layer in enumerate(tensor):
        yield f"{match[1]}.{index}.{match[2]}", layer


def _unstack_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    match = _STACKED_EXPERTS.match(name)
    if match is None:
        yield name, tensor
        return
    for index, expert in enumerate(tensor):
        yield f"{match[1]}.{match[2]}.{match[3]}{index}", expert


def model_name_of(options: Namespace) -> str:
    """The model type, which chooses the table of weights; read as JSON, for transformers does not know every one."""
    if options.model_name:
        return options.model_name
    if not options.origin_hf_dir:
        raise ConfigError("give --origin-hf-dir or --model-name: the names in the result depend on the architecture")
    from slime.backends.megatron_utils.hf_config_check import read_hf_config

    return read_hf_config(options.origin_hf_dir)["model_type"]


def origin_tensors(folder: Path, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a Hugging Face folder that are not in ``wanted``."""
    for path in sorted(folder.iterdir()):
        if is_weight_file(path.name) and path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name not in wanted:
                        yield name, file.get_tensor(name)


def convert(options: Namespace) -> Path:
    """Read, rename, write; gives the folder written."""
    from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf

    source, target = Path(options.input_dir), Path(options.output_dir)
    if target.exists() and any(target.iterdir()) and not options.force:
        raise ConfigError(f"--output-dir {target} is not empty; pass -f to write over it")
    args: Any = read_model_args(source)
    if options.vocab_size is not None:
        args.vocab_size = options.vocab_size
    # It says which copies of its tensors a checkpoint has; the folder of the run may be gone or another one by now.
    args.hf_checkpoint = options.origin_hf_dir
    name_of_model = model_name_of(options)
    dtype = None
    if options.origin_hf_dir:
        dtype = wire_dtype(json.loads((Path(options.origin_hf_dir) / "config.json").read_text()))
    start = time.monotonic()
    writer = HfFolderWriter(target, assets_from=options.origin_hf_dir, shard_bytes=options.chunk_size)
    names: set[str] = set()
    for name, tensor in iter_model_tensors(source):
        for hf_name, hf_tensor in convert_to_hf(args, name_of_model, GLOBAL_PREFIX + name, tensor):
            names.add(hf_name)
            keep = dtype is None or not hf_tensor.is_floating_point() or "correction_bias" in hf_name
            writer.add(hf_name, hf_tensor if keep else hf_tensor.to(dtype))
    if options.add_missing_from_origin_hf:
        writer.add_all(origin_tensors(Path(options.origin_hf_dir), names))
    writer.close()
    logger.info(
        "wrote %d tensors, %.2f GiB, to %s in %.1f s", len(names), writer.total_bytes / 2**30, target,
        time.monotonic() - start,
    )  # fmt: skip
    return target


def main() -> None:
    """The command line."""
    configure_logger()
    with clean_exit():
        convert(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
