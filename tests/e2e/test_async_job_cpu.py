"""A real job on two CPU cores that generates one rollout ahead, on engines apart from the trainer."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.job import GONE_S, JOB_S, Job, grpo_flags, records

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


def test_an_evaluation_in_the_background_stops_no_step_and_has_one_weight_version(task, tmp_path):
    engines = tmp_path / "engines.yaml"
    group = "[{worker_type: regular, num_gpus: 1}]"
    engines.write_text("sglang:\n" + "".join(f"  - {{name: {n}, server_groups: {group}}}\n" for n in ("p", "eval")))
    data = tmp_path / "eval8.jsonl"
    data.write_text("".join((task / "task/data/eval.jsonl").read_text().splitlines(keepends=True)[:8]))
    sets = tmp_path / "sets.yaml"
    grader = "tests.e2e.slow_grader.reward"
    sets.write_text(f"eval:\n  datasets:\n    - {{name: held_out, path: {data}, custom_rm_path: {grader}}}\n")
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --num-rollout 3".split(),
        *("--sglang-config", str(engines), "--eval-in-background", "--eval-interval", "1"),
        *("--eval-config", str(sets)),
        *"--rollout-max-response-len 16 --check-weight-update-equal".split(),
    )  # fmt: skip
    job = Job("train_async.py", flags, tmp_path / "log.txt")
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    text = job.text()
    assert "step 3/3" in text
    # Rollout 1 was trained and its weights were pushed while the first evaluation ran.
    assert "The evaluation after rollout 1 is left out: that of rollout 0 still runs" in text
    assert [step["train/step"] for step in records(tmp_path, "train/step")] == [0, 1, 2, 3, 4, 5]
    evaluations = records(tmp_path, "eval/held_out")
    assert (evaluations[0]["eval/held_out"], evaluations[0]["eval/step"]) == (1.0, 0)
    assert evaluations[0]["eval/held_out/weight_version"] == 2  # pushed after rollout 0, with later ones after it
    dump = torch.load(tmp_path / "dump/eval_0.pt", weights_only=False)
    assert (dump["rollout_id"], dump["weight_versions"]) == (0, {"held_out": 2})
    assert {tuple(sample["weight_versions"]) for sample in dump["samples"]} == {("2",)}
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in records(tmp_path, "train/step")]
    assert differences[0] < 1e-4
    job.seconds_until_gone(GONE_S)
