"""Convert a Megatron ``torch_dist`` checkpoint into a Hugging Face folder, in one process and without a GPU.

    slime convert torch_dist_to_hf --input-dir RUN/iter_0000012 --output-dir MODEL --origin-hf-dir ORIGINAL

The model flags are read from the checkpoint (``common.pt``); config, tokenizer and dtypes come from
``--origin-hf-dir``.  At any time, one part of the checkpoint and one shard of the result are in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tqdm import tqdm

from slime.flags.kinds import positive_int
from slime.utils.errors import ConfigError
from slime.utils.files import language_config, read_model_config, read_model_type
from slime.weights.hf_files import DEFAULT_SHARD_BYTES, HfFolderWriter, without_quantization
from slime.weights.named_tensors import check_finite, config_dtype
from slime.weights.stacked_experts import join_rows
from tools.cli import logged_run

logger = logging.getLogger(__name__)

_ADAPTER = re.compile(r"\.lora\.[ab]$")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags shared with ``convert_torch_dist_to_hf_parallel``."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="checkpoint folder: .../iter_0000012 or .../release")
    parser.add_argument("--output-dir", required=True, help="Hugging Face folder to write")
    parser.add_argument("--origin-hf-dir", help="folder to take config, tokenizer and dtypes from")
    parser.add_argument("--model-name", help="model type; default: that of --origin-hf-dir")
    parser.add_argument("--vocab-size", type=positive_int, help="rows without padding; default: the checkpoint's")
    parser.add_argument("--chunk-size", type=positive_int, default=DEFAULT_SHARD_BYTES, help="most bytes of a shard")
    parser.add_argument(
        "--no-verify-checkpoint",
        dest="verify_checkpoint",
        action="store_false",
        help="read the checkpoint without comparing its digests",
    )
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing folder")
    return parser


def parse(argv: list[str]) -> Namespace:
    """Parse the tool's flags."""
    parser = build_parser()
    parser.description = __doc__
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy tensors that the checkpoint lacks from --origin-hf-dir",
    )
    options = parser.parse_args(argv)
    if options.add_missing_from_origin_hf and not options.origin_hf_dir:
        raise ConfigError("--add-missing-from-origin-hf copies tensors from --origin-hf-dir; give that too")
    return options


def model_name_of(options: Namespace) -> str:
    """Return the model type, which decides the tensors' names: ``--model-name``, or that of ``--origin-hf-dir``."""
    if options.model_name:
        return options.model_name
    if not options.origin_hf_dir:
        raise ConfigError("give --origin-hf-dir or --model-name: tensor names depend on the model type")
    return read_model_type(options.origin_hf_dir, flag="--origin-hf-dir")


