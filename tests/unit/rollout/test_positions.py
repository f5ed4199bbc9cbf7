"""A data position belongs to one data set in one order; its file is read completely, and without running code."""

import datetime
import json
import os
import pickle
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.rollout import plain_values
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, state_path
from slime.rollout.plain_values import read_state, write_state
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tests.unit.rollout.test_data_source import SavedTokenizer, make_args  # noqa: F401  a fixture

STATE = {"sample_offset": 3, "epoch_id": 1, "sample_group_index": 8, "sample_index": 16}


def saved(args, num_groups=3):
    source = RolloutDataSourceWithBuffer(args)
    source.get_samples(num_groups)
    source.save(0)
    return source


def rewrite(args, **changes):
    path = state_path(args.load, 0)
    write_state(path, read_state(path, what="It") | changes, what="It")


def replace_rows(args, rows):
    with open(args.prompt_data, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"rollout_shuffle": True}, {"rollout_shuffle": True, "rollout_seed": 7}, "--rollout-seed was 42 and is 7"),
        ({}, {"rollout_shuffle": True}, "--rollout-shuffle was off and is on"),
        ({"rollout_shuffle": True}, {}, "--rollout-shuffle was on and is off"),
    ],
)
def test_a_resume_in_another_order_is_an_error_with_the_flag_that_accepts_it(
    make_args,  # noqa: F811
    caplog,
    before,
    after,
    says,  # noqa: F811
):
    saved(make_args(**before))
    with pytest.raises(DataError) as caught:
        RolloutDataSource(make_args(**after)).load(0)
    assert says in str(caught.value) and "--accept-other-data" in str(caught.value) and "--load" in str(caught.value)
    source = RolloutDataSource(make_args(**after, accept_other_data=True))
    source.load(0)
    assert source.sample_offset == 3 and says in caplog.text


@pytest.mark.parametrize(
    "rows",
    [
        [{"input": f"other {i}"} for i in range(5)],
        [{"input": f"q{i}"} for i in (1, 0, 2, 3, 4)],
        [{"input": f"q{i}"} for i in range(6)],
        [{"input": f"q{i}"} for i in range(4)] + [{"input": [{"role": "user", "content": "q4"}]}],
    ],
)
def test_a_resume_with_other_data_is_an_error(make_args, rows):  # noqa: F811
    args = make_args()
    saved(args)
    replace_rows(args, rows)
    with pytest.raises(
        DataError, match=r"--prompt-data has other rows: (prompt changed|6, before 5), first in.*--accept-other-data"
    ):
        RolloutDataSource(args).load(0)
    accepting = make_args(accept_other_data=True)
    RolloutDataSource(accepting).load(0)


ROW = {"input": "q", "answer": 1, "metadata": {"rm_type": "math"}, "tools": [{"name": "add"}], "images": ["a.png"]}
CHANGES = {
    "label": {"answer": 2},
    "metadata": {"metadata": {"rm_type": "f1"}},
    "tools": {"tools": [{"name": "subtract"}]},
    "images": {"images": ["b.png"]},
    "prompt and label": {"input": "other <image>", "answer": 3},
}


@pytest.fixture
def rows(monkeypatch, make_args):  # noqa: F811
    """Save a position of five full rows; return their args and the rows."""
    args = make_args(label_key="answer", multimodal_keys={"image": "images"})
    full = [ROW | {"input": f"<image> {i}"} for i in range(5)]
    replace_rows(args, full)
    saved(args)
    return args, full


