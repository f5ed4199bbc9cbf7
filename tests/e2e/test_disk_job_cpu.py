"""A real job on two CPU cores whose weights travel over disk."""

from __future__ import annotations

import json

import pytest
import torch

from tests.e2e.job import JOB_S, Job, grpo_flags, records

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


def test_changes_of_weights_travel_over_disk_to_prefill_and_decode_engines(task, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --prefill-num-servers 1".split(),
        *"--num-rollout 2 --lr 1e-3".split(),
        *"--update-weight-mode delta --update-weight-transport disk --check-weight-update-equal".split(),
        *("--update-weight-disk-dir", str(tmp_path / "shared"), "--update-weight-disk-keep-files"),
        *("--update-weight-local-checkpoint-dir", str(tmp_path / "local")),
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt")
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    assert "step 2/2" in job.text()
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [f"weight_v00000{n}" for n in (1, 2, 3)]
    state = json.loads((tmp_path / "local/.weight_sync/state.json").read_text())
    assert (state["version"], state["dirty"]) == ("000003", "")
    # Prefill computed the first token, decode the others; both hold the weights that were pushed.
    assert records(tmp_path, "train/step")[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    pushes = records(tmp_path, "perf/update_weights_wire_bytes")
    assert [0 < push["perf/update_weights_density"] <= 1 for push in pushes] == [True, True]
