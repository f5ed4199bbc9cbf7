"""The flags, the run and the report shared by the tools that convert one model folder into another."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.ext.low_precision.folders.plan import Rewrite
from slime.flags.kinds import positive_int
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from slime.weights.quantize.formats import PlainWeights

NEW_FOLDER = "folder to write; new or empty"
logger = logging.getLogger(__name__)


def rewrite_parser(description: str | None, **folders: str) -> argparse.ArgumentParser:
    """Return a parser with the flags shared by the tools that convert one model folder into another.

    Args:
        description: heads ``--help``.
        folders: attribute -> help of the required flag for this folder.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in folders.items():
        parser.add_argument(f"--{name.replace('_', '-')}", required=True, help=text)
    parser.add_argument(
        "--max-workers", type=positive_int, default=1, help="threads; each holds some rows of one tensor in memory"
    )
    parser.add_argument("--device", help="cpu, cuda (all GPUs in turn) or cuda:N; default: cuda where there is a GPU")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is in the output folder")
    parser.add_argument(
        "--no-verify-checkpoint",
        dest="verify_checkpoint",
        action="store_false",
        help="do not compare the input with the digests beside it",
    )
    return parser


def rewrite(
    recipe: Rewrite, source: str, target: str, options: argparse.Namespace, only_files: Sequence[str] = ()
) -> None:
    """Run a conversion with the flags of :func:`rewrite_parser`, and log its size and speed."""
    from slime.ext.low_precision.folders.run import rewrite_folder

    report = rewrite_folder(
        recipe,
        source,
        target,
        workers=options.max_workers,
        device=options.device,
        overwrite=options.overwrite,
        only_files=only_files,
        verify=options.verify_checkpoint,
    )
    speed = report.source_bytes / 1e6 / max(report.elapsed_s, 1e-9)
    logger.info(
        "%s: wrote %d shards from %.2f GiB in %.1f s (%.0f MB/s)",
        target, report.shards_written, report.source_bytes / 2**30, report.elapsed_s, speed,
    )  # fmt: skip
    if not report.is_complete:
        logger.info("%s is incomplete: convert the shards that --files did not name as well", target)


def plain_weights_of(folder: str | Path) -> PlainWeights | None:
    """Return what the model family of a folder keeps unquantized; None for an unknown family.

    Raises:
        ConfigError: the family is unknown, and the model has more than a language model, under names unknown here.
    """
    from slime.backends.megatron_utils.models import plain_weights
    from slime.utils.files import read_model_config

    config = read_model_config(folder, flag="--model-dir")
    plain = plain_weights(config)
    if plain is None and (config.get("vision_config") or config.get("audio_config")):
        raise ConfigError(
            f"{folder} is a {config.get('model_type')}, whose tower would be quantized with the language model: no "
            "family of slime_plugins/models has its names. Convert a folder without a tower."
        )
    if plain is None:
        logger.warning(
            "No family of slime_plugins/models is a %s: every matrix is quantized but the embeddings, "
            "lm_head and routers; see that engines hold no other in a plain linear layer", config.get("model_type"),
        )  # fmt: skip
    return plain
