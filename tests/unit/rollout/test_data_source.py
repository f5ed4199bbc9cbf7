"""The data source: order of groups, the buffer, and restarts that change nothing."""

import json

import pytest

from slime.rollout import data_source as data_source_module
from slime.rollout import plain_values
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, state_path
from slime.utils.errors import ConfigError, DataError, HookError
from slime.utils.files import write_atomically
from slime.utils.types import Sample
from tests.flag_values import args_with


class SavedTokenizer:
    """A tokenizer that is only saved, never used."""

    def save_pretrained(self, folder):
        folder.mkdir(parents=True)


@pytest.fixture
def make_args(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"input": f"q{i}"}) + "\n" for i in range(5)))
    monkeypatch.setattr(data_source_module, "load_tokenizer", lambda *_, **__: SavedTokenizer())
    monkeypatch.setattr(data_source_module, "load_processor", lambda *_, **__: None)

    def make(**values):
        defaults = {
            "prompt_data": str(path),
            "hf_checkpoint": "unused",
            "n_samples_per_prompt": 2,
            "save": str(tmp_path / "run"),
            "load": str(tmp_path / "run"),
        }
        return args_with(**defaults | values)

    return make


def names(groups):
    return [group[0].prompt for group in groups]


def facts(groups):
    return [(s.prompt, s.group_index, s.index, s.response, s.tokens, s.status) for group in groups for s in group]


def test_groups_are_copies_with_numbers_that_rise_through_epochs(make_args):
    source = RolloutDataSource(make_args())
    first, second = source.get_samples(2)
    assert [(s.prompt, s.group_index, s.index) for s in first + second] == [
        ("q0", 0, 0),
        ("q0", 0, 1),
        ("q1", 1, 2),
        ("q1", 1, 3),
    ]
    first[0].metadata["seen"] = True
    assert first[1].metadata == {}
    assert names(source.get_samples(4)) == ["q2", "q3", "q4", "q0"]
    assert (source.epoch_id, source.sample_offset) == (1, 1)
    [last] = source.get_samples(1)
    assert (last[1].group_index, last[1].index, last[0].metadata) == (6, 13, {})
    assert len(source) == 5


def test_samples_of_a_group_share_pictures_in_lists_of_their_own(make_args):
    source = RolloutDataSource(make_args())
    picture = object()
    source.dataset.samples[0].multimodal_inputs = {"images": [picture], "videos": None}
    [(first, second)] = source.get_samples(1)
    first.multimodal_inputs["images"].append("another")
    assert first.multimodal_inputs["images"][0] is picture
    assert second.multimodal_inputs == {"images": [picture], "videos": None}


def test_every_epoch_is_a_permutation_and_epochs_differ(make_args):
    source = RolloutDataSource(make_args(rollout_shuffle=True))
    epochs = [names(source.get_samples(5)) for _ in range(3)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    steps = RolloutDataSource(make_args(rollout_shuffle=True))
    taken = [name for size in (3, 1, 4, 2, 5) for name in names(steps.get_samples(size))]
    assert taken == [name for epoch in epochs for name in epoch]


def test_without_a_prompt_file_groups_are_empty_samples(make_args):
    source = RolloutDataSourceWithBuffer(make_args(rollout_global_dataset=False))
    [group] = source.get_samples(1)
    assert [(s.prompt, s.index) for s in group] == [("", 0), ("", 1)]
    assert len(source) == 0


def test_returned_groups_come_first_and_in_order(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    a, b, c = source.get_samples(3)
    source.add_samples([b])
    source.add_samples([a, c])
    assert source.get_buffer_length() == 3
    assert names(source.get_samples(2)) == ["q1", "q0"]
    assert names(source.get_samples(3)) == ["q2", "q3", "q4"]
    assert source.get_buffer_length() == 0


def test_only_whole_groups_are_taken_back(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    with pytest.raises(DataError, match="A group of 1 samples.*--n-samples-per-prompt is 2"):
        source.add_samples([source.get_samples(1)[0][:1]])
    with pytest.raises(ConfigError, match="RolloutDataSourceWithBuffer"):
        RolloutDataSource(make_args()).add_samples([])


def last_first(args, rollout_id, buffer, num_samples):
    assert rollout_id is None
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def keeps_what_it_returns(args, rollout_id, buffer, num_samples):
    return buffer[:1]


def returns_everything(args, rollout_id, buffer, num_samples):
    taken = list(buffer)
    buffer.clear()
    return taken


def with_filter(make_args, monkeypatch, buffer_filter):
    monkeypatch.setattr(data_source_module, "load_function", lambda path: buffer_filter)
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="my.filter"))
    source.add_samples(source.get_samples(3))
    return source


def test_a_buffer_filter_picks_the_groups(make_args, monkeypatch):
    source = with_filter(make_args, monkeypatch, last_first)
    assert names(source.get_samples(2)) == ["q2", "q1"]
    assert names(source.get_samples(2)) == ["q0", "q3"]


def test_a_buffer_filter_that_would_train_a_group_twice_is_stopped(make_args, monkeypatch):
    with pytest.raises(HookError, match="my.filter returned a group and left it in the buffer"):
        with_filter(make_args, monkeypatch, keeps_what_it_returns).get_samples(1)
    with pytest.raises(HookError, match="my.filter returned 3 groups; .* at most 2"):
        with_filter(make_args, monkeypatch, returns_everything).get_samples(2)


def rollout(source):
    """A rollout of two groups that takes three: the third comes back with part of its response."""
    groups = source.get_samples(3)
    for sample in groups[2]:
        sample.append_response_tokens(tokens=[sample.index], log_probs=[-1.0], text="~")
        sample.status = Sample.Status.ABORTED
    source.add_samples(groups[2:])
    return facts(groups[:2])


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4])
def test_a_restart_gives_the_groups_of_the_uninterrupted_run(make_args, killed_after):
    whole = RolloutDataSourceWithBuffer(make_args(rollout_shuffle=True))
    expected = [rollout(whole) for _ in range(8)]

    source = RolloutDataSourceWithBuffer(make_args(rollout_shuffle=True))
    got = []
    for rollout_id in range(killed_after + 1):
        got.append(rollout(source))
        source.save(rollout_id)
    rollout(source)  # not saved, so the kill discards it

    resumed = RolloutDataSourceWithBuffer(make_args(rollout_shuffle=True, start_rollout_id=killed_after + 1))
    resumed.load()
    got += [rollout(resumed) for _ in range(8 - len(got))]
    assert got == expected
    assert facts(resumed.buffer) == facts(whole.buffer)


