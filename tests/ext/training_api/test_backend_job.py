"""The backend in a real job on two CPU cores: numbers of trainer and engine, and the effects of deaths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.conftest import no_job_survives  # noqa: F401
from tests.e2e.job import JOB_S, Job
from tests.e2e.tiny_qwen3 import save_tiny_model
from tests.ext.training_api import backend_job
from tests.ext.training_api.backend_job import datum

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FLAGS = """
    --lora-rank 8 --max-tokens-per-gpu 256 --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1
    --no-record --rollout-num-gpus-per-engine 1 --use-fault-tolerance --rollout-health-check-interval 2
"""


def run_job(folder: Path, scenario: str) -> tuple[torch.nn.Module, dict[str, Any], Job]:
    """Run ``backend_job``; return its base model, its observations, and the finished job."""
    model = save_tiny_model(folder / "hf", 1)
    folders = ["--hf-checkpoint", str(folder / "hf"), "--training-api-dir", str(folder / "states")]
    flags = [str(folder), scenario, *folders, *FLAGS.split()]
    script = Path(backend_job.__file__).resolve()
    job = Job(str(script), flags, folder / "log", OMP_NUM_THREADS="1")
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    return model, json.loads((folder / "seen.json").read_text()), job


def test_passes_and_samples_agree(tmp_path: Path) -> None:
    model, seen, _ = run_job(tmp_path, "work")
    for first, last in zip(seen["losses"][0], seen["losses"][-1], strict=True):
        assert last < 0.7 * first
    assert max(seen["errors"]) < 1e-5
    one = datum(0)
    with torch.no_grad():
        table = model(torch.tensor([one.tokens])).logits[0].log_softmax(-1)
    base = table.gather(1, torch.tensor(one.inputs["target_tokens"])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(seen["base"], base, atol=1e-5)
    assert seen["stopped"] == [True, "stop"]
    assert "rank is 9; this server has adapters of rank 1 to 8" in seen["rank"]
    assert "--sglang-enable-deterministic-inference" in seen["seed"]


@pytest.mark.faults
def test_an_engine_is_replaced_and_a_dead_rank_ends_all(tmp_path: Path) -> None:
    _, seen, job = run_job(tmp_path, "deaths")
    assert max(seen["errors of the next engine"]) < 1e-5
    assert "there is no sampler 'snapshot of b'" in seen["dropped"]
    assert seen["open passes"].startswith("BackendDied: EngineDiedError: actor rank 0 died")
    assert seen["next step"] == seen["next sample"] == seen["open passes"]
    job.seconds_until_gone(180)
