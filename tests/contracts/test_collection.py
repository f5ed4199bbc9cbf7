"""Every test file is found: pytest passes over folders of certain names without a word."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_folder_with_tests_has_a_name_that_is_passed_over(request: pytest.FixtureRequest) -> None:
    patterns = request.config.getini("norecursedirs")
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert "dist" in folders
    assert [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)] == []
