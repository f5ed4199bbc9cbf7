"""The line a reader watches."""

from pathlib import Path

from slime.observability.metrics_file import append_record
from slime.observability.step_line import StepLine, format_step


def test_the_line_shows_what_was_measured_and_nothing_else() -> None:
    metrics = {
        "rollout/raw_reward": 0.6834,
        "train/loss": 0.00123,
        "train/kl_loss": 0.0004,
        "train/grad_norm": 0.412,
        "eval/held_out": 0.951,
        "eval/held_out/response_len/mean": 18.0,
        "eval/held_out-truncated_ratio": 0.0,
        "eval/step": 11,
        "perf/rollout_tok_per_s": 4123.0,
        "perf/train_tok_per_s": 7900.0,
        "perf/packing_efficiency": 0.97,
        "perf/time_wait_for_rollout_s": 1.9,
        "perf/time_train_s": 1.61,
        "perf/time_push_s": 0.2,
        "perf/time_step_s": 3.71,
    }
    assert format_step(11, metrics, num_rollout=40) == (
        "step 12/40 | reward 0.683 | loss 0.0012 | kl 0.00040 | grad 0.412 | eval held_out 0.951 | gen 4.1k tok/s"
        " | train 7.9k tok/s | packed 97% | 3.7 s = rollout 1.9 + train 1.6 + push 0.2"
    )


def test_metrics_of_several_processes_meet_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_record(path, {"rollout/step": 0, "rollout/raw_reward": 0.9})
    line = StepLine(path)
    append_record(path, {"rollout/step": 3, "rollout/raw_reward": 0.25})
    append_record(path, {"train/step": 3, "train/grad_norm": 0.5})
    assert line.line(3, {"train/loss": 0.1}) == "step 4 | reward 0.250 | loss 0.1000 | grad 0.500"
    assert line.line(4) == "step 5"


def test_a_rollout_generated_ahead_waits_for_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = StepLine(path)
    append_record(path, {"rollout/step": 0, "rollout/raw_reward": 0.1})
    append_record(path, {"rollout/step": 1, "rollout/raw_reward": 0.2})
    assert line.line(0) == "step 1 | reward 0.100"
    assert line.line(1) == "step 2 | reward 0.200"
