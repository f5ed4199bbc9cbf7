"""Quantize a Hugging Face model to four- or eight-bit integers with GPTQ (LLM Compressor), calibrated on data.

    pip install llmcompressor==0.14.0.1   # in its own environment: it needs another transformers than slime
    slime convert hf_to_int4 --input-dir MODEL --output-dir MODEL-INT4 --data-dir prompts.jsonl \\
        --quant-type W4A16 --quant-group-size 32

``--data-dir`` is a .jsonl or .parquet file, or a folder of such, whose rows have ``messages``, ``text`` or ``prompt``.
The model must fit into host memory.  The output folder appears when it is complete; an interrupted run starts over.
``convert_hf_to_int4_direct.py`` needs neither data nor another package.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.low_precision.folders.plan import HfSource, open_source
from slime.ext.low_precision.folders.to_quantized import ignored_by_int4, require_plain
from slime.flags.kinds import any_float, any_int
from slime.rollout.prompt_files import SUFFIXES, read_rows
from slime.utils.chat_template import apply_chat_template
from slime.utils.errors import ConfigError, DataError
from slime.utils.processing_utils import load_tokenizer
from slime.weights.hf_files import copy_assets
from tools.cli import logged_run
from tools.folder_conversion import plain_weights_of

PACKAGE = "llmcompressor"
VERSION = "0.14.0.1"
NUM_BITS = {"W4A16": 4, "W8A16": 8}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="unquantized model folder")
    parser.add_argument("--output-dir", required=True, help="folder to write; new or empty")
    parser.add_argument("--data-dir", required=True, help="calibration data")
    parser.add_argument("--quant-type", choices=tuple(NUM_BITS), default="W4A16", help="bits of the weights")
    parser.add_argument("--num-calibration-samples", type=any_int, default=256, help="rows of --data-dir to use")
    parser.add_argument("--max-sequence-length", type=any_int, default=2048, help="tokens of each row to use")
    parser.add_argument(
        "--dampening-frac",
        type=any_float,
        default=0.01,
        help="damping of the Hessian, as a fraction of its mean diagonal",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of the model folder")
    parser.add_argument("--quant-group-size", type=any_int, default=32, help="columns that share a scale")
    return parser


def check(options: Namespace) -> HfSource:
    """Return the source, after all checks that need no calibration.

    Raises:
        SlimeError: a flag, the model, the data or the free disk space.
    """
    for flag in ("num_calibration_samples", "max_sequence_length", "quant_group_size"):
        if getattr(options, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(options, flag)}; it must be positive")
    if not 0 < options.dampening_frac < 1:
        raise ConfigError(f"--dampening-frac is {options.dampening_frac}; it must lie between 0 and 1")
    source = open_source(options.input_dir)
    require_plain(source)
    target = Path(options.output_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output-dir {target} is not empty; choose another folder")
    found = sum(1 for _ in islice(calibration_rows(Path(options.data_dir)), options.num_calibration_samples))
    if found < options.num_calibration_samples:
        raise ConfigError(
            f"--data-dir {options.data_dir} has {found} rows; lower --num-calibration-samples "
            f"({options.num_calibration_samples}) or give more"
        )
    place = target.absolute()
    while not place.exists():
        place = place.parent
    needed = source.total_bytes * (NUM_BITS[options.quant_type] + 4) // 16
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(f"{target} needs about {needed / 2**30:.1f} GiB, its disk has {free / 2**30:.1f} GiB free")
    return source


def calibration_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the calibration data, file by file.

    Raises:
        ConfigError: there is no data.
        DataError: a row cannot be decoded.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.is_file() and file.suffix in SUFFIXES]
    if not files:
        raise ConfigError(f"--data-dir {path} holds no file that ends in {' or '.join(SUFFIXES)}")
    for file in files:
        yield from (row for _, row in read_rows(str(file), "--data-dir"))


def token_ids(tokenizer: Any, row: dict[str, Any], max_tokens: int) -> list[int]:
    """Return one calibration row as tokens; chats go through the model's template.

    Raises:
        DataError: the row has no text.
    """
    content = next((row[key] for key in ("messages", "text", "prompt") if row.get(key)), None)
    if content is None:
        raise DataError(
            f"a row of --data-dir has the columns {sorted(row)}; messages, text or prompt must be among them"
        )
    if not isinstance(content, str):
        content = apply_chat_template(tokenizer, list(content))
    return list(tokenizer(content, truncation=True, max_length=max_tokens)["input_ids"])


def modifier_arguments(options: Namespace, source: HfSource) -> dict[str, Any]:
    """Return the arguments of LLM Compressor's GPTQModifier."""
    weights = {"num_bits": NUM_BITS[options.quant_type], "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": options.quant_group_size}
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored_by_int4(source.tensors, plain=plain_weights_of(source.folder)),
        "dampening_frac": options.dampening_frac,
        # Columns keep their order, so that weights pushed later, rounded without calibration, have the same form.
        "actorder": None,
    }


def oneshot_arguments(options: Namespace, output: Path) -> dict[str, Any]:
    """Return the arguments of LLM Compressor's oneshot except recipe, tokenizer and data set."""
    return {
        "model": options.input_dir,
        "trust_remote_code_model": options.trust_remote_code,
        "num_calibration_samples": options.num_calibration_samples,
        "max_seq_length": options.max_sequence_length,
        "save_compressed": True,
        "output_dir": str(output),
    }


def load_compressor() -> tuple[Any, Any]:
    """Import ``oneshot`` and ``GPTQModifier``.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        compressor = importlib.import_module(PACKAGE)
        modifiers = importlib.import_module(f"{PACKAGE}.modifiers.quantization")
    except ImportError as error:
        raise ConfigError(
            f"GPTQ needs the package {PACKAGE}, which cannot be imported ({error}); pip install {PACKAGE}=={VERSION} "
            "in a separate environment, or use tools/convert_hf_to_int4_direct.py, which needs no calibration"
        ) from error
    return compressor.oneshot, modifiers.GPTQModifier


def convert(options: Namespace) -> Path:
    """Calibrate, quantize and write; returns the folder written."""
    source = check(options)
    oneshot, gptq_modifier = load_compressor()
    from datasets import Dataset

    tokenizer = load_tokenizer(options.input_dir, trust_remote_code=options.trust_remote_code)
    rows = islice(calibration_rows(Path(options.data_dir)), options.num_calibration_samples)
    ids = [token_ids(tokenizer, row, options.max_sequence_length) for row in rows]
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    target = Path(options.output_dir)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_assets(options.input_dir, partial)
    oneshot(
        recipe=gptq_modifier(**modifier_arguments(options, source)),
        tokenizer=tokenizer,
        dataset=data,
        **oneshot_arguments(options, partial),
    )
    if target.is_dir():
        target.rmdir()
    os.replace(partial, target)
    return target


def main() -> None:
    """Run the command line."""
    with logged_run():
        convert(build_parser().parse_args())


if __name__ == "__main__":
    main()
