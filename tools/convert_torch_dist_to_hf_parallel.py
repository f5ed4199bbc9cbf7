"""Run ``convert_torch_dist_to_hf`` with threads that read ahead and write in the background.

    slime convert torch_dist_to_hf_parallel --input-dir RUN/iter_0000012 --output-dir MODEL \\
        --origin-hf-dir ORIGINAL --load-max-workers 2 --save-max-workers 16

Each reader holds a slice of the checkpoint in memory, each writer a shard (``--chunk-size``) twice.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.flags.kinds import positive_int
from tools.cli import logged_run
from tools.convert_torch_dist_to_hf import build_parser, convert


def parse(argv: list[str]) -> Namespace:
    """Parse the tool's flags."""
    parser = build_parser()
    parser.description = __doc__
    parser.add_argument("--load-max-workers", type=positive_int, default=2, help="reading threads")
    parser.add_argument("--save-max-workers", type=positive_int, default=16, help="writing threads")
    return parser.parse_args(argv)


def main() -> None:
    """Run the command line."""
    with logged_run():
        options = parse(sys.argv[1:])
        convert(options, load_workers=options.load_max_workers, save_workers=options.save_max_workers)


if __name__ == "__main__":
    main()
