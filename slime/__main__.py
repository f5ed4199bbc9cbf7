"""The command ``slime VERB WORDS``, which runs one of the programs in the checkout."""

from __future__ import annotations

import ast
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from slime.utils import env

ROOT = Path(__file__).resolve().parents[1]
VERBS = {
    "train": (
        "",
        "run train.py with the flags in RUN.yaml and any that follow it (first word --async: train_async.py)",
    ),
    "plan": ("tools/plan.py", "estimate what a run needs, without using a GPU"),
    "convert": ("", "convert a checkpoint to another format; lists the formats when none is given"),
    "check": ("tools/check.py", "test whether your reward, generate function, loss or tool does what a run expects"),
    "runs": ("tools/runs.py", "list the runs below a folder: start, progress, reward, state"),
    "report": ("tools/report.py", "write a one-page report of a run: events, time spent, samples"),
    "watch": ("tools/watch.py", "serve the same page for a run in progress"),
    "diff": ("tools/diff.py", "show how two runs differ, and from which step on"),
    "replay": ("tools/replay.py", "repeat a past step from its samples and the nearest checkpoint"),
    "doctor": ("tools/doctor.py", "find out what is wrong with this machine"),
    "ledger": ("tools/ledger.py", "show what a run's rollout ledger holds"),
    "serve-training": ("tools/serve_training.py", "serve trainer and engines to training loops of tinker clients"),
}
"""Verb -> (program, what it does)."""
DRIVERS = ("serve-training",)
"""Verbs whose program is a job's driver, like train.py."""
QUICK_HELP = ("report", "watch", "diff")
"""Verbs whose ``--help`` prints the program's docstring, because importing the program takes seconds."""
NOISE = (FutureWarning, UserWarning, DeprecationWarning)
"""Warnings from torch, Megatron and SGLang that a user cannot act on."""
EXIT_BAD_INPUT = 2
COMPLETION = """\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_slime() {{
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "${{COMP_WORDS[1]}}")); fi
}}
complete -o default -F _slime slime"""
"""Completes the verb first, then file names."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the verb named by the first word; the process exits with its code."""
    verb, *rest = list(sys.argv[1:] if words is None else words) or ["--help"]
    if verb in ("-h", "--help"):
        print("usage: slime VERB WORDS...\n")
        print("\n".join(f"  {name:14} {what}" for name, (_, what) in VERBS.items()))
        print('\nCompletion in bash and zsh: eval "$(slime --completion)"')
        return
    if verb == "--completion":
        print(COMPLETION.format(verbs=" ".join(VERBS)))
        return
    if verb not in VERBS:
        _refuse(f"{verb!r} is not a verb; use one of {', '.join(VERBS)}.")
    if not (ROOT / "tools").is_dir():
        _refuse(f"{ROOT} has no tools/: slime needs a checkout of the repository, installed with pip install -e.")
    if verb == "train":
        is_async = rest[:1] == ["--async"]
        _drive("train_async.py" if is_async else "train.py", rest[is_async:])
    elif verb in DRIVERS:
        _drive(VERBS[verb][0], rest)
    elif verb == "convert":
        _run(*_converter(rest))
    elif verb in QUICK_HELP and {"-h", "--help"} & set(rest):
        print(ast.get_docstring(ast.parse((ROOT / VERBS[verb][0]).read_text(encoding="utf-8"))) or "")
    else:
        _run(ROOT / VERBS[verb][0], rest)


def _refuse(message: str) -> None:
    print(f"slime: {message}", file=sys.stderr)
    raise SystemExit(EXIT_BAD_INPUT)


def _run(program: Path, words: Sequence[str]) -> None:
    """Run a program from the checkout in this process."""
    if not sys.warnoptions:
        for category in NOISE:
            warnings.simplefilter("ignore", category)
    sys.path.insert(0, str(ROOT))
    sys.argv = [str(program), *words]
    runpy.run_path(str(program), run_name="__main__")


def _converter(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the converter named by the first word, and the remaining words."""
    programs = {path.stem.removeprefix("convert_"): path for path in sorted((ROOT / "tools").glob("convert_*.py"))}
    name = words[0].replace("-", "_") if words else ""
    if name not in programs:
        _refuse(f"{name!r} is not a conversion; use one of {', '.join(programs)}.")
    return programs[name], list(words[1:])


def _drive(script: str, words: Sequence[str]) -> None:
    """Replace this process with a job's driver, which starts a private Ray cluster if it finds none."""
    # Ray workers must import slime from this checkout, and plug-ins from the user's folder.
    paths = [str(ROOT), str(Path.cwd()), env.get_str("PYTHONPATH") or ""]
    quiet = ",".join(f"ignore::{category.__name__}" for category in NOISE)
    env.export(
        {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": env.get_str("PYTHONWARNINGS", quiet) or quiet,
        }
    )
    os.execv(sys.executable, [sys.executable, str(ROOT / script), *words])


if __name__ == "__main__":
    main()
