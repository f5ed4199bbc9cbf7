"""Every test file is collected: pytest silently skips folders of certain names."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_only_one_folder_with_tests_is_passed_over_and_make_names_its_files(request: pytest.FixtureRequest) -> None:
    patterns = request.config.getini("norecursedirs")
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)] == ["dist"]
    makefile = (TESTS.parent / "Makefile").read_text()
    assert "tests/dist/test_*.py tests/ext/*/dist/test_*.py" in makefile
    named = re.findall(r"addprefix tests/(.*?)/test_,(.*?)\)", makefile)
    assert len(named) == 2
    files = [TESTS / folder / f"test_{name}" for folder, names in named for name in names.split()]
    assert [file for file in files if not file.exists()] == []
