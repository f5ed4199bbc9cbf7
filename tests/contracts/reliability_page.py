"""docs/reliability.md, made of ``reliability_table``.

.venv/bin/python -m tests.contracts.reliability_page
"""

from __future__ import annotations

import ast
from pathlib import Path

from slime.compose import flag_groups
from slime.flags.parse import build_parser
from tests.contracts.reliability_table import AREAS, EDGES, ENDS_A_RUN, PROMISES, UNTIMED, Edge
from tests.contracts.source_tree import REPO, tree_of

PAGE = REPO / "docs/reliability.md"

HEAD = """# Reliability

Written by `python -m tests.contracts.reliability_page`; edit `tests/contracts/reliability_table.py` instead.

## What is promised

Seconds are those of `python -m tests.e2e.recovery_times`, from the failure to the next trained step: the tiny job, two
trainer ranks and an engine on two CPU cores that other work kept busy (a trainer's start took 25 to 45 s there).

@PROMISES@
## Waits

Nobody on the rollout side waits without an owner and a deadline. This page lists every edge on which somebody waits:
what sets the deadline (a flag with its default, or a constant with its value, in seconds unless named otherwise), what
is raised when it passes, where it is seen, and what comes of it. `tests/contracts/test_reliability.py` holds the page
against the code: names and tests exist, the code reads the flags, every module that waits has a row, and no wait is
without a deadline but those at the end of the page.

Errors travel to the driver as they were raised, and the driver's last lines have the first cause on top. "Ends the
run" means: the same command goes on from the last checkpoint and the ledger (`docs/ledger.md`).
"""


def module_path(dotted: str) -> tuple[Path, list[str]]:
    """The file of a dotted name, and what of the name lies inside it.

    Raises:
        LookupError: no such module.
    """
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = REPO.joinpath(*parts[:cut])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate, parts[cut:]
    raise LookupError(f"no module holds {dotted}")


def constant(dotted: str) -> float:
    """The number that ``module.NAME`` is set to.

    Raises:
        LookupError: the module does not set it to a number.
    """
    path, names = module_path(dotted)
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and len(names) == 1:
            for target in node.targets:
                if ast.unparse(target) == names[0] and isinstance(node.value, ast.Constant):
                    return float(node.value.value)
    raise LookupError(f"{dotted} is no number set at the top of its module")


def bound_text(bound: str, defaults: dict[str, object]) -> str:
    """A flag or a constant with its value."""
    if bound.startswith("--"):
        return f"`{bound}` ({_number(defaults[bound])})"
    return f"`{bound.rpartition('.')[2]}` ({_number(constant(bound))})"


def flag_defaults() -> dict[str, object]:
    """Flag -> default."""
    options = build_parser(with_engine_flags=False, groups=flag_groups())._option_string_actions
    return {flag: action.default for flag, action in options.items()}


def _number(value: object) -> str:
    return f"{value:,.6g}".replace(",", " ") if isinstance(value, int | float) else str(value)


def page() -> str:
    """The page's text."""
    defaults = flag_defaults()
    promises = ["| what fails | what is promised | measured, and what it costs | shown by |", "|---|---|---|---|"]
    for promise in PROMISES:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in promise.tests)
        promises.append(f"| {promise.fails} | {promise.promise} | {promise.cost} | {tests} |")
    ends = [
        "",
        "What ends a run all the same, or with `--supervise` its driver:",
        "",
        *(f"* {end}" for end in ENDS_A_RUN),
    ]
    sections = [HEAD.replace("@PROMISES@", "\n".join([*promises, *ends, ""]))]
    for area in AREAS:
        rows = [_row(edge, defaults) for edge in EDGES if edge.area == area]
        head = "| who waits for what | deadline | what is seen | outcome | shown by |\n|---|---|---|---|---|"
        sections.append("\n".join([f"## {area}\n", head, *rows, ""]))
    exceptions = [f"* `{place}`: {reason}" for place, reason in sorted(UNTIMED.items())]
    sections.append(
        "\n".join(["## Waits without a deadline of their own\n", "A call, and who ends it.\n", *exceptions, ""])
    )
    return "\n".join(sections)


def _row(edge: Edge, defaults: dict[str, object]) -> str:
    names = ", ".join(f"`{name.removeprefix('slime.')}`" for name in edge.code)
    bounds = ", ".join(bound_text(bound, defaults) for bound in edge.bounds)
    deadline = "; ".join(part for part in (bounds, edge.deadline) if part)
    error = f"`{edge.raises}`; {edge.log}" if edge.raises else edge.log
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in edge.tests)
    cells = (f"{edge.waits}<br>{names}", deadline, error, edge.outcome, tests)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
