"""A real job on two CPU cores that generates one rollout ahead and evaluates in the background.

Two trainer ranks push weights to a prefill and a decode engine, and later to an evaluation engine.
"""

from __future__ import annotations

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

ENGINES = """\
sglang:
  - {name: p, server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}]}
  - {name: eval, server_groups: [{worker_type: regular, num_gpus: 1}]}
"""


def error_of_answer(url: str, model: torch.nn.Module, length: int) -> float:
    """Largest log-prob difference from ``model`` of 24 tokens after a prompt of ``length``."""
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


def test_weights_reach_prefill_and_decode_engines_and_a_slow_evaluation_stops_no_step(task, tmp_path):
    """The first rollout waits until the engines have answered with the job's initial weights."""
    (tmp_path / "engines.yaml").write_text(ENGINES)
    data = tmp_path / "eval8.jsonl"
    data.write_text("".join((task / "task/data/eval.jsonl").read_text().splitlines(keepends=True)[:8]))
    grader = "tests.e2e.slow_grader.reward"
    sets = f"eval:\n  datasets:\n    - {{name: held_out, path: {data}, custom_rm_path: {grader}}}\n"
    (tmp_path / "sets.yaml").write_text(sets)
    flags = grpo_flags(
        task, tmp_path, *f"--sglang-config {tmp_path}/engines.yaml --eval-config {tmp_path}/sets.yaml".split(),
        *"--actor-num-gpus-per-node 2 --rollout-num-gpus 3 --tensor-model-parallel-size 2 --sequence-parallel".split(),
        *"--num-rollout 3 --lr 1e-3 --rollout-max-response-len 16 --check-weight-update-equal".split(),
        *"--custom-rm-path tests.e2e.slow_grader.random_when_asked_to_go_on".split(),
        *"--eval-in-background --eval-interval 1".split(),
    )  # fmt: skip
    job = Job("train_async.py", flags, tmp_path / "log.txt")
    job.wait_until(lambda: "Pushed weight version 1 to 2 engines" in job.text(), "first push", STEP_S)
    url = re.search(r"router p (http://127\.0\.0\.1:\d+)", job.text())[1]
    model = AutoModelForCausalLM.from_pretrained(task / "task/hf", dtype=torch.float32)
    assert max(error_of_answer(url, model, length) for length in (1, 9, 450)) < 1e-4
    (tmp_path / "go").touch()
    assert job.finish(JOB_S) == 0, job.text()[-4000:]

    steps = records(tmp_path, "train/pg_loss")
    assert [step["train/step"] for step in steps] == [0, 1, 2, 3, 4, 5]
    # Prefill computed the first token, decode the others; both hold the pushed weights.
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"

    # Rollout 1 was trained and its weights were pushed during the first evaluation.
    assert "The evaluation after rollout 1 is left out: that of rollout 0 still runs" in job.text()
    evaluations = records(tmp_path, "eval/held_out")
    assert (evaluations[0]["eval/held_out"], evaluations[0]["eval/step"]) == (1.0, 0)
    assert evaluations[0]["eval/held_out/weight_version"] == 2  # pushed after rollout 0, with later ones after it
    dump = torch.load(tmp_path / "dump/eval_0.pt", weights_only=False)
    assert (dump["rollout_id"], dump["weight_versions"]) == (0, {"held_out": 2})
    assert {tuple(sample["weight_versions"]) for sample in dump["samples"]} == {("2",)}
    job.seconds_until_gone(GONE_S)
