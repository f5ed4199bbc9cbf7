"""What a process takes over, and what it must not: other flags, other data, other runs, a fresh start."""

from __future__ import annotations

import asyncio
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.compose import parts
from slime.ext.ledger.frames import segment_files
from slime.ext.ledger.ledger import TRACKER, Ledger
from slime.flags.reward import RewardConfig
from slime.ray.save_lock import lock_folders
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub.policy import grade_by_policy
from slime.rollout.run_state import CheckpointPosition
from slime.utils.errors import ConfigError
from slime.utils.types import Sample
from tests.unit.rollout.fake_cluster import make_args
from tools.ledger import main as tool


class NumberedSource(RolloutDataSourceWithBuffer):
    """Groups whose prompts are numbers, without a file."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.prompt = getattr(args, "prompt_word", "prompt")

    def _next_rows(self, num_rows: int) -> list[Sample]:
        first = self.sample_group_index
        return [Sample(prompt=f"{self.prompt} {first + k}") for k in range(num_rows)]


class Process:
    """A job's control plane; ``generated`` lists the groups requested from an engine."""

    def __init__(self, folder: Path, start: int = 0, **flags: Any) -> None:
        self.args = make_args(
            0,
            save=str(folder),
            **{"load": str(folder), "prompt_data": None, "partial_rollout": True, "start_rollout_id": start} | flags,
        )
        self.source = NumberedSource(self.args)
        self.ledger: Any = Ledger(self.args, self.source)
        if start:
            self.source.load(start - 1)
        self.ledger.start(start)
        self.position = CheckpointPosition(self.source, [self.ledger])
        self.generated: list[int] = []

    def rollout(self, rollout_id: int, *, stop_after: int | None = None) -> list[int]:
        """Groups of the train data, all answered; the last of every three returns unfinished."""

        def generate() -> RolloutFnTrainOutput:
            groups = self.source.get_samples(3)
            for number, group in enumerate(groups):
                if number == stop_after:
                    raise KeyboardInterrupt
                for sample in group:
                    self.answer(sample, "abort" if number == 2 else "stop")
                if number < 2:
                    self.ledger.journal.record_finished(group)
            self.source.add_samples(groups[2:])
            return RolloutFnTrainOutput(samples=groups[:2], metrics={"rollout/kept": 2})

        self.position.begin(rollout_id)
        output = self.ledger.make_samples(rollout_id, generate)
        assert output.metrics == {"rollout/kept": 2}
        return [group[0].group_index for group in output.samples]

    def answer(self, sample: Sample, reason: str) -> None:
        if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            return
        self.generated.append(sample.group_index)
        meta = {"finish_reason": {"type": reason}, "weight_version": "1"}
        sample.append_response_tokens(None, tokens=[7, 8], log_probs=[-0.5, -0.25], meta_info=meta, text="ab")
        self.ledger.journal.record_response(sample, sample)

    def save(self, rollout_id: int) -> None:
        self.position.save(rollout_id)
        (Path(self.args.save) / TRACKER).write_text(str(rollout_id))
        self.ledger.published(rollout_id)

    def die(self) -> None:
        self.ledger.journal.writer.flush()


def died_in_rollout_1(folder: Path, **flags: Any) -> None:
    process = Process(folder, **flags)
    assert process.rollout(0) == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        process.rollout(1, stop_after=2)
    process.die()


def test_a_rollout_is_taken_over_whole_and_the_next_one_where_it_stopped(tmp_path):
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path)
    assert process.rollout(0) == [0, 1] and process.generated == []
    assert process.rollout(1) == [2, 3]
    assert process.generated == [4, 4], "group 2 was continued and 3 answered before the crash"


def test_a_response_that_grew_in_place_after_its_issue_is_recovered_whole(tmp_path):
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path)
    process.ledger.make_samples(0, lambda: pytest.fail("rollout 0 was complete"))
    [continued] = process.source.get_samples(1)
    assert continued[0].group_index == 2
    for sample in continued:
        assert sample.tokens == [7, 8, 7, 8] and sample.loss_mask == [1, 1, 1, 1]
        assert sample.rollout_log_probs == [-0.5, -0.25] * 2 and sample.response == "abab"