def test_a_snapshot_is_not_changed_by_what_follows_and_can_be_saved_later(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    source.add_samples(source.get_samples(2))
    source.update_metadata({"note": [1]})
    snapshot = source.state_dict()
    [group] = source.get_samples(1)
    group[0].tokens.append(99)
    source.get_metadata()["note"].append(2)
    source.save(0, state=snapshot)

    resumed = RolloutDataSourceWithBuffer(make_args())
    resumed.load(0)
    assert names(resumed.buffer) == ["q0", "q1"]
    assert resumed.buffer[0][0].tokens == []
    assert resumed.get_metadata() == {"note": [1]}
    assert resumed.sample_offset == 2


def test_a_resume_without_its_file_is_an_error_that_names_it(make_args):
    args = make_args(start_rollout_id=8)
    with pytest.raises(
        DataError, match=r"continues at rollout 8, .*rollout/global_dataset_state_dict_7.pt is missing"
    ):
        RolloutDataSourceWithBuffer(args).load()


def test_a_save_that_fails_leaves_the_old_file(make_args, monkeypatch):
    source = RolloutDataSourceWithBuffer(make_args())
    source.save(0)
    source.get_samples(3)

    def fails_halfway(path, write, **options):
        def half(file):
            file.write(b"half")
            raise OSError("disk full")

        write_atomically(path, half, **options)

    monkeypatch.setattr(plain_values, "write_atomically", fails_halfway)
    with pytest.raises(DataError, match="disk full.*--save"):
        source.save(0)
    monkeypatch.undo()
    path = state_path(source.args.save, 0)
    assert not path.with_name(path.name + ".tmp").exists()
    assert plain_values.read_state(path, what="It")["sample_offset"] == 0


def test_a_state_without_a_buffer_and_of_other_data_loads_with_a_warning(make_args, caplog):
    source = RolloutDataSourceWithBuffer(make_args(accept_other_data=True))
    source.add_samples(source.get_samples(1))
    old = {"sample_offset": 7, "epoch_id": 1, "sample_group_index": 9, "sample_index": 18, "metadata": {}}
    source.load_state_dict(old | {"num_prompts": 8})
    assert source.buffer == []
    assert "--prompt-data had 8 prompts and has 5" in caplog.text
    assert names(source.get_samples(1)) == ["q0"]
    assert source.epoch_id == 2


def test_a_buffer_of_groups_of_another_size_is_refused_when_it_is_loaded(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    source.add_samples(source.get_samples(1))
    source.save(0)
    with pytest.raises(DataError, match=r"--load .* groups of 2 samples, and --n-samples-per-prompt is 3\. Give 2"):
        RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=3, load=source.args.save)).load(0)
    source.get_samples(1)
    source.save(1)
    again = RolloutDataSourceWithBuffer(make_args(n_samples_per_prompt=3, load=source.args.save))
    again.load(1)
    assert [len(group) for group in again.get_samples(1)] == [3]
