"""Try a plug-in the way a run calls it, without a GPU, and say in plain words what is wrong with it.

    slime check my_rewards.right              its signature tells which kind of plug-in it is
    slime check --rm my_rewards.right         or name its kind: --custom-rm-path or --rm, --generate, --loss
    slime check --rm my_rewards.right -- --reward-key score       with the train.py flags that it needs

Exit code: 0 all passed, 1 a contract is broken, 2 the command is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils import env  # noqa: E402
from slime.utils.errors import SlimeError  # noqa: E402
from tools.plugin_check.bench import Bench  # noqa: E402
from tools.plugin_check.examine import ALL, examine, find_hook, short_name  # noqa: E402
from tools.plugin_check.recognise import recognise  # noqa: E402

ENVIRONMENT = "SLIME_CONTRACT_"
"""Prefix of variables that name plug-ins: ``SLIME_CONTRACT_CUSTOM_RM_PATH``."""
DEADLINES = 10
"""A call that cannot be interrupted ends the check after this many times --timeout-s, and shows where it hangs."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the words before ``--``."""
    parser = argparse.ArgumentParser(
        prog="slime check",
        usage="slime check [OPTIONS] [PLUG-IN ...] [-- FLAGS OF train.py]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PLUG-IN", help="package.module.attribute")
    for hook in ALL:
        names = dict.fromkeys((hook.flag, short_name(hook.flag)))
        parser.add_argument(*names, metavar="PLUG-IN", action="append", default=[], dest=hook.dest)
    parser.add_argument("--hook", help="The flag that --path is for, with or without dashes and -path.")
    parser.add_argument("--path", help="The plug-in of --hook.")
    parser.add_argument("--group-rm", action="store_true", help="Examine a reward function as with --group-rm.")
    parser.add_argument("--hf-checkpoint", help="Use this tokenizer; default: one token for each byte.")
    parser.add_argument("--engine-answer", action="append", default=[], help="A text that the engine answers.")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="Seconds that an awaited call may take.")
    parser.add_argument("--list", action="store_true", help="Show the flags.")
    return parser


def chosen_plugins(args: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """Return (flag, path, further flags) of each plug-in that the command line names, else the environment.

    Raises:
        KeyError: nothing has the name given to --hook.
        SlimeError: a plug-in cannot be imported, or may be several things.
    """
    chosen = [(find_hook(args.hook).flag, args.path)] if args.hook else []
    for hook in ALL:
        from_environment = env.get_str(ENVIRONMENT + hook.dest.upper())
        chosen += [(hook.flag, path) for path in getattr(args, hook.dest) or [from_environment] if path]
    recognised = [(path, recognise(path)) for path in args.paths]
    return [
        *((flag, path, []) for flag, path in chosen),
        *((found.flag, path, list(found.settings)) for path, found in recognised),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, further = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = build_parser()
    args = parser.parse_args(own)
    if args.list:
        print("\n".join(f"{hook.flag:48} {short_name(hook.flag)}" for hook in ALL))
        return 0
    if bool(args.hook) != bool(args.path):
        parser.error("--hook and --path belong together")
    sys.path.insert(0, os.getcwd())
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        plugins = chosen_plugins(args)
    except (KeyError, SlimeError) as error:
        parser.error(str(error.args[0]))
    if not plugins:
        parser.error("name a plug-in: slime check package.module.attribute")
    further += ["--group-rm"] if args.group_rm else []
    num_failed = 0
    faulthandler.dump_traceback_later(DEADLINES * args.timeout_s, exit=True, file=sys.__stderr__)
    for flag, path, settings in plugins:
        with tempfile.TemporaryDirectory(prefix="slime_check_") as folder:
            bench = Bench(
                Path(folder),
                [*further, *settings],
                hf_checkpoint=args.hf_checkpoint,
                answers=args.engine_answer,
                timeout_s=args.timeout_s,
            )
            try:
                findings = examine(flag, path, bench)
            except SlimeError as error:  # what the start of a run would say
                parser.error(str(error))
        num_failed += bool(findings.failures)
        print(findings.report())
    faulthandler.cancel_dump_traceback_later()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
