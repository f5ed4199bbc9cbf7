"""Examine plug-ins from the command line; see docs/plugins.md.

    python -m tests.plugin_contracts --hook custom-rm --path my.module.reward [-- --reward-key score]
    python -m tests.plugin_contracts --custom-rm-path my.module.reward --group-rm

Exit code: 0 all passed, 1 a contract is broken, 2 the command is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slime.arguments.hooks import HOOKS
from tests.plugin_contracts.bench import Bench
from tests.plugin_contracts.examine import examine, find_hook

ENVIRONMENT = "SLIME_CONTRACT_"
"""Prefix of variables that name plug-ins: ``SLIME_CONTRACT_CUSTOM_RM_PATH``."""
DEADLINES = 10
"""A call that nothing can interrupt ends the examination after so many times --timeout-s, and shows where it hangs."""


def chosen_plugins(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(flag, path) of each plug-in named on the command line, else in the environment."""
    chosen = [(find_hook(args.hook).flag, args.path)] if args.hook else []
    for hook in HOOKS:
        value = getattr(args, hook.dest) or os.environ.get(ENVIRONMENT + hook.dest.upper())
        chosen += [(hook.flag, path) for path in (value if isinstance(value, list) else [value]) if path]
    return chosen


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.plugin_contracts", description=__doc__.splitlines()[0])
    parser.add_argument("--hook", help="Which hook: a flag of train.py, with or without dashes and -path.")
    parser.add_argument("--path", help="The plug-in: package.module.attribute.")
    for hook in HOOKS:
        parser.add_argument(hook.flag, metavar="PATH", action="append" if hook.repeatable else "store")
    parser.add_argument("--group-rm", action="store_true", help="Examine a reward function as with --group-rm.")
    parser.add_argument("--hf-checkpoint", help="Use this tokenizer; default: one token for each byte.")
    parser.add_argument("--engine-answer", action="append", default=[], help="A text that the engine answers.")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="Seconds that an awaited call may take.")
    parser.add_argument("--list", action="store_true", help="Show the hooks.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print, and say how it went."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, further = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = build_parser()
    args = parser.parse_args(own)
    if args.list:
        print("\n".join(hook.flag for hook in HOOKS))
        return 0
    if bool(args.hook) != bool(args.path):
        parser.error("--hook and --path belong together")
    try:
        plugins = chosen_plugins(args)
    except KeyError as error:
        parser.error(str(error.args[0]))
    if not plugins:
        parser.error("name a plug-in: --hook NAME --path package.module.attribute")
    if args.group_rm:
        further.append("--group-rm")
    sys.path.insert(0, os.getcwd())
    logging.getLogger().setLevel(logging.ERROR)
    num_failed = 0
    faulthandler.dump_traceback_later(DEADLINES * args.timeout_s, exit=True, file=sys.__stderr__)
    with tempfile.TemporaryDirectory(prefix="plugin_contracts_") as folder:
        bench = Bench(
            Path(folder),
            further,
            hf_checkpoint=args.hf_checkpoint,
            answers=args.engine_answer,
            timeout_s=args.timeout_s,
        )
        for flag, path in plugins:
            findings = examine(flag, path, bench)
            num_failed += bool(findings.failures)
            print(findings.report())
    faulthandler.cancel_dump_traceback_later()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
