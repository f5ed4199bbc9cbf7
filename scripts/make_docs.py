"""Write the generated pages: docs/flags.md and docs/hooks.md (from slime/flags), the table of docs/engines.md (from
slime/ray/engines/lifecycle.py), the hardware tables of README.md (from ``slime plan``), and slime/flags/table.json.

``--check`` writes nothing and fails when a page is out of date.

.venv/bin/python scripts/make_docs.py [--check]
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from scripts.hardware_table import hardware_tables  # noqa: E402
from slime.compose import flag_groups  # noqa: E402
from slime.flags.historical import NOT_YET  # noqa: E402
from slime.flags.hook_checks import call_of  # noqa: E402
from slime.flags.hooks import HOOKS, Hook  # noqa: E402
from slime.flags.parse import build_parser  # noqa: E402
from slime.flags.parser import Parser  # noqa: E402
from slime.flags.table import FROM_SGLANG, TABLE, table_text  # noqa: E402
from slime.ray.engines.lifecycle import table_as_markdown  # noqa: E402

FLAGS_HEAD = """# Flags

Written by `scripts/make_docs.py`; edit the help texts in `slime/flags/` instead.

`python train.py` takes the flags of slime, of Megatron and of SGLang in one command. A flag that nobody knows is an
error that names the nearest one; flags cannot be abbreviated; of a repeated flag the last one counts.
The value `none` takes back a number that has no default, and a setting of the engines that has none: behind a recipe
`--decoder-last-pipeline-num-layers none` is as if the recipe had not given the flag.

* `--sglang-X` sets field `X` of the installed SGLang's `ServerArgs`, `--router-X` field `X` of its router's
  `RouterArgs`: `python -m sglang.launch_server --help` describes them. Without an engine (`--debug-train-only`,
  `--load-debug-rollout-data`) they are named in one log line and not looked at.
* `--custom-config-path FILE` lays a YAML file over the flags before anything is derived from them.
* A dagger (†) marks a flag whose feature does not exist yet: using it is an error that says so.
"""

HOOKS_HEAD = """# Hooks

Written by `scripts/make_docs.py`; edit `slime/flags/hooks.py` instead.

A plug-in is named by its import path, `package.module.attribute`, and must be importable on the driver and in Ray's
workers (PYTHONPATH). It is checked before a GPU is taken: those of the rollout side are imported on the driver, those
of the trainer are judged by their source there. Arguments shown without a name are passed by position, `name=` by
keyword; `[name=]` is passed only to a plug-in that has a parameter of that name.
"""


TABLE_BEGINS = "<!-- written by scripts/make_docs.py from {} -->"
TABLE_ENDS = "<!-- end of the table -->"


def flags_page(parser: Parser) -> str:
    """docs/flags.md."""
    sections = [FLAGS_HEAD]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if not actions or group.title in FROM_SGLANG:
            continue
        description = f"{group.description}\n\n" if group.description else ""
        title = str(group.title)
        rows = "\n".join(_flag_row(action) for action in actions)
        sections.append(
            f"## {title[0].upper()}{title[1:]}\n\n{description}| flag | default | meaning |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(sections)


def _flag_row(action: argparse.Action) -> str:
    names = " / ".join(f"`{option}`" for option in action.option_strings)
    dagger = " †" if action.dest in NOT_YET else ""
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    meaning = (action.help or "").replace("%%", "%") if action.help != argparse.SUPPRESS else ""
    return f"| {names}{dagger} | {_default(action)} | {_cell(meaning + choices)} |"


def _default(action: argparse.Action) -> str:
    if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
        return "off"
    if action.default in (None, argparse.SUPPRESS):
        return ""
    return f"`{_cell(str(action.default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def hooks_page() -> str:
    """docs/hooks.md."""
    return "\n".join([HOOKS_HEAD, _hook_table(), *(_hook_section(hook) for hook in HOOKS)])


def _hook_table() -> str:
    firsts = [str(inspect.getdoc(hook.protocol)).partition("\n")[0] for hook in HOOKS]
    rows = [
        f"| [`{hook.flag}`](#{hook.flag}) | {hook.side} | {_cell(first)} |"
        for hook, first in zip(HOOKS, firsts, strict=True)
    ]
    return "\n".join(["| flag | side | purpose |", "|---|---|---|", *rows, ""])


def _hook_section(hook: Hook) -> str:
    contract = inspect.signature(hook.protocol.__call__)
    positional, keywords = call_of(hook, contract)
    optional = {name for name, p in contract.parameters.items() if p.default is not inspect.Parameter.empty}
    shown = [*positional, *(f"[{name}=]" if name in optional else f"{name}=" for name in keywords)]
    prefix = {"async": "await ", "either": "[await] "}.get(hook.kind, "")
    lines = [
        f"## `{hook.flag}`\n",
        f"    {prefix}{hook.protocol.__name__}({', '.join(shown)}) -> {contract.return_annotation}\n",
        f"{inspect.getdoc(hook.protocol)}\n",
        f"Called on the {hook.side}'s side."
        + (f" Default: `{hook.default}`." if hook.default else "")
        + (" The flag may be repeated." if hook.repeatable else "")
        + (" Not built yet." if hook.dest in NOT_YET else "")
        + "\n",
    ]
    return "\n".join(lines)


def with_table(page: str, source: str, table: str) -> tuple[Path, str]:
    """Return a hand-written page with its generated table replaced by ``table``."""
    path = REPO / page
    begins = TABLE_BEGINS.format(source)
    before, _, rest = path.read_text(encoding="utf-8").partition(begins)
    _, _, after = rest.partition(TABLE_ENDS)
    return path, f"{before}{begins}\n{table}\n{TABLE_ENDS}{after}"


def pages() -> Iterator[tuple[Path, str]]:
    """Every generated file with its content."""
    parser = build_parser(with_engine_flags=True, groups=flag_groups())
    yield REPO / "docs/flags.md", flags_page(parser)
    yield TABLE, table_text(parser, parser.no_flags)
    yield REPO / "docs/hooks.md", hooks_page()
    yield with_table("docs/engines.md", "slime/ray/engines/lifecycle.py", table_as_markdown())
    yield with_table("README.md", "slime plan", hardware_tables())


def main() -> int:
    """Write the pages, or say which differ; 1 when one does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail when a page is out of date.")
    check = parser.parse_args().check
    status = 0
    for path, text in pages():
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            print(f"{path.relative_to(REPO)} is out of date; run scripts/make_docs.py", file=sys.stderr)
            status = 1
        elif not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