def test_a_crash_after_a_crash_loses_nothing_either(tmp_path):
    died_in_rollout_1(tmp_path)
    second = Process(tmp_path)
    assert second.rollout(0) == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        second.rollout(1, stop_after=1)
    second.die()
    third = Process(tmp_path)
    assert third.rollout(0) == [0, 1] and third.rollout(1) == [2, 3]
    assert third.generated == [4, 4]
    third.save(1)
    third.die()
    fourth = Process(tmp_path, start=2)
    assert fourth.rollout(2) == [4, 5] and set(fourth.generated) == {4, 5, 6}


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout_temperature": 0.7},
        {"custom_rm_path": "x.y"},
        {"rollout_seed": 1},
        {"rollout_max_context_len": 9},
        {"apply_chat_template_kwargs": {"enable_thinking": False}},
        {"rollout_environment": "x.y"},
        {"rollout_sample_hook_path": ["x.y"]},
        {"use_rollout_routing_replay": True},
    ],
)
def test_samples_of_other_flags_are_not_used_and_the_log_says_which(tmp_path, caplog, changed):
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path, **changed)
    assert process.rollout(0) == [0, 1]
    assert set(process.generated) == {0, 1, 2}
    assert next(iter(changed)) in caplog.text


def test_samples_of_rows_that_have_changed_since_are_not_used(tmp_path, caplog, monkeypatch):
    died_in_rollout_1(tmp_path)
    monkeypatch.setattr(NumberedSource, "content_digest", lambda source: "with another grader in its metadata")
    process = Process(tmp_path)
    assert process.rollout(0) == [0, 1]
    assert set(process.generated) == {0, 1, 2} and "these flags differ: content of prompt_data" in caplog.text


def test_with_other_batch_flags_groups_are_used_and_rollouts_are_not(tmp_path):
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path, rollout_batch_size=7)
    assert process.rollout(0) == [0, 1]
    assert process.generated == [], "the answers are there; the rollout function puts them together again"
    assert process.rollout(1) == [2, 3]
    assert process.generated == [4, 4]


def test_samples_of_other_prompts_are_not_used(tmp_path, caplog):
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path, prompt_word="question")
    process.rollout(0)
    assert set(process.generated) == {0, 1, 2}
    assert "generated again" in caplog.text


def test_a_start_from_nothing_after_a_checkpoint_is_a_new_run(tmp_path):
    process = Process(tmp_path)
    process.rollout(0)
    process.save(0)
    process.rollout(1)
    process.die()
    again = Process(tmp_path, start=0)
    again.rollout(0)
    assert set(again.generated) == {0, 1, 2}


def test_a_checkpoint_of_another_run_brings_nothing_along(tmp_path):
    process = Process(tmp_path / "a")
    process.rollout(0)
    process.save(0)
    process.rollout(1)
    process.die()
    args = make_args(
        0,
        save=str(tmp_path / "b"),
        load=str(tmp_path / "a"),
        prompt_data=None,
        partial_rollout=True,
        start_rollout_id=1,
    )
    ledger = Ledger(args, NumberedSource(args))
    ledger.start(1)
    assert ledger._recovery is None


def test_a_save_made_while_the_next_rollout_runs_keeps_what_that_one_recovered(tmp_path):
    """train_async.py: rollout 1 has begun when rollout 0 is saved."""
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path)
    process.rollout(0)
    with pytest.raises(KeyboardInterrupt):
        process.rollout(1, stop_after=1)
    process.save(0)
    process.die()
    again = Process(tmp_path, start=1)
    assert again.rollout(1) == [2, 3]
    assert again.generated == [4, 4]


