"""The command ``slime VERB WORDS``: runs one of the programs of the checkout."""

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
        "train.py with the flags of RUN.yaml and those behind it (first word --async: train_async.py)",
    ),
    "plan": ("tools/plan.py", "what a run needs, before it takes a GPU"),
    "convert": ("", "a checkpoint into another format; without words, the formats"),
    "check": ("tools/check.py", "your reward, generate function, loss, tool: does it do what a run expects"),
    "runs": ("tools/runs.py", "the runs below a folder: when, how far, which reward, what state"),
    "report": ("tools/report.py", "one page of a run: what happened, where the time went, the samples"),
    "watch": ("tools/watch.py", "the same page of a run that goes on"),
    "diff": ("tools/diff.py", "in what two runs differ, and since when"),
    "replay": ("tools/replay.py", "a past step again, from its samples and the nearest checkpoint"),
    "doctor": ("tools/doctor.py", "what is wrong with this machine"),
    "ledger": ("tools/ledger.py", "what the rollout ledger of a run holds"),
    "serve-training": ("tools/serve_training.py", "trainer and engines for loops of clients, by the tinker package"),
}
"""Verb -> (program, what it does)."""
DRIVERS = ("serve-training",)
"""Verbs whose program is the driver of a job, as train.py is."""
QUICK_HELP = ("report", "watch", "diff")
"""Verbs whose program says in its first lines how it is used; importing it takes seconds."""
NOISE = (FutureWarning, UserWarning, DeprecationWarning)
"""Warnings of torch, Megatron and SGLang, on which a user cannot act."""
EXIT_BAD_INPUT = 2
COMPLETION = """\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_slime() {{
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "${{COMP_WORDS[1]}}")); fi
}}
complete -o default -F _slime slime"""
"""The verb, and after it files."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the verb that the command line begins with; exits with its code."""
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
        _refuse(f"{verb!r} is no verb; it must be one of {', '.join(VERBS)}.")
    if not (ROOT / "tools").is_dir():
        _refuse(
            f"{ROOT} has no tools/: the command needs a checkout of the repository, installed with pip install -e."
        )
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
    """Run a program of the checkout in this process."""
    if not sys.warnoptions:
        for category in NOISE:
            warnings.simplefilter("ignore", category)
    sys.path.insert(0, str(ROOT))
    sys.argv = [str(program), *words]
    runpy.run_path(str(program), run_name="__main__")


def _converter(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the conversion that the first word names, and the other words."""
    programs = {path.stem.removeprefix("convert_"): path for path in sorted((ROOT / "tools").glob("convert_*.py"))}
    name = words[0].replace("-", "_") if words else ""
    if name not in programs:
        _refuse(f"{name!r} is no conversion; it must be one of {', '.join(programs)}.")
    return programs[name], list(words[1:])


def _drive(script: str, words: Sequence[str]) -> None:
    """Become the driver of a job; without a Ray cluster it starts a private one."""
    # Plug-ins lie in the user's folder; what runs in Ray's workers is this checkout.
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
