"""The results of the checks as tables of a page: printed and recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutations.runner import Outcome
from tests.oracle.agreement import BOUNDS, Errors
from tests.oracle.trainer import Cell

Results = Mapping[Cell, Errors]


def oracle_table(results: Results, differences: Mapping[str, float], difference_bound: float) -> str:
    """The worst errors of every variant over all layouts, packings and batches; then those of every layout.

    Args:
        results: results of every cell.
        differences: for each variant, between its gradient and finite differences of its loss.
        difference_bound: upper limit for them.
    """
    layouts = list(dict.fromkeys(layout for layout, _, _, _ in results))
    variants = list(dict.fromkeys(variant for _, variant, _, _ in results))
    bounds = ", ".join(f"{kind} {bound:g}" for kind, bound in BOUNDS.items())
    failed = [cell for cell, errors in results.items() if not errors.within_bounds()]
    packings, seeds = ({cell[place] for cell in results} for place in (2, 3))
    intro = (
        f"{len(results)} cells: {len(variants)} variants in {len(layouts)} layouts and {len(packings)} packings, "
        f"{len(seeds)} random "
        f"batches, two optimizer steps each; {len(failed)} out of bounds. Errors are the largest difference over the "
        f"largest number, float32 against float64; bounds: {bounds}; finite differences (float64, through the "
        f"trainer's loss to the logits) {difference_bound:g}."
    )
    by_variant = [
        [
            f"`{variant}`",
            *_worst(errors for cell, errors in results.items() if cell[1] == variant),
            _number(differences[variant]) if variant in differences else "-",
        ]
        for variant in variants
    ]
    by_layout = [
        [
            layout.replace("_", " "),
            str(sum(cell[0] == layout for cell in results)),
            *_worst(errors for cell, errors in results.items() if cell[0] == layout),
        ]
        for layout in layouts
    ]
    kinds = ["advantages", "loss and metrics", "gradient"]
    return "\n\n".join(
        [
            intro,
            "## variants",
            markdown(["variant", *kinds, "finite differences"], by_variant),
            "## layouts",
            markdown(["layout", "cells", *kinds], by_layout),
        ]
    )


def mutation_table(outcomes: Sequence[Outcome]) -> str:
    """Each bug, the test that catches it, and whether it did."""
    caught = sum(outcome.is_caught for outcome in outcomes)
    rows = [
        [
            outcome.mutation.bug,
            f"`{outcome.mutation.target.partition(':')[2]}`",
            ", ".join(_name_of(verdict.check) for verdict in outcome.verdicts),
            "yes" if outcome.is_caught else "**no**",
        ]
        for outcome in outcomes
    ]
    return f"{caught} of {len(outcomes)} are caught.\n\n## mutations\n\n" + markdown(
        ["bug", "in", "caught by", "caught"], rows
    )


def _name_of(check: str) -> str:
    """A test by its file and function; an oracle cell by layout and variant."""
    if check.startswith("oracle:"):
        _, layout, variant = check.split(":")
        return f"oracle, {layout.replace('_', ' ')}: `{variant}`"
    file, _, test = check.partition("::")
    return f"`{Path(file).stem}`" + (
        f": {test.partition('[')[0].removeprefix('test_').replace('_', ' ')}" if test else ""
    )


def _worst(errors: Iterable[Errors]) -> list[str]:
    found = list(errors)
    return [_number(max(getattr(error, kind) for error in found)) for kind in BOUNDS]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
