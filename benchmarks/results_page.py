"""Measurements as data: reads and writes ``benchmarks/results/*.json``, and makes the site's page of them.

A file holds one run: title, group, date, hardware, versions, command, commit (null if unknown), notes, and
the tables of measurements.  ``make docs`` builds the page; the programs of tests/ that measure whole
tables replace theirs with ``record`` (``--write-docs``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
FOLDER = REPO / "benchmarks" / "results"
NOT_RUN = FOLDER / "not_run.json"
GROUPS = (
    "Whole jobs",
    "Speed and memory of training",
    "Rollout",
    "Weight push",
    "Checkpoints and quantization",
    "Planning",
    "Correctness",
)
"""Sections of the page, in order."""
KEYS = {"title", "group", "date", "hardware", "versions", "command", "commit", "notes", "tables"}
OPTIONAL = {"picture"}
SHOWN = ("torch", "megatron-core", "sglang", "ray")
"""Versions shown on the page; the files have all."""
VERSIONED = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers")
_NUMBER = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

HEAD = """# Results

Built from `benchmarks/results/*.json`, one file a run. The last section lists
what has not been run. CONTRIBUTING.md has the test commands.
"""


def load(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return every run by its file's name.

    Raises:
        ValueError: a file lacks a key, has an extra one or names a group that the page does not have.
    """
    runs = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == NOT_RUN.name:
            continue
        run = json.loads(path.read_text(encoding="utf-8"))
        if KEYS - run.keys() or run.keys() - KEYS - OPTIONAL:
            raise ValueError(f"{path.name}: keys are {sorted(run)}; needed are {sorted(KEYS)}")
        if run["group"] not in GROUPS:
            raise ValueError(f"{path.name}: group {run['group']!r} is none of {', '.join(GROUPS)}")
        runs[path.stem] = run
    return runs


