"""Export a checkpoint as a Hugging Face folder, by loading it into the model in any parallel layout.

    torchrun --nproc-per-node 8 tools/convert_to_hf.py --tensor-model-parallel-size 8 \\
        --hf-checkpoint MODEL --load RUN --output-dir EXPORT

``--load`` names a Megatron checkpoint (``--ckpt-step`` chooses the iteration) or a Hugging Face folder.  The export is
the same as that of ``--save-hf``.  ``convert_torch_dist_to_hf.py`` needs no GPU and does not load the model.
"""

from __future__ import annotations

import argparse
import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from slime.utils.errors import ConfigError
from tools.cli import logged_run
from tools.convert_hf_to_torch_dist import join_world, parse_training_flags, with_layout

logger = logging.getLogger(__name__)


def parse(argv: Sequence[str]) -> Namespace:
    """Return the tool's arguments: every model and layout flag of training, ``--load``, and ``--output-dir``."""
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    own.add_argument("--output-dir")
    options, rest = own.parse_known_args(list(argv))
    args = parse_training_flags(rest, needed=("hf_checkpoint", "load"), description=__doc__)
    if not options.output_dir:
        raise ConfigError("--output-dir is missing; name the Hugging Face folder to write")
    args.output_dir = options.output_dir
    return args


def convert(args: Namespace) -> None:
    """Build the model, load the checkpoint and write the folder."""
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
    from slime.backends.megatron_utils.model import build_model
    from slime.compose import parts
    from slime.ray.parts import load_all

    args = join_world(with_layout(args))
    model = build_model(args, transforms=load_all(parts(args).transforms), wrap_with_ddp=False)
    load_checkpoint(Namespace(**{**vars(args), "finetune": True}), model)
    save_hf_model_to_path(args, args.output_dir, model, model_name=args.model_name)
    dist.destroy_process_group()


def main() -> None:
    """Run the command line."""
    with logged_run():
        convert(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
