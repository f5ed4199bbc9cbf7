"""A copy of the code with a few edits, and a program that runs in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def with_edits(source: str, edits: dict[str, str]) -> str:
    """Return a file's text with each addition inserted before its line."""
    for line, added in edits.items():
        assert source.count(line) == 1, f"{source.count(line)} lines begin with {line!r}"
        source = source.replace(line, added + line)
    return source


def copy_by_links(source: Path, target: Path, edited: set[Path]) -> None:
    """Link every file of a folder, except the edited ones and the folders above them."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name == "__pycache__" or entry in edited:
            continue
        if any(entry in path.parents for path in edited):
            copy_by_links(entry, target / entry.name, edited)
        else:
            (target / entry.name).symlink_to(entry)


def printed_by(program: str, folder: Path) -> Any:
    """Run a program in the copy; return the JSON of its last line."""
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
