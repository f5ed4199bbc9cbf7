"""Convert a gpt-oss folder with experts in MXFP4, as it is published, to bf16, shard by shard.

    slime convert mxfp4_to_bf16 --model-dir gpt-oss-20b --output-dir gpt-oss-20b-bf16

Engines that take part in training start from the result: weights are pushed to them in bf16.  The numbers are the
same.  The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.low_precision.folders.to_bf16 import Mxfp4ToBf16
from tools.cli import logged_run
from tools.folder_conversion import NEW_FOLDER, rewrite, rewrite_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    return rewrite_parser(__doc__, model_dir="folder with the model in MXFP4", output_dir=NEW_FOLDER)


def main() -> None:
    """Run the command line."""
    with logged_run():
        options = build_parser().parse_args()
        rewrite(Mxfp4ToBf16(), options.model_dir, options.output_dir, options)


if __name__ == "__main__":
    main()
