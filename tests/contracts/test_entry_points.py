"""Bad input ends train.py with a message and code 2, without a traceback, before Ray is used."""

from __future__ import annotations

import subprocess
import sys

from tests.contracts.source_tree import REPO


def test_a_misspelt_flag_is_shown_with_the_nearest_one():
    # No engine runs with --debug-train-only, which spares this test the import of SGLang.
    words = [sys.executable, "train.py", "--debug-train-only", "--rollout-batchsize", "4"]
    result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2
    assert "--rollout-batchsize is not a flag. Did you mean --rollout-batch-size" in result.stderr
    assert "Traceback" not in result.stderr
