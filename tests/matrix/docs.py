"""The results of the matrix as tables: printed at the end of a run, and recorded with ``--write-docs``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks import results_page
from tests.matrix.case import FamilyCase
from tests.matrix.report import CHECKS, Cell, format_number

Places = Mapping[tuple[str, str], Cell]
"""Cells by family and column."""


def result_tables(
    cells: Sequence[Cell], families: Iterable[str], full_families: Sequence[str], layout_order: Iterable[str]
) -> dict[str, str]:
    """The tables of the cells' results.

    Args:
        cells: cells of a run.
        families: all families of the run, in order.
        full_families: families that run in every layout; they have a separate table, with a row per layout.
        layout_order: all layouts.
    """
    families = list(families)
    tables = {}
    if checks := _places(cells, "check"):
        tables["checks"] = _by_family(checks, families, [check for check in CHECKS if _has_column(checks, check)])
    if layouts := _places(cells, "layout"):
        columns = [column for column in layout_order if _has_column(layouts, column)]
        others = [name for name in families if name not in full_families]
        # Columns of families outside the full ones; without such families all are listed below.
        shared = [column for column in columns if any((name, column) in layouts for name in others)]
        if shared:
            tables["families in layouts"] = _by_family(layouts, families, shared)
        full = [name for name in families if name in full_families and any(name == other for other, _ in layouts)]
        if full:
            rows = [[column, *(_number(layouts, name, column) for name in full)] for column in columns]
            tables["layouts in full"] = _table(["layout", *full], [row for row in rows if set(row[1:]) != {"-"}])
    return tables


def reference_tables(
    cells: Sequence[Cell], cases: Mapping[str, FamilyCase], flags: Mapping[str, Sequence[object]]
) -> dict[str, str]:
    """Legends of the cells' names: the families' cases, and the flags of the layouts.

    Names without a cell are omitted, because readers take both lists for what was measured.
    """
    measured, tried = {cell.family for cell in cells}, {cell.column for cell in cells if cell.kind == "layout"}
    families = [
        [name, f"`{case.config['model_type']}`", case.about] for name, case in cases.items() if name in measured
    ]
    layouts = [
        [name, f"`{' '.join(map(str, words))}`" if words else "none"] for name, words in flags.items() if name in tried
    ]
    tables = {"families": _table(["family", "`model_type`", "what is awkward about its case"], families)}
    return tables | ({"flags of the layouts": _table(["layout", "flags"], layouts)} if layouts else {})


def counts(cells: Sequence[Cell]) -> dict[str, str]:
    """Return family -> how many of its cells are within their bounds."""
    passed: dict[str, list[bool]] = {}
    for cell in cells:
        passed.setdefault(cell.family, []).append(cell.passed)
    return {name: f"{sum(values)} of {len(values)} cells" for name, values in passed.items()}


def record(tables: Mapping[str, str], part: Mapping[str, str] | None) -> None:
    """Replace the tables of benchmarks/results/matrix.json, or the rows of ``part``: families, with their notes."""
    results_page.record("matrix", "\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items()), part=part)


def _places(cells: Iterable[Cell], kind: str) -> Places:
    return {(cell.family, cell.column): cell for cell in cells if cell.kind == kind}


def _has_column(places: Places, column: str) -> bool:
    return any(column == other for _, other in places)


def _number(places: Places, family: str, column: str) -> str:
    cell = places.get((family, column))
    return "-" if cell is None else format_number(cell)


def _by_family(places: Places, families: Sequence[str], columns: Sequence[str]) -> str:
    rows = [[name, *(_number(places, name, column) for column in columns)] for name in families]
    return _table(["family", *columns], [row for row in rows if set(row[1:]) != {"-"}])


def _table(header: list[str], rows: list[list[str]]) -> str:
    escaped = [[word.replace("|", "\\|") for word in row] for row in rows]
    lines = [header, ["---"] * len(header), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