def read_tensors(folder: Path, names: list[str], *, verify: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of a Hugging Face folder; quantized ones are dequantized."""
    from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors

    with HfTensors(folder, verify=verify) as tensors:
        for name in names:
            yield name, tensors.get(name)


def convert(options: Namespace, *, load_workers: int = 1, save_workers: int = 0) -> Path:
    """Convert the checkpoint; returns the folder written.

    Args:
        options: the tool's flags.
        load_workers: slices of the checkpoint to read at a time.
        save_workers: threads that write shards in the background; 0 writes between reads.
    """
    from slime.backends.megatron_utils.flags.model_dims import model_dims
    from slime.backends.megatron_utils.hf_to_megatron.tensors import (
        in_layout_of,
        in_stored_dtype,
        stored_dtypes,
        tensor_names,
    )
    from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
    from slime.backends.megatron_utils.models import find_weight_map
    from tools.torch_dist_reader import StoredSlice, TorchDistFolder

    target = Path(options.output_dir)
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--output-dir {target} is no folder; name another")
    if target.exists() and any(target.iterdir()) and not options.force:
        raise ConfigError(f"--output-dir {target} is not empty; pass -f to write over it")
    source = TorchDistFolder(options.input_dir, verify=options.verify_checkpoint)
    slices = source.slices()
    if any(_ADAPTER.search(part.key) for part in slices):
        raise ConfigError(
            f"--input-dir {source.folder} holds the adapters of a run with --lora-rank, and no whole model; "
            "tools/convert_to_hf.py with the flags of that run merges them into the model they were trained on"
        )
    args: Any = source.read_args()
    if options.vocab_size is not None:
        _check_vocab_size(options, source.vocabulary_rows())
        args.vocab_size = options.vocab_size
    model_name = model_name_of(options)
    origin = Path(options.origin_hf_dir) if options.origin_hf_dir else None
    config = read_model_config(origin, flag="--origin-hf-dir") if origin else {}
    _check_head(options, args, config)
    default_dtype = config_dtype(config) if origin else None
    dtypes = stored_dtypes(str(origin)) if origin else {}
    start = time.monotonic()
    names: set[str] = set()

    def read(part: StoredSlice) -> list[tuple[str, torch.Tensor]]:
        converted = []
        for name, tensor in source.read(part):
            if options.verify_checkpoint:
                check_finite(tensor, f"{source.folder}: {name}")
            for hf_name, hf_tensor in convert_to_hf(args, model_name, name, tensor):
                converted.append((hf_name, in_stored_dtype(hf_name, hf_tensor, dtypes, default_dtype)))
        return converted

    weight_map, shape = find_weight_map(model_name), model_dims(args)

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        total = sum(part.num_bytes for part in slices)
        with tqdm(total=total, desc="convert", unit="B", unit_scale=True, disable=None) as bar:
            for name, tensor in join_rows(_each(_read_ahead(read, slices, load_workers), bar), shape.num_experts):
                if name not in names:  # a parameter under two names: the checkpoint's first counts
                    names.add(name)
                    yield name, tensor
        if not origin:
            return
        copies_all = getattr(options, "add_missing_from_origin_hf", False)
        missing = sorted(tensor_names(str(origin)) - names)
        copied = [name for name in missing if copies_all or weight_map.is_left_out(name, shape)]
        yield from read_tensors(origin, copied, verify=options.verify_checkpoint)
        if absent := sorted({*missing} - {*copied}):
            logger.warning(
                "%d tensors of %s are not in the checkpoint, such as %s; pass -a to copy them "
                "(tools/convert_torch_dist_to_hf.py)",
                len(absent), origin, absent[0],
            )  # fmt: skip

    with HfFolderWriter(
        target, assets_from=origin, shard_bytes=options.chunk_size, save_workers=save_workers
    ) as writer:
        writer.add_all(in_layout_of(origin, lambda name: False, converted(), verify=options.verify_checkpoint))
        if origin:
            _drop_quantization(target)
    elapsed = time.monotonic() - start
    logger.info("Wrote %d tensors, %.2f GiB, to %s in %.1f s", len(names), writer.total_bytes / 2**30, target, elapsed)
    return target


def _each(parts: Iterator[tuple[Any, Any]], bar: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all parts; the bar moves when one is through."""
    for part, tensors in parts:
        yield from tensors
        bar.update(part.num_bytes)


def _check_head(options: Namespace, args: Any, config: dict[str, Any]) -> None:
    """Refuse a copied config.json by which readers would pass over the output projection, or look for one."""
    is_tied, tied = not vars(args).get("untie_embeddings_and_output_weights"), config.get("tie_word_embeddings")
    if tied is not None and bool(tied) != is_tied:
        raise ConfigError(
            f"{options.origin_hf_dir}/config.json, which is copied, has tie_word_embeddings {tied}; the checkpoint "
            f"{options.input_dir} has {'none' if is_tied else 'an output projection'} beside the embedding; correct "
            "the config, or give the folder that belongs to the checkpoint"
        )


def _check_vocab_size(options: Namespace, rows: int | None) -> None:
    """Refuse a vocabulary that is not that of the model's config, or larger than the embedding."""
    config = read_model_config(options.origin_hf_dir, flag="--origin-hf-dir") if options.origin_hf_dir else {}
    expected = language_config(config).get("vocab_size")
    if expected is not None and options.vocab_size != expected:
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: {options.origin_hf_dir}/config.json, which is copied, says "
            f"{expected}; leave the flag out, or correct the config"
        )
    if rows is not None and options.vocab_size > rows:
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: the embedding of {options.input_dir} has {rows} rows; leave the flag "
            "out"
        )


def _read_ahead(read: Any, slices: list[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Yield each part with the result of ``read`` on it, in order; ``workers`` reads are in flight."""
    if workers <= 1:
        yield from ((part, read(part)) for part in slices)
        return
    with ThreadPoolExecutor(workers) as pool:
        in_flight: deque[tuple[Any, Future[Any]]] = deque()
        for part in slices:
            in_flight.append((part, pool.submit(read, part)))
            if len(in_flight) >= workers:
                first, result = in_flight.popleft()
                yield first, result.result()
        while in_flight:
            first, result = in_flight.popleft()
            yield first, result.result()


def _drop_quantization(target: Path) -> None:
    """Remove the quantization from the config: what was written is not quantized."""
    config = read_model_config(target)
    if (plain := without_quantization(config)) != config:
        (target / "config.json").write_text(json.dumps(plain, indent=2) + "\n")
        logger.info("The result is not quantized: removed the quantization from its config.json")


def main() -> None:
    """Run the command line."""
    with logged_run():
        convert(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
