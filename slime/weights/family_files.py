"""Where model families are, outside of the core: what needs them looks for their files by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

HOME = "slime_plugins.models"
"""The package in which every family is a file or a folder."""


def family_files(*patterns: str) -> dict[str, Path]:
    """Return the files of families that fit a pattern (``*/family.py``), by the names of their modules.

    None of them is imported.
    """
    home = find_spec(HOME)
    places = [Path(place) for place in (home and home.submodule_search_locations) or ()]
    found = {path.relative_to(place): path for place in places for one in patterns for path in place.glob(one)}
    return {".".join((HOME, *relative.with_suffix("").parts)): found[relative] for relative in sorted(found)}
