"""Cast an FP8 Hugging Face model to bf16, shard by shard.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-R1 --output-bf16-hf-path DeepSeek-R1-bf16

Scales may be per block (``weight_block_size`` of config.json, or 128 x 128), per row or per tensor; experts may be in
FP4 beside them (DeepSeek-V4).  The result's config.json has no quantization_config.  The same command resumes an
interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.low_precision.folders.to_bf16 import Fp8ToBf16
from tools.cli import logged_run
from tools.folder_conversion import NEW_FOLDER, rewrite, rewrite_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    return rewrite_parser(__doc__, input_fp8_hf_path="FP8 model folder", output_bf16_hf_path=NEW_FOLDER)


def main() -> None:
    """Run the command line."""
    with logged_run():
        options = build_parser().parse_args()
        rewrite(Fp8ToBf16(), options.input_fp8_hf_path, options.output_bf16_hf_path, options)


if __name__ == "__main__":
    main()