def test_a_background_save_that_is_not_on_disk_yet_drops_nothing(tmp_path):
    process = Process(tmp_path)
    process.rollout(0)
    process.ledger.save(0)
    process.ledger.published(0)
    assert (tmp_path / "ledger/segment-00000000.led").exists()
    (tmp_path / TRACKER).write_text("0")
    process.ledger.published(1)
    assert not (tmp_path / "ledger/segment-00000000.led").exists()


def test_a_damaged_sample_is_generated_again(tmp_path, caplog):
    died_in_rollout_1(tmp_path)
    for path in segment_files(tmp_path / "ledger"):
        data = path.read_bytes()
        path.write_bytes(data.replace(b"\x07\0\0\0\x08\0\0\0", b"\x09\0\0\0\x08\0\0\0"))
    process = Process(tmp_path)
    assert process.rollout(0) == [0, 1]
    assert set(process.generated) == {0, 1, 2}
    assert "damaged" in caplog.text


class Flags(Namespace):
    """Flags of a job; flags not given are None."""

    def __getattr__(self, name: str) -> None:
        return None


def test_a_ledger_that_another_job_writes_is_refused_wherever_the_flag_is(tmp_path):
    locks = lock_folders(parts(Flags(save=f"{tmp_path}/a", no_rollout_ledger=False)).outputs, {})
    with pytest.raises(ConfigError, match="^--rollout-ledger-dir .*belongs to a running job"):
        other = Flags(save=f"{tmp_path}/b", rollout_ledger_dir=f"{tmp_path}/a/ledger", no_rollout_ledger=False)
        lock_folders(parts(other).outputs, {})
    for lock in locks:
        lock.release()


# ------------------------------------------------------------------------------------------ the reader tool


def test_the_tool_tells_the_story_of_a_group_and_the_totals(tmp_path, capsys):
    died_in_rollout_1(tmp_path)
    process = Process(tmp_path)
    process.rollout(0)
    process.ledger.trained(0)
    process.rollout(1)
    process.ledger.close()
    for question in (["--group", "2"], ["--sample", "4"], ["--prompt", "prompt 2"]):
        assert tool([str(tmp_path), *question]) == 0
        story = capsys.readouterr().out
        order = ["group 2, samples 4 to 5: 'prompt 2'", "process 1", "2 tokens aborted", "back in the buffer"]
        order += ["process 2", "issued again, with what an earlier process had generated", "handed to training"]
        positions = [story.find(words) for words in order]
        assert positions == sorted(positions) and positions[0] >= 0, story
    assert tool([str(tmp_path)]) == 0
    totals = " ".join(capsys.readouterr().out.split())
    assert "groups issued 5" in totals and "groups trained 2" in totals
    assert tool([str(tmp_path), "--check"]) == 0
    assert tool([str(tmp_path), "--group", "99"]) == 1


def test_the_check_finds_a_group_that_is_trained_twice(tmp_path, capsys):
    process = Process(tmp_path)
    process.rollout(0)
    process.ledger.source_recorder.put_ahead([[Sample(group_index=0, index=k, prompt="prompt 0") for k in range(2)]])
    process.rollout(1)
    process.ledger.close()
    assert tool([str(tmp_path), "--check"]) == 1
    assert "BROKEN  group 0 is in flight in rollout 1 after it was handed over" in capsys.readouterr().out


def in_flight_after_a_checkpoint(folder: Path) -> None:
    """A checkpoint saved while groups 3 and 4 are issued and unanswered."""
    process = Process(folder)
    process.rollout(0)
    process.source.get_samples(3)  # 2, which waited in the buffer, and 3 and 4
    process.save(0)
    process.die()


def groups_of(process: Process, num_groups: int) -> list[int]:
    process.ledger.make_samples(1, lambda: RolloutFnTrainOutput([]))
    return [group[0].group_index for group in process.source.get_samples(num_groups)]


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_run_goes_on_in_another_folder_with_what_was_in_flight(tmp_path, move):
    in_flight_after_a_checkpoint(tmp_path / "a")
    move(tmp_path / "a", tmp_path / "b")
    assert sorted(groups_of(Process(tmp_path / "b", start=1), 4)) == [2, 3, 4, 5]


