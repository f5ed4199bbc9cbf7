"""docs/flags.md and docs/hooks.md match the code."""

from __future__ import annotations

import subprocess
import sys

from tests.contracts.source_tree import REPO


def test_the_pages_of_flags_and_plug_ins_are_up_to_date():
    words = [sys.executable, "scripts/make_docs.py", "--check"]
    result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-1000:]
