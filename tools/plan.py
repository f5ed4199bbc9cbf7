"""Plan a run on a machine without GPUs: check its flags, and print layout, memory and traffic.

    slime plan scripts/run-deepseek-r1.sh
    slime plan --gpu H200 scripts/run-qwen3-4B.sh --max-tokens-per-gpu 16384
    slime plan --json --actor-num-nodes 1 ... (the arguments of train.py)

Nothing is started and no checkpoint is needed; a config.json in ``--hf-checkpoint`` makes the plan exact.  Exit codes:
0: the run is valid and fits; 1: it needs more memory than there is; 2: it is invalid.  benchmarks/results compares
planned with measured numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.compose import flag_groups
from slime.ext.plan.command import run_plan
from slime.ext.plan.fit import fitted
from slime.ext.plan.plan import CARDS, PlanOptions, find_card
from slime.ext.plan.recipe import read_recipe
from slime.ext.plan.trainer_memory import GIB
from slime.flags.kinds import positive_float, positive_fraction, positive_int
from slime.utils import env
from slime.utils.errors import ConfigError
from tools.cli import clean_exit
from tools.terminal import say


def image_size(text: str) -> tuple[int, int]:
    """Return height and width of ``1024x768``."""
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r}: give height and width in pixels, as 1024x768")
    return int(sides[0]), int(sides[1])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all others belong to the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", default="H100", help=f"the card: {', '.join(CARDS)} (H100)")
    parser.add_argument("--gpus", type=positive_int, default=8, help="GPUs of a node, for --fit (8)")
    parser.add_argument("--gpu-memory", type=positive_float, metavar="GIB", help="memory of the card, if it differs")
    parser.add_argument("--host-memory", type=positive_float, metavar="GIB", help="memory of a node")
    parser.add_argument(
        "--mfu", type=positive_fraction, default=0.35, help="utilisation of the trainer's FLOPs, for times (0.35)"
    )
    parser.add_argument("--lengths", metavar="FILE", help="JSON list: tokens of each sample of a rollout")
    parser.add_argument(
        "--image", type=image_size, action="append", default=[], metavar="HxW",
        help="pixels of an image of every sample; given again for each further one",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument(
        "--trust-script", action="store_true", help="run SCRIPT even where no namespace can hold it back"
    )
    parser.add_argument("--ranks", action="store_true", help="list every trainer rank")
    return parser


def read_lengths(file: str) -> tuple[int, ...]:
    """Read the number of tokens of each sample of a rollout.

    Raises:
        ConfigError: the file is missing, or holds something else.
    """
    try:
        lengths = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {file} cannot be read: {error}. It is a JSON list of numbers.") from error
    if not isinstance(lengths, list) or not lengths or not all(isinstance(one, int) and one > 0 for one in lengths):
        raise ConfigError(f"--lengths {file} holds no list of whole numbers above 0: the tokens of each sample.")
    return tuple(lengths)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    options, words = build_parser().parse_known_args()
    environment = env.copy()
    with clean_exit(), tempfile.TemporaryDirectory(prefix="slime-plan-") as folder:
        card = find_card(options.gpu)
        if options.gpu_memory:
            card = dataclasses.replace(card, memory=int(options.gpu_memory * GIB))
        if options.host_memory:
            card = dataclasses.replace(card, host_memory=int(options.host_memory * GIB))
        words = [word for word in words if word not in ("--", "python", "python3", "train.py", "train_async.py")]
        if words and words[0].endswith(".sh"):
            script = words[0]
            recipe = read_recipe(script, words[1:], Path(folder), is_trusted=options.trust_script)
            words, environment = recipe.words, {**environment, **recipe.environment}
            if called := dict.fromkeys(call.split()[0] for call in recipe.calls if call.strip()):
                say(f"{script} also calls {', '.join(called)}: written down, not done.", to_stderr=True)
        lengths = read_lengths(options.lengths) if options.lengths else None
        settings = PlanOptions(
            card=card, mfu=options.mfu, lengths=lengths, images=tuple(options.image), environment=environment
        )
        if "--fit" in words:
            words, table = fitted(words, settings, options.gpus, flag_groups())
            say(*table.split("\n"), to_stderr=True)
        code = run_plan(words, settings, groups=flag_groups(), as_json=options.json, all_ranks=options.ranks)
    sys.exit(code)


if __name__ == "__main__":
    main()