@pytest.mark.parametrize("names", CHANGES)
def test_a_changed_field_of_a_row_is_named_with_the_first_row_that_has_it(rows, names, caplog):
    args, full = rows
    RolloutDataSource(args).load(0)
    assert "cannot be compared" not in caplog.text
    replace_rows(args, [*full[:3], full[3] | CHANGES[names], full[4] | CHANGES[names]])
    with pytest.raises(DataError, match=rf"has other rows: {names} changed, first in row 4\..*--accept-other-data"):
        RolloutDataSource(args).load(0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"apply_chat_template_kwargs": {"enable_thinking": False}}, "--apply-chat-template-kwargs was {} and is {"),
        ({"rollout_tools": ["tests.unit.rollout.test_positions.look_up"]}, "--rollout-tools was "),
    ],
)
def test_another_way_to_render_prompts_is_other_data(make_args, change, says):  # noqa: F811
    saved(make_args())
    with pytest.raises(DataError, match=says):
        RolloutDataSource(make_args(**change)).load(0)


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: to look up.
    """
    return word


def test_a_position_of_prompts_and_labels_alone_is_compared_with_these_and_says_what_it_lacks(rows, caplog):
    caplog.set_level("INFO")
    args, full = rows
    state = read_state(state_path(args.load, 0), what="It")
    order = {name: state["order"][name] for name in ("--prompt-data", "--rollout-shuffle")}
    del state["rows"]
    write_state(state_path(args.load, 0), state | {"order": order}, what="It")
    replace_rows(args, [row | {"metadata": {}} for row in full])
    RolloutDataSource(args).load(0)
    assert "metadata, tools and images of --prompt-data cannot be compared" in caplog.text
    replace_rows(args, [row | {"answer": 7} for row in full])
    with pytest.raises(DataError, match="--prompt-data was [0-9a-f]{16} and is [0-9a-f]{16}"):
        RolloutDataSource(args).load(0)


def test_what_changes_no_order_is_accepted(make_args, tmp_path):  # noqa: F811
    saved(make_args())
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_text("".join(json.dumps({"input": f"q{i}", "other": 1}) + "\n\n" for i in range(5)))
    source = RolloutDataSource(make_args(rollout_seed=7, prompt_data=str(moved)))
    source.load(0)
    assert source.get_samples(1)[0][0].prompt == "q3"


def test_positions_beyond_the_data_or_of_no_sense_are_errors(make_args):  # noqa: F811
    args = make_args()
    saved(args)
    rewrite(args, sample_offset=6)
    with pytest.raises(DataError, match="6 prompts of an epoch were taken, and --prompt-data has 5"):
        RolloutDataSource(args).load(0)
    rewrite(args, sample_offset=5)
    RolloutDataSource(args).load(0)
    for name in STATE:
        for value in (-1, None, 1.5, "3", True, [1]):
            rewrite(args, **STATE | {"sample_offset": 3} | {name: value})
            with pytest.raises(DataError, match=f"has {name} = .*; it must be a whole number >= 0"):
                RolloutDataSource(make_args(accept_other_data=True)).load(0)


def test_positions_of_earlier_versions_and_of_the_original_are_read_with_a_line(make_args, caplog):  # noqa: F811
    caplog.set_level("INFO")
    args = make_args()
    path = state_path(args.load, 0)
    path.parent.mkdir(parents=True)
    for extra in ({}, {"num_prompts": 5}, {"num_prompts": 5, "buffer": [[Sample(prompt="b").to_dict()] * 2]}):
        torch.save(STATE | {"metadata": {"note": (1, 2)}} | extra, path)
        source = RolloutDataSourceWithBuffer(args)
        source.load(0)
        assert source.sample_offset == 3 and source.get_metadata() == {"note": (1, 2)}
        assert len(source.buffer) == len(extra.get("buffer", []))
    assert "by an earlier version: --prompt-data, --rollout-shuffle, " in caplog.text
    torch.save(STATE | {"num_prompts": 9}, path)
    with pytest.raises(DataError, match="--prompt-data had 9 prompts and has 5"):
        RolloutDataSourceWithBuffer(args).load(0)


# ------------------------------------------------------------------------------------------ the files


class Payload:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_a_flip_of_any_byte_and_any_cut_of_a_position_is_an_error(make_args):  # noqa: F811
    args = make_args()
    saved(args)
    check_flips_and_cuts(state_path(args.save, 0))


def check_flips_and_cuts(path):
    whole = path.read_bytes()
    expected = repr(read_state(path, what="It"))
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :])
        with pytest.raises(DataError) as caught:
            read_state(path, what="It")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    for size in range(0, len(whole), 13):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cut|damaged"):
            read_state(path, what="It")
    path.write_bytes(whole)
    assert repr(read_state(path, what="It")) == expected
    head, body = whole.split(b"\n")
    assert (
        json.loads(head)["format"] == "slime state" and json.loads(body).keys() == read_state(path, what="It").keys()
    )


@pytest.mark.parametrize(
    "write", [lambda value, path: torch.save(value, path), lambda v, p: p.write_bytes(pickle.dumps(v))]
)
def test_a_position_from_a_stranger_runs_no_code(tmp_path, make_args, write):  # noqa: F811
    args = make_args()
    source = saved(args)
    write(STATE | {"x": Payload(tmp_path / "marker")}, state_path(args.save, 0))
    with pytest.raises(DataError, match="posix.mkdir|os.mkdir"):
        source.load(0)
    assert not (tmp_path / "marker").exists()


PLAIN = {
    "numbers": [1, -(2**70), 0.1, float("inf"), True, None],
    "text": "half a pair \ud800, \0",
    "tuple": (1, (2, [3])),
    "set": {1, "a"},
    "bytes": b"\0\xff",
    "no bytes": b"",
    "keys": {1: "a", (2, 3): "b", "$ref": "c"},
    "dollar": {"$tuple": [1]},
    "tensor": torch.arange(6).view(2, 3).T,
    "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "array": np.arange(6, dtype=np.uint16)[::2],
    "scalar": np.float32(2.5),
    "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "path": Path("/a/b"),
    "decimal": Decimal("0.10"),
    "complex": 1 + 2j,
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_comes_back_as_it_was_without_a_pickle(name):
    value = PLAIN[name]
    data = plain_values.dumps(value)
    assert not data.startswith((b"\x80", b"PK"))
    back = plain_values.loads(data, where="it")
    assert type(back) is type(value) or isinstance(value, Path)
    if hasattr(value, "dtype"):
        assert back.dtype == value.dtype and back.shape == value.shape and (back == value).all()
    else:
        assert back == value and repr(back) == repr(value)


def test_objects_are_left_out_alone_and_named_with_a_remedy(tmp_path, caplog):
    holds_itself = {"note": 1}
    holds_itself["self"] = holds_itself
    value = {
        "c": [[{"x": Sample, "y": (1, {2})}]],
        "d": {1: b"z"},
        "r": holds_itself,
        "n": [10**5000][0],
        "s": [object()],
    }
    write_state(tmp_path / "state.pt", value, what="The state")
    found = read_state(tmp_path / "state.pt", what="The state")
    assert found == {"c": [[{"y": (1, {2})}]], "d": {1: b"z"}, "r": {"note": 1}}
    [line] = [record.getMessage() for record in caplog.records]
    for place in ("c['x'] (a type)", "r['self'] (in itself)", "n (an integer of 16610 bits)", "s (a object)"):
        assert place in line
    assert line.endswith(plain_values.REMEDY)
    write_state(tmp_path / "state.pt", value, what="The state")
    assert len(caplog.records) == 1
