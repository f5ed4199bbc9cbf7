"""Quantize a Hugging Face model to four-bit integers by rounding to nearest, shard by shard.

    slime convert hf_to_int4_direct --model-dir MODEL --save-dir MODEL-INT4 --group-size 32 --max-workers 4

The format is compressed-tensors' ``pack-quantized``.  ``convert_hf_to_int4.py`` calibrates on data (GPTQ); this tool
needs none.  The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.low_precision.folders.to_quantized import to_int4
from slime.flags.kinds import positive_int
from slime.utils.files import read_model_config
from slime.weights.named_tensors import config_dtype
from tools.cli import logged_run, parse_bool
from tools.folder_conversion import NEW_FOLDER, plain_weights_of, rewrite, rewrite_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    parser = rewrite_parser(__doc__, model_dir="unquantized model folder (bf16, fp16 or fp32)", save_dir=NEW_FOLDER)
    parser.add_argument("--group-size", type=positive_int, default=32, help="columns that share a scale")
    parser.add_argument(
        "--is-symmetric", type=parse_bool, nargs="?", const=True, default=True, help="false: with zero points"
    )
    parser.add_argument(
        "--ignore-rules",
        nargs="*",
        default=[],
        metavar="RULE",
        help="more modules to leave unquantized: re:REGEX, a name, or the beginning of names",
    )
    return parser


def main() -> None:
    """Run the command line."""
    with logged_run():
        options = build_parser().parse_args()
        scale_dtype = config_dtype(read_model_config(options.model_dir, flag="--model-dir"))
        recipe = to_int4(
            options.group_size, options.is_symmetric, options.ignore_rules, scale_dtype,
            plain=plain_weights_of(options.model_dir),
        )  # fmt: skip
        rewrite(recipe, options.model_dir, options.save_dir, options)


if __name__ == "__main__":
    main()
