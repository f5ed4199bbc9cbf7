"""A real job on two CPU cores whose weights travel over disk, from two ranks to prefill and decode engines."""

from __future__ import annotations

import json
import re

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.job import GONE_S, JOB_S, STEP_S, Job, grpo_flags, records

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


def error_of_answer(url: str, model: torch.nn.Module, length: int) -> float:
    """Largest difference of a log-prob of 24 tokens behind a prompt of ``length`` from that of ``model``."""
    prompt = [5 + i * 7 % 100 for i in range(length)]
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    with requests.Session() as session:
        session.trust_env = False
        response = session.post(f"{url}/generate", json=payload, timeout=STEP_S)
    response.raise_for_status()
    answer = response.json()["meta_info"]
    assert answer["finish_reason"]["type"] != "abort"
    pairs = answer["output_token_logprobs"]
    assert len(pairs) == 24
    tokens = torch.tensor([prompt + [token for _, token, *_ in pairs]])
    with torch.no_grad():
        log_probs = model(tokens).logits.float().log_softmax(-1)[0]
    expected = log_probs[range(length - 1, tokens.shape[1] - 1), tokens[0, length:]]
    return float((expected - torch.tensor([log_prob for log_prob, *_ in pairs])).abs().max())


def test_a_driver_of_the_users_own_sends_changes_of_weights_over_disk_to_prefill_and_decode_engines(task, tmp_path):
    """Written against upstream's names alone, one rollout ahead.  The first rollout waits until the engines have
    answered with the weights that the job began with."""
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 2 --rollout-num-gpus 2 --prefill-num-servers 1".split(),
        *"--tensor-model-parallel-size 2 --sequence-parallel --num-rollout 2 --lr 1e-3".split(),
        *"--custom-rm-path tests.e2e.slow_grader.random_when_asked_to_go_on".split(),
        *"--update-weight-mode delta --update-weight-transport disk --check-weight-update-equal".split(),
        *("--update-weight-disk-dir", str(tmp_path / "shared"), "--update-weight-disk-keep-files"),
        *("--update-weight-local-checkpoint-dir", str(tmp_path / "local")),
    )  # fmt: skip
    job = Job("tests/e2e/drivers/one_rollout_ahead.py", flags, tmp_path / "log.txt")
    job.wait_until(lambda: "Pushed weight version 1 to 2 engines" in job.text(), "first push", STEP_S)
    url = re.search(r"router default (http://127\.0\.0\.1:\d+)", job.text())[1]
    model = AutoModelForCausalLM.from_pretrained(task / "task/hf", dtype=torch.float32)
    worst = max(error_of_answer(url, model, length) for length in (1, 9, 450))
    print(f"largest difference of a log-prob {worst:.1e}")
    assert worst < 1e-4
    (tmp_path / "go").touch()
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    steps = records(tmp_path, "train/pg_loss")
    assert [step["train/step"] for step in steps] == [0, 1, 2, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [f"weight_v00000{n}" for n in (1, 2, 3)]
    state = json.loads((tmp_path / "local/.weight_sync/state.json").read_text())
    assert (state["version"], state["dirty"]) == ("000003", "")
    # Prefill computed the first token, decode the others; both hold the weights that were pushed.
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    pushes = records(tmp_path, "perf/update_weights_wire_bytes")
    assert [0 < push["perf/update_weights_density"] <= 1 for push in pushes] == [True, True]
    job.seconds_until_gone(GONE_S)
