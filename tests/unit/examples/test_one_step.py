"""The example of a whole step runs, and its trainer agrees with the model that answered, before and after a push."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.tiny_arithmetic.make_task import make_task

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(600)
def test_two_steps_in_one_process(tmp_path):
    make_task(tmp_path / "task", seed=2026)
    words = ["examples/one_step.py", "--task", f"{tmp_path}/task", "--steps", "2", "--rollout-batch-size", "2"]
    words += ["--global-batch-size", "16", "--save-debug-train-data", f"{tmp_path}/{{rollout_id}}.pt"]
    ended = subprocess.run(
        [sys.executable, *words], cwd=REPO, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(re.findall(r"^step \d/2: mean reward 0\.\d+$", ended.stdout, flags=re.MULTILINE)) == 2
    for rollout_id in range(2):
        for sample in torch.load(tmp_path / f"{rollout_id}.pt", weights_only=False)["samples"]:
            # The old policy's log-probs by Megatron, and those with which transformers drew: the push carried all.
            torch.testing.assert_close(
                torch.as_tensor(sample["log_probs"]), torch.as_tensor(sample["rollout_log_probs"]), atol=1e-4, rtol=0
            )
