"""Locates the files of model families, which live outside the core and are found by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

HOME = "slime_plugins.models"
"""The package that holds each family as a file or folder."""


def family_files(*patterns: str) -> dict[str, Path]:
    """Return module name -> file for family files that match a glob pattern such as ``*/family.py``.

    Imports none of them.
    """
    home = find_spec(HOME)
    places = [Path(place) for place in (home and home.submodule_search_locations) or ()]
    found = {path.relative_to(place): path for place in places for one in patterns for path in place.glob(one)}
    return {".".join((HOME, *relative.with_suffix("").parts)): found[relative] for relative in sorted(found)}
