"""``python -m tests.algorithms``: checks of the algorithms, with their numbers.

    python -m tests.algorithms                          oracle and mutations: minutes
    python -m tests.algorithms --only oracle            only the oracle; likewise mutations
    python -m tests.algorithms --variants gspo,tis      cells of some variants
    python -m tests.algorithms --layouts cp2,dp2_cp2    ... in some layouts
    python -m tests.algorithms --quick                  without bugs that take seconds each
    python -m tests.algorithms --write-docs             records the results
    python -m tests.algorithms --end-to-end -- --device gpu     then the tiny task's real job with each algorithm;
                                                        arguments after -- go to python -m tests.e2e.algorithms

Exit code 0 when every cell is within its bounds, every bug is caught, and every run reached its target; else 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import results_page
from tests.algorithms.tables import mutation_table, oracle_table
from tests.matrix.pool import RankPool
from tests.mutations.runner import run_mutations
from tests.mutations.table import MUTATIONS
from tests.oracle.agreement import Errors, errors_of_cell
from tests.oracle.finite_differences import BOUND, DIFFERENTIABLE, differences_of
from tests.oracle.trainer import Cell, run_cells
from tests.oracle.variants import CELLS, LAYOUTS, SEEDS


def say(start: float, text: str) -> None:
    """Print a progress line, separate from the tables."""
    print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def prove_oracle(start: float, variants: Sequence[str], layouts: Sequence[str]) -> tuple[str, list[str]]:
    """Print the table, and the cells out of bounds."""
    results: dict[Cell, Errors] = {}
    with RankPool() as pool:
        for layout in [name for names in LAYOUTS.values() for name in names]:
            if layouts and layout not in layouts:
                continue
            cells = [
                (layout, variant, packing, seed)
                for variant, packing in CELLS
                for seed in SEEDS
                if not variants or variant in variants
            ]
            found = run_cells(pool, cells, timeout_s=1800)
            results |= {cell: errors_of_cell(cell[1], cell[3], found[cell]) for cell in cells}
            say(start, f"oracle: {layout}, {len(cells)} cells")
        chosen = [variant for variant in DIFFERENTIABLE if not variants or variant in variants]
        differences = differences_of(pool, chosen)
        say(start, f"finite differences: {len(chosen)} losses")
    wrong = [f"{' '.join(map(str, cell))}: {errors}" for cell, errors in results.items() if not errors.within_bounds()]
    wrong += [
        f"finite differences of {name}: {error:.1e}" for name, error in differences.items() if not error <= BOUND
    ]
    return oracle_table(results, differences, BOUND), wrong


def prove_mutations(start: float, quick: bool) -> tuple[str, list[str]]:
    """Print the table, and the bugs that no test caught."""
    outcomes = run_mutations([mutation for mutation in MUTATIONS if not (quick and mutation.is_slow)])
    say(start, f"mutations: {len(outcomes)} bugs")
    wrong = [
        f"not caught: {outcome.mutation.bug}: "
        + "; ".join(f"{verdict.check}: {verdict.reason or 'passes'}" for verdict in outcome.verdicts)
        for outcome in outcomes
        if not outcome.is_caught
    ]
    return mutation_table(outcomes), wrong


def words(text: str) -> list[str]:
    """A comma-separated list."""
    return [word for word in text.split(",") if word]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.algorithms", description="The proof of the algorithms.")
    parser.add_argument("--only", choices=["oracle", "mutations"], help="this part alone")
    parser.add_argument("--variants", type=words, default=[], help="names of tests/oracle/variants.py, with commas")
    parser.add_argument("--layouts", type=words, default=[], help="likewise")
    parser.add_argument("--quick", action="store_true", help="without the bugs that take seconds each")
    parser.add_argument("--write-docs", action="store_true", help="write benchmarks/results/algorithms_*.json")
    parser.add_argument("--end-to-end", action="store_true", help="then python -m tests.e2e.algorithms")
    own, others = sys.argv[1:], []
    if "--" in own:
        own, others = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.write_docs and (options.variants or options.layouts or options.quick):
        parser.error("--write-docs wants whole tables: leave out --variants, --layouts and --quick")
    start = time.monotonic()
    tables: dict[str, str] = {}
    wrong: list[str] = []
    if options.only != "mutations":
        tables["oracle"], problems = prove_oracle(start, options.variants, options.layouts)
        wrong += problems
    if options.only != "oracle":
        tables["mutations"], problems = prove_mutations(start, options.quick)
        wrong += problems
    for table in tables.values():
        print(f"\n{table}\n", flush=True)
    print("\n".join(wrong) if wrong else "everything agrees, everything is caught", flush=True)
    if options.write_docs:
        for name, table in tables.items():
            results_page.record(f"algorithms_{name}", table)
    code = 1 if wrong else 0
    if options.end_to_end:
        # Arguments after a second -- are flags of every job; ours come first.
        command = [sys.executable, "-m", "tests.e2e.algorithms", *(["--write-docs"] if options.write_docs else [])]
        command += others
        code |= subprocess.run(command, check=False).returncode != 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
