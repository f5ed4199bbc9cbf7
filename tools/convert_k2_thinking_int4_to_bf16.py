"""Convert a model in packed integers (compressed-tensors, the format of Kimi-K2-Thinking) to bf16, shard by shard.

    slime convert k2_thinking_int4_to_bf16 --model-dir Kimi-K2-Thinking --output-dir Kimi-K2-bf16

Several machines can share the work: each converts the shards that its ``--files`` names, and the last one to finish
writes config and index.  The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.low_precision.folders.to_bf16 import Int4ToBf16
from slime.utils.errors import ConfigError
from slime.utils.files import language_config, read_object
from tools.cli import logged_run
from tools.folder_conversion import NEW_FOLDER, rewrite, rewrite_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    parser = rewrite_parser(__doc__, model_dir="quantized model folder", output_dir=NEW_FOLDER)
    parser.add_argument("--files", nargs="*", default=[], help="shards of --model-dir to convert; default: all")
    parser.add_argument("--config-path", help="config.json with the quantization_config; default: that of --model-dir")
    return parser


def quantization_config(path: str | None) -> dict[str, object] | None:
    """Read the settings of the quantized weights from ``--config-path``."""
    if path is None:
        return None
    found = language_config(read_object(path, flag="--config-path", error=ConfigError)).get("quantization_config")
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"--config-path {path} has no quantization_config; name the config of the quantized model")
    return dict(found)


def main() -> None:
    """Run the command line."""
    with logged_run():
        options = build_parser().parse_args()
        recipe = Int4ToBf16(quantization_config(options.config_path))
        rewrite(recipe, options.model_dir, options.output_dir, options, only_files=options.files)


if __name__ == "__main__":
    main()
