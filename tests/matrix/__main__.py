"""Print the matrix: every family against every check and every layout, with the numbers.

    python -m tests.matrix                                    # all of it
    python -m tests.matrix --family qwen3 --check gradients   # one check of one family, no layouts
    python -m tests.matrix --family glm5 --layout TP2         # one layout, no checks
    python -m tests.matrix --fast                             # what the suite runs
    python -m tests.matrix --write-docs                       # also record the results; of a subset, its rows

The exit code is 1 if a cell fails, or if none ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.matrix import docs
from tests.matrix.case import load_cases
from tests.matrix.report import CHECKS, Cell, summary


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; --check without --layout skips the layouts, and vice versa."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--check", nargs="+", metavar="NAME", help="only these checks of one process")
    parser.add_argument("--layout", nargs="+", metavar="NAME", help="only these parallel layouts")
    parser.add_argument("--fast", action="store_true", help="the slice that the test suite runs")
    parser.add_argument("--bf16", action="store_true", help="layouts in bf16 instead of fp32, with a wider bound")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the cells there, beside those of earlier runs")
    parser.add_argument("--write-docs", action="store_true", help="write benchmarks/results/matrix.json")
    parser.add_argument("--list", action="store_true", help="name families, checks and layouts, and run nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen cells; return the exit code."""
    from tests.matrix.layouts import (
        CUT_IN_SUITE,
        FULL_FAMILIES,
        LAYOUTS,
        OF_OTHERS,
        fast_layouts_of,
        layouts_of,
        run_layouts,
    )
    from tests.matrix.parity import check_families

    options = parse(argv)
    try:
        cases = load_cases(options.family)
        checks = _chosen("check", options.check, CHECKS, runs=bool(options.check) or not options.layout)
        layouts = _chosen("layout", options.layout, tuple(LAYOUTS), runs=bool(options.layout) or not options.check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        for name, case in cases.items():
            print(f"{name}: {case.about}\n    layouts: {', '.join(layouts_of(case))}")
        print("checks:", ", ".join(CHECKS), "\nlayouts:", ", ".join(LAYOUTS))
        return 0
    start = time.monotonic()
    cells: list[Cell] = []

    def on_cell(cell: Cell) -> None:
        print(cell.describe(), flush=True)
        cells.append(cell)

    checked = [name for name in cases if not (options.fast and name in OF_OTHERS)]
    for cell in check_families(checked, checks) if checks else ():
        on_cell(cell)
    if layouts:
        for case in cases.values():
            if options.fast and case.name not in CUT_IN_SUITE:
                continue
            names = layouts if options.layout else fast_layouts_of(case) if options.fast else layouts_of(case)
            run_layouts([case], list(names), in_bf16=options.bf16, on_cell=on_cell)
    for title, table in docs.result_tables(cells, cases, FULL_FAMILIES, LAYOUTS).items():
        print(f"\n{title}\n\n{table}")
    print(f"{summary(cells)} in {time.monotonic() - start:.0f} s")
    known = merged(options.json, cells) if options.json else cells
    if options.write_docs:
        everything = load_cases()
        flags = {name: (*layout.flags, *layout.loss_flags) for name, layout in LAYOUTS.items()}
        is_part = bool(options.family or options.check or options.layout or options.fast)
        written = [cell for cell in known if cell.family in cases]
        results = docs.result_tables(written, everything, FULL_FAMILIES, LAYOUTS)
        reference = docs.reference_tables(written, everything, flags)
        docs.record({**results, **reference}, docs.counts(written) if is_part else None)
    return int(not cells or not all(cell.passed for cell in cells))


def merged(path: Path, cells: list[Cell]) -> list[Cell]:
    """The file's cells, with older ones replaced by these, written back."""
    known = [Cell(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    by_place = {(cell.family, cell.column): cell for cell in [*known, *cells]}
    path.write_text(json.dumps([cell.as_dict() for cell in by_place.values()], indent=1) + "\n")
    return list(by_place.values())


def _chosen(what: str, wanted: list[str] | None, known: tuple[str, ...], *, runs: bool) -> tuple[str, ...]:
    """The requested names in their usual order, or all."""
    unknown = [name for name in wanted or () if name not in known]
    if unknown:
        raise ValueError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(name for name in known if name in (wanted or known)) if runs else ()


if __name__ == "__main__":
    sys.exit(main())