def test_a_moved_run_uses_what_its_ledger_recorded_after_the_checkpoint(tmp_path):
    process = Process(tmp_path / "a")
    process.rollout(0)
    process.save(0)
    process.rollout(1)
    process.die()
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = Process(tmp_path / "b", start=1)
    assert moved.rollout(1) == [2, 3] and moved.generated == []


def test_groups_in_flight_are_given_again_when_the_ledger_is_another_or_gone(tmp_path, caplog):
    in_flight_after_a_checkpoint(tmp_path / "a")
    Process(tmp_path / "b").rollout(0)
    for folder in ("b", "new"):
        process = Process(tmp_path / folder, start=1, load=str(tmp_path / "a"))
        assert sorted(groups_of(process, 4)) == [2, 3, 4, 5]
    assert "its 3 groups in flight are generated again" in caplog.text


def could_not_grade(process: Process, group: list[Sample], **fields: Any) -> None:
    for sample in group:
        process.answer(sample, "stop")
        sample.reward = 0.0
        sample.metadata = {"reward_error": "KeyError: 'x'"} | fields.get("metadata", {})
        sample.status = fields.get("status", sample.status)
    process.ledger.journal.record_finished(group)


@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        ({}, None),
        ({"metadata": {"kept": 1}}, None),
        ({"metadata": {"environment_reward": 0.0}}, 0.0),
        ({"status": Sample.Status.FAILED}, 0.0),
    ],
)
def test_a_reward_that_the_grader_could_not_give_is_taken_away_and_no_other(tmp_path, fields, reward):
    process = Process(tmp_path)
    process.ledger.journal.record_begin(0)
    [group] = process.source.get_samples(1)
    could_not_grade(process, group, **fields)
    process.die()
    process = Process(tmp_path)
    process.ledger.journal.record_begin(0)
    [group] = process.source.get_samples(1)
    error = {} if reward is None else {"reward_error": "KeyError: 'x'"}
    for sample in group:
        assert (sample.reward, sample.metadata) == (reward, error | fields.get("metadata", {}))
        assert sample.status is fields.get("status", Sample.Status.COMPLETED) and sample.tokens == [7, 8]


def test_what_was_not_graded_is_asked_for_again_after_a_restart(tmp_path):
    async def fails() -> list[float]:
        raise KeyError("x")

    process = Process(tmp_path)
    process.ledger.journal.record_begin(0)
    [group] = process.source.get_samples(1)
    for sample in group:
        process.answer(sample, "stop")
        [sample.reward] = asyncio.run(grade_by_policy(RewardConfig.of(Namespace()), [sample], fails, grader="fails"))
    assert not any(sample.is_graded for sample in group)
    process.ledger.journal.record_finished(group)
    process.die()
    process = Process(tmp_path)
    process.ledger.journal.record_begin(0)
    [group] = process.source.get_samples(1)
    for sample in group:
        assert (sample.reward, sample.metadata, sample.remove_sample) == (None, {}, False)
        assert sample.status is Sample.Status.COMPLETED and sample.tokens == [7, 8]


def test_a_reward_that_the_grader_could_not_give_is_taken_away_after_a_checkpoint_too(tmp_path):
    process = Process(tmp_path)
    process.rollout(0)
    could_not_grade(process, process.source.get_samples(3)[1])
    process.die()
    process = Process(tmp_path)
    process.rollout(0)
    process.ledger.make_samples(1, lambda: RolloutFnTrainOutput([]))
    assert [group[0].reward for group in process.source.get_samples(3)] == [None] * 3
    process.save(1)  # these groups are not graded yet
    process.die()
    process = Process(tmp_path, start=2)
    process.ledger.make_samples(2, lambda: RolloutFnTrainOutput([]))
    groups = {group[0].group_index: group for group in process.source.get_samples(3)}
    assert [(s.tokens, s.reward, s.metadata) for s in groups[3]] == [([7, 8], None, {})] * 2
