"""Quantize a Hugging Face model to FP8, shard by shard.

    slime convert hf_to_fp8 --model-dir MODEL --save-dir MODEL-FP8 \\
        --strategy block --block-size 128 128 --max-workers 4

Give the result to ``--hf-checkpoint`` for FP8 rollouts.  The same command resumes an interrupted run.
docs/quantization.md lists what is quantized, benchmarks/results its error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.low_precision.folders.to_quantized import STRATEGIES, UE8M0, to_fp8
from slime.flags.kinds import any_int
from tools.cli import logged_run
from tools.folder_conversion import NEW_FOLDER, plain_weights_of, rewrite, rewrite_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    parser = rewrite_parser(__doc__, model_dir="unquantized model folder (bf16, fp16 or fp32)", save_dir=NEW_FOLDER)
    parser.add_argument("--strategy", choices=STRATEGIES, default="block", help="elements that share a scale")
    parser.add_argument(
        "--block-size", type=any_int, nargs="*", metavar="N", help="rows and columns of a block; default: 128 128"
    )
    parser.add_argument(
        "--scale-fmt", choices=(UE8M0,), help="round scales to powers of two, which DeepGEMM needs on Blackwell"
    )
    return parser


def main() -> None:
    """Run the command line."""
    with logged_run():
        options = build_parser().parse_args()
        recipe = to_fp8(
            options.strategy, options.block_size, options.scale_fmt, plain=plain_weights_of(options.model_dir)
        )
        rewrite(recipe, options.model_dir, options.save_dir, options)


if __name__ == "__main__":
    main()
