"""Print the matrix: every family against every check and every layout, with the numbers.

    python -m tests.matrix                       # all of it
    python -m tests.matrix --family qwen3 --check gradients
    python -m tests.matrix --family glm5 --layout TP2
    python -m tests.matrix --fast                # what the suite runs
    python -m tests.matrix --write-docs          # and put the tables into docs/models.md and docs/parallelism.md

The exit status is 1 when a cell fails.
"""

from __future__ import annotations

import argparse
import sys

from tests.matrix.case import load_cases
from tests.matrix.report import Cell, markdown_table, summary


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these; default: all")
    parser.add_argument("--check", nargs="*", metavar="NAME", help="only these one-process checks; none: no checks")
    return parser.parse_args(argv)


def main() -> int:
    from tests.matrix.parity import CHECKS, check_family

    options = parse()
    cells: list[Cell] = []
    for case in load_cases(options.family).values():
        for cell in check_family(case, CHECKS if options.check is None else tuple(options.check)):
            print(cell.describe(), flush=True)
            cells.append(cell)
    print("\n" + markdown_table(cells))
    print(summary(cells))
    return int(not all(cell.passed for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
