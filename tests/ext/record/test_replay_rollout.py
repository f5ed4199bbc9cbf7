"""Repeating a rollout: its groups, its flags, and the comparison of its answers."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.ext.record.run_reader import Run, read_run
from slime.observability.dumps import save_rollout_dump
from slime.observability.metrics_file import append_record
from slime.utils.errors import ConfigError, DataError
from slime.utils.types import Sample
from tests.ext.record import recording
from tools import replay_rollout
from tools.replay_plan import FROM_START, Replay, changed, flags_of, rollout_flags_of


def answered(index: int, last: int = 7) -> Sample:
    return Sample(
        index=index, group_index=index // 2, prompt="q", label="l", tokens=[5, 6, last], response_length=2,
        response="a", reward=1.0, rollout_log_probs=[-1.0, -1.0], status=Sample.Status.COMPLETED,
        weight_versions=["2"], metadata={"raw_reward": 1.0, "source_name": "s"},
    )  # fmt: skip


def record(folder, samples):
    recording.start(Namespace(save=str(folder)), "rollout manager", primary=True)
    append_record(folder / "metrics.jsonl", {"rollout/step": 0})
    recording.rollout(0, samples, None)
    recording.stop()
    return read_run(folder)


def test_groups_come_as_recorded_with_nothing_answered(tmp_path):
    samples = [replay_rollout.unanswered(answered(index)) for index in range(4)]
    save_rollout_dump(str(tmp_path / replay_rollout.FILE), 0, samples)
    source = replay_rollout.RecordedGroups(Namespace(save=str(tmp_path)))
    first, second = source.get_samples(2)
    assert [one.index for one in first + second] == [0, 1, 2, 3]
    assert (first[0].prompt, first[0].label, first[0].metadata) == ("q", "l", {"source_name": "s"})
    assert first[0].tokens == [] and first[0].status == Sample.Status.PENDING and first[0].reward is None
    source.add_samples([second])
    assert source.get_samples(1) == [second]
    with pytest.raises(DataError, match="0 groups left, 1 are asked for"):
        source.get_samples(1)


def test_the_flags_keep_the_engines_and_choose_among_no_groups(tmp_path):
    words = "train.py --colocate --rollout-temperature 0.7 --over-sampling-batch-size 6 --partial-rollout --save x"
    config = {"command": [*words.split(), "--prompt-data", "gone"], "values": {"num_rollout": {"value": 5}}}
    replay = Replay(Run(tmp_path, config), 3, 2, tmp_path / "out", changes=["seed=3", "sglang_log_level=error"])
    (tmp_path / "iter_0000002").mkdir()
    assert " ".join(rollout_flags_of(replay)) == (
        f"--colocate --rollout-temperature 0.7 --num-rollout 5 --save {tmp_path}/out --disable-rollout-global-dataset "
        f"--load {tmp_path} --ckpt-step 2 --data-source-path tools.replay_rollout.RecordedGroups --seed 3 "
        "--sglang-log-level error"
    )


def test_flags_that_the_check_refuses_without_those_left_out_go_with_them(tmp_path):
    given = (
        "train.py --trainer-recovery memory --memory-checkpoint-interval 2 --spare-nodes 1 --use-fault-tolerance "
        "--weight-push-failure refill --use-stateless-adam --no-save-optim --lr 1"
    )
    config = {"command": given.split(), "values": {"num_rollout": {"value": 5}}}
    replay = Replay(Run(tmp_path, config), 0, FROM_START, tmp_path / "out")
    assert " ".join(flags_of(replay)).startswith("--use-stateless-adam --lr 1 --no-save-optim --num-rollout 5 ")
    assert " ".join(rollout_flags_of(replay)).startswith(
        "--use-fault-tolerance --weight-push-failure refill --use-stateless-adam --lr 1 --no-save-optim "
    )


def test_a_switch_with_an_opposite_is_changed_to_either():
    assert changed(["--yarn-truncate"], ["yarn_truncate=false"]) == ["--no-yarn-truncate"]
    assert changed(["--no-yarn-truncate"], ["yarn_truncate=true"]) == ["--yarn-truncate"]
    assert changed(["--bf16"], ["bf16=false"]) == ["--no-bf16"]


def test_a_change_is_one_value_where_the_flag_takes_one():
    words = changed(["--seed", "1"], ['train_env_vars={"A": "b c"}', "wandb_group=a b", "fp32=true"])
    assert words == ["--seed", "1", "--train-env-vars", '{"A": "b c"}', "--wandb-group", "a b", "--fp32"]
    with pytest.raises(ConfigError, match="--set fp32=maybe: 'maybe' is neither true nor false"):
        changed([], ["fp32=maybe"])


def test_without_the_checkpoint_just_before_it_the_rollout_is_refused(tmp_path):
    replay = Replay(Run(tmp_path), 3, FROM_START, tmp_path / "out")
    with pytest.raises(DataError, match=r"step 4 needs .* checkpoint after step 3, which is gone"):
        replay_rollout.replay_rollout(replay)


def test_answers_are_compared_token_by_token(tmp_path, capsys):
    samples = [answered(0), answered(1), answered(2)]
    samples[1].weight_versions = ["1", "2"]
    run = record(tmp_path / "run", samples)
    for last, code in ((7, 0), (8, 1)):
        folder = tmp_path / f"out{last}"
        record(folder, [answered(0), answered(1), answered(2, last)])
        assert replay_rollout._compare(Replay(run, 0, FROM_START, folder), samples) == code
    said = capsys.readouterr().out
    assert "3 of 3 answers have the same tokens." in said and "2 of 3 answers" in said
    assert "1 answers were drawn by weights of several versions" in said
    assert "sample 2, from token 1 of its response on" in said