def save(name: str, run: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Write one run; each row stays on one line."""
    text = json.dumps({**run, "tables": []}, indent=1, ensure_ascii=False)
    tables = ",\n".join(_table_json(table) for table in run["tables"])
    text = text.replace('"tables": []', f'"tables": [\n{tables}\n ]') if tables else text
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _table_json(table: Mapping[str, Any]) -> str:
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in table["rows"])
    title, columns = (json.dumps(table[key], ensure_ascii=False) for key in ("title", "columns"))
    return f'  {{\n   "title": {title},\n   "columns": {columns},\n   "rows": [\n{rows}\n   ]\n  }}'


def record(
    name: str,
    markdown: str,
    folder: Path = FOLDER,
    *,
    hardware: str = "",
    part: Mapping[str, str] | None = None,
    words: int | None = None,
) -> None:
    """Replace tables and notes of an existing run with those of ``markdown``; the rest describes this machine now.

    Tables that ``markdown`` does not have stay.

    Args:
        part: the measured subset: names, each with its part of the note, which adds when, where and with which
        versions it
            was measured.  Rows that were not measured then stay, with the description of their run.
        words: number of leading columns that name what was measured, so that all its rows are replaced; None for as
        many
            as distinguish all rows of a table, so that each row is replaced alone.

    Raises:
        FileNotFoundError: there is no such run; title, group and command must first be written by hand.
    """
    run = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    notes, tables = parse(markdown)
    new = {table["title"] for table in tables}
    kept = [table for table in run["tables"] if table["title"] not in new]
    today, where = datetime.now(UTC).date().isoformat(), hardware or find_hardware()
    if part:
        old = {table["title"]: table for table in run["tables"]}
        tables = [
            _with_rows(old[table["title"]], table, words) if table["title"] in old else table for table in tables
        ]
        told = [note for note in run["notes"] if not note.startswith(tuple(f"{name}: " for name in part))]
        others = [f"{name} {number}" for name, number in versions().items() if run["versions"].get(name) != number]
        how = f"measured on {today} on {where}, at {commit()}" + (f", with {', '.join(others)}" if others else "")
        notes = told + [f"{name}: {how}{f'; {more}' if more else ''}." for name, more in part.items()]
    else:
        run |= {"date": today, "hardware": where, "versions": versions(), "commit": commit()}
    save(name, run | {"notes": notes or run["notes"], "tables": [*tables, *kept]}, folder)


def _with_rows(old: Mapping[str, Any], new: Mapping[str, Any], words: int | None) -> dict[str, Any]:
    """Return the old table with the new one's rows in place of those with the same first words.

    A row that exists only in the old table keeps its cells of other columns.
    """
    columns = [*old["columns"], *(name for name in new["columns"] if name not in old["columns"])]
    words = words or _words_of_key(old, new)
    known = _by_first_words(old, words)
    for key, added in _by_first_words(new, words).items():
        before = known.get(key, [])
        known[key] = [before[0] | added[0]] if len(before) == len(added) == 1 else added
    rows = [[cells.get(name, "-") for name in columns] for group in known.values() for cells in group]
    return {"title": old["title"], "columns": columns, "rows": rows}


def _words_of_key(*tables: Mapping[str, Any]) -> int:
    """Return how many leading columns, the same in all tables, distinguish the rows of each; else all such columns."""
    names = zip(*(table["columns"] for table in tables), strict=False)
    shared = len(list(takewhile(lambda pair: len(set(pair)) == 1, names)))
    return next(
        (n for n in range(1, shared) if all(len(_by_first_words(one, n)) == len(one["rows"]) for one in tables)),
        shared,
    )


def _by_first_words(table: Mapping[str, Any], words: int) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table["rows"]:
        groups.setdefault(tuple(row[:words]), []).append(dict(zip(table["columns"], row, strict=True)))
    return groups


def parse(markdown: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Split text into its paragraphs and its tables; a heading (``#``) before a table is its title."""
    notes: list[str] = []
    tables: list[dict[str, Any]] = []
    title = ""
    for block in re.split(r"\n\s*\n", markdown.strip()):
        lines = block.strip().split("\n")
        if lines[0].startswith("#"):
            title = lines[0].lstrip("# ")
        elif lines[0].startswith("|"):
            columns, _, *rows = ([_cell(word) for word in _cells(line)] for line in lines)
            tables.append({"title": title, "columns": [str(word) for word in columns], "rows": rows})
            title = ""
        elif not lines[0].startswith(("![", "<!--")):
            notes.append(" ".join(line.strip() for line in lines))
    return notes, tables


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def _cell(text: str) -> str | int | float:
    plain = text.removeprefix("**").removesuffix("**")
    if not _NUMBER.fullmatch(plain):
        return plain
    plain = plain.replace(",", "")
    return int(plain) if re.fullmatch(r"-?\d+", plain) else float(plain)


def find_hardware() -> str:
    """Return this machine's GPUs, or else its CPU cores."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return f"{os.cpu_count()} CPU cores"
    found = [name.strip() for name in names if name.strip()]
    return f"{len(found)} {found[0]}"


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect measurements."""
    found = {}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the tree, or None outside of git."""
    words = ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def page(folder: Path = FOLDER) -> str:
    """Return the page."""
    runs = load(folder)
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"## {group}\n")
        parts += [_section(name, run) for name, run in runs.items() if run["group"] == group]
    missing = json.loads((folder / NOT_RUN.name).read_text(encoding="utf-8"))["not_run"]
    parts.append("## Not run\n\n" + "\n".join(f"* {line}" for line in missing) + "\n")
    return "\n".join(parts)


def _section(name: str, run: Mapping[str, Any]) -> str:
    software = ", ".join(f"{key} {run['versions'][key]}" for key in run["versions"] if key.lower() in SHOWN)
    when = f"{run['date']}, commit {run['commit']}" if run["commit"] else run["date"]
    lines = [f"### {run['title']}\n", f"{when}. {run['hardware']}. {software}. File `{name}.json`.\n"]
    if run["command"]:
        lines.append(f"```\n{run['command']}\n```\n")
    lines += [f"{note}\n" for note in run["notes"]]
    if "picture" in run:
        lines.append(f"![{run['title']}]({run['picture']})\n")
    for table in run["tables"]:
        if table["title"]:
            lines.append(f"**{table['title']}**\n")
        lines.append(_markdown(table["columns"], table["rows"]) + "\n")
    return "\n".join(lines)


def _markdown(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    shown = [[_shown(cell) for cell in row] for row in rows]
    head = list(columns)
    numeric = [bool(shown) and all(re.match(r"[-<~]?[\d.]|-$|$", row[i]) for row in shown) for i in range(len(head))]
    rule = ["---:" if right and i else "---" for i, right in enumerate(numeric)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *shown])


def _shown(cell: Any) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell).replace("|", "\\|")
