"""Print the push matrix: every kind of push, quantization, trainer layout and engine size, for some families.

    python -m tests.push_matrix                                   # dense, experts, latent attention
    python -m tests.push_matrix --full                            # every family that SGLang can build on a CPU
    python -m tests.push_matrix --family qwen3 --layout TP2 --mode mixed
    python -m tests.push_matrix --fast                            # what the suite runs
    python -m tests.push_matrix --write-docs                      # also record the results; of a subset, its rows

A cell is two pushes from a Megatron trainer on gloo ranks into SGLang's own model classes, one process per engine
rank.  It passes if the engine's parameters, digested under its own names, equal what SGLang's own loader makes of
the checkpoint (for fp8: of the offline converter's), and the second push, of changed weights, also compares equal
(``--check-weight-update-equal``).  The exit code is 1 if a cell fails, or if none ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import results_page
from tests.matrix.case import load_cases
from tests.push_matrix.cells import (
    ENGINE_SIZES,
    FAMILIES,
    FAST,
    LAYOUTS,
    MODES,
    QUANTIZATIONS,
    SERVED,
    Cell,
    run_cells,
    table,
)

PARTS = ("family", "mode", "quantization", "layout", "engine_tp")
"""Options that exclude cells."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.push_matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", metavar="NAME", help=f"only these; default {' '.join(FAMILIES)}")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="only these ways")
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="only these trainers")
    parser.add_argument("--engine-tp", nargs="+", type=int, choices=ENGINE_SIZES, default=list(ENGINE_SIZES))
    parser.add_argument("--full", action="store_true", help="every family that SGLang can build on a CPU")
    parser.add_argument("--fast", action="store_true", help="the slice that the test suite runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there, too")
    parser.add_argument("--write-docs", action="store_true", help="write benchmarks/results/push_matrix.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen cells; return the exit code."""
    options = parse(argv)
    chosen = {
        "modes": options.mode,
        "quantizations": options.quantization,
        "layouts": options.layout,
        "sizes": options.engine_tp,
    }
    families = options.family or FAMILIES
    if options.fast:
        families, chosen = options.family or FAST["families"], {**chosen, **FAST["chosen"]}
    try:
        cases = load_cases(SERVED if options.full else families)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start = time.monotonic()

    def on_cell(cell: Cell) -> None:
        print(cell.describe(), flush=True)

    cells = run_cells(list(cases.values()), **chosen, on_cell=on_cell)
    text = table(cells)
    failed = [cell for cell in cells if cell.problem]
    print(f"\n{text}\n{len(cells) - len(failed)} of {len(cells)} cells OK in {time.monotonic() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    if options.write_docs:
        passed = {name: [not cell.problem for cell in cells if cell.family == name] for name in cases}
        counts = {name: f"{sum(values)} of {len(values)} cells" for name, values in passed.items() if values}
        whole = vars(parse([]))
        is_part = any(getattr(options, name) != whole[name] for name in (*PARTS, "fast"))
        part = counts if is_part else None
        results_page.record("push_matrix", f"## pushes\n\n{text}", part=part)
    return int(not cells or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
