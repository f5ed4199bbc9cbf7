"""Names, types and help of every flag, without importing torch, Megatron and SGLang, which takes seconds.

``scripts/make_docs.py`` generates table.json from the parser.  The table leaves out Megatron's and SGLang's own types,
and values and defaults that SGLang chooses by machine; the parser handles them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slime.flags import kinds
from slime.flags.kinds import Number, RegistryChoices, WholeNumber
from slime.flags.parser import Parser

TABLE = Path(__file__).with_name("table.json")
PACKAGE = TABLE.parents[1]
FROM_SGLANG = ("sglang engine", "sglang router")
"""Groups that mirror the installed SGLang, whose own help lists their flags."""
PACKAGES = ("megatron-core", "sglang", "sglang-router")
"""Packages that declare flags."""


class _NamesOrPaths(list[str]):
    """Choices of a flag that also accepts import paths."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or (isinstance(value, str) and "." in value)


def read_table() -> dict[str, Any]:
    """Return the table: versions, groups, and words that are not flags."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def is_of_installed(table: dict[str, Any]) -> bool:
    """Return True if the installed packages have the versions from which the table was generated."""
    return bool(table["versions"] == _versions())


def is_declared(flag: str) -> bool:
    """Return True for a flag that the source of slime or an extension declares, even if the table lacks it."""
    declares = re.compile(rf'(add_argument\(|flag=)\s*"{re.escape(flag)}"')
    files = (*PACKAGE.glob("flags/*.py"), *PACKAGE.glob("ext/*/flags.py"))
    return any(declares.search(file.read_text(encoding="utf-8")) for file in files)


def parser_of_table(table: dict[str, Any], only: Collection[str] | None = None) -> Parser:
    """Return a parser for all flags in the table, or for those whose first name is in ``only``."""
    parser = Parser(prog="train.py", description="Reinforcement learning post-training with Megatron and SGLang.")
    for group in table["groups"]:
        rows = [row for row in group["flags"] if only is None or row["names"][0] in only]
        if rows:
            place = parser.add_argument_group(group["title"], group["description"])
            for row in rows:
                place.add_argument(*row["names"], **_options(row))
    parser.no_flags = table["no_flags"]
    return parser


def _options(row: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"help": row.get("help"), "default": argparse.SUPPRESS if "default" in row else None}
    if row.get("nargs") == 0:
        return {**options, "action": "store_true"}
    if row.get("is_append"):
        options["action"] = "append"
    if (choices := row.get("choices")) is not None:
        options["choices"] = _NamesOrPaths(choices) if row.get("takes_paths") else choices
    if (kind := row.get("type")) is not None:
        options["type"] = _type(kind)
    return options | {key: row[key] for key in ("nargs", "metavar") if key in row}


def _type(kind: str | dict[str, Any]) -> Any:
    if isinstance(kind, str):
        return {"int": int, "float": float}.get(kind) or getattr(kinds, kind)
    bounds = dict(kind)
    return {"WholeNumber": WholeNumber, "Number": Number}[bounds.pop("kind")](**bounds)


def table_text(parser: argparse.ArgumentParser, no_flags: dict[str, str]) -> str:
    """Return the content of table.json, with one line per flag."""
    groups = []
    for group in parser._action_groups:
        rows = [
            json.dumps(_row(action, is_of_slime=group.title not in FROM_SGLANG))
            for action in group._group_actions
            if action.dest != "help"
        ]
        if rows:
            head = json.dumps({"title": group.title, "description": group.description})
            groups.append(f'{head[:-1]}, "flags": [\n' + ",\n".join(rows) + "\n]}")
    lines = (f'"versions": {json.dumps(_versions())}', f'"no_flags": {json.dumps(no_flags, indent=0)}')
    return "{" + ",\n".join(lines) + ',\n"groups": [\n' + ",\n".join(groups) + "\n]}\n"


def _row(action: argparse.Action, *, is_of_slime: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"names": action.option_strings}
    if action.nargs is not None:
        row["nargs"] = action.nargs
    if isinstance(action, argparse._AppendAction):
        row["is_append"] = True
    if (kind := _kind_of(action.type)) is not None:
        row["type"] = kind
    if action.metavar is not None:
        row["metavar"] = action.metavar
    text = action.help or ""
    if is_of_slime:
        if action.choices is not None:
            row["choices"] = list(action.choices)
            if isinstance(action.choices, RegistryChoices) and "a.path" in action.choices:
                row["takes_paths"] = True
        if action.default not in (None, argparse.SUPPRESS):
            row["default"] = shown = str(action.default)
            if action.nargs != 0 and "efault" not in text and text != argparse.SUPPRESS:
                text = f"{text} Default: {shown}.".replace("%%", "%").replace("%", "%%")
    return row | {"help": text}


def _kind_of(kind: Any) -> str | dict[str, Any] | None:
    """Return a type's entry in the table; None for a type that only the parser has."""
    if isinstance(kind, WholeNumber | Number):
        bounds = {field.name: getattr(kind, field.name) for field in fields(kind)}
        given = {field.name: bounds[field.name] for field in fields(kind) if bounds[field.name] != field.default}
        return {"kind": type(kind).__name__, **given}
    name = getattr(kind, "__name__", None)
    return name if kind in (int, float) or name is not None and vars(kinds).get(name) is kind else None


def _versions() -> dict[str, str | None]:
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
