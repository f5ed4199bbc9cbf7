"""Plans that one engine proved and the next one of its kind takes from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.ext.fast_push.model_load import ModelLoad
from slime.ext.fast_push.stored_plans import StoredPlans, sample
from tests.ext.fast_push.toy_models import Fused, Joined, parameter
from tests.loaded_model.buckets import cut_buckets, fill, whole_buckets

NUM_ROWS = 200
ROWS = {f"rows.{index}": torch.full((4,), float(index + 1)) for index in range(NUM_ROWS)}


class Rows(torch.nn.Module):
    """Many tensors of one kind; counts those that its loader is given."""

    def __init__(self, num: int = NUM_ROWS) -> None:
        super().__init__()
        self.rows = parameter(num, 4)
        self.seen: list[str] = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.seen.append(name)
            self.rows.data[int(name.partition(".")[2])].copy_(tensor)


def push(model, tensors, plans, layout=whole_buckets):
    load, manifest = vars(model).setdefault("_load", ModelLoad(model, plans)), layout(tensors, 2)
    load.begin(manifest)
    for index, flat in enumerate(fill(manifest, tensors)):
        load.load(index, flat)
    load.finish()
    return load.problems


@pytest.fixture
def plans(tmp_path):
    return StoredPlans(tmp_path / "plans", ["rank 0", "sglang 1"])


def assert_holds(model, tensors):
    other = type(model)()
    other.load_weights(list(tensors.items()))
    for name, value in other.named_parameters():
        assert torch.equal(model.get_parameter(name), value), name


def test_the_next_engine_has_its_own_loader_judge_a_sample_only(plans):
    assert push(Rows(), ROWS, plans) == []
    model = Rows()
    for factor in (1, 2):
        tensors = {name: tensor * factor for name, tensor in ROWS.items()}
        assert push(model, tensors, plans) == []
        assert_holds(model, tensors)
    assert set(model.seen) == sample(ROWS) and len(model.seen) == len(sample(ROWS)) == 5


@pytest.mark.parametrize("layout", [whole_buckets, cut_buckets])
@pytest.mark.parametrize(("make", "tensors"), [(Fused, Fused.tensors()), (Joined, {
    "q_a": torch.rand(2, 4), "kv_a": torch.rand(3, 4)})])  # fmt: skip
def test_paddings_partners_and_slices_come_back(plans, make, tensors, layout):
    assert push(make(), tensors, plans, layout) == []
    model = make()
    for _ in range(2):
        assert push(model, tensors, plans, layout) == []
        assert_holds(model, tensors)


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_wrong_plan_is_refused_by_the_push_and_not_found_again(plans, monkeypatch, is_removed):
    """By this engine; where the file cannot be removed, the next one finds out again."""
    if not is_removed:
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: path.rmdir())  # "Not a directory"
    right = Rows()
    push(right, ROWS, plans)
    trace = right._load.plan.trace
    trace.writes[0], trace.writes[-1] = (
        type(write)(name, write.target, write.copy, write.source_dtype)
        for write, name in ((trace.writes[0], trace.writes[-1].name), (trace.writes[-1], trace.writes[0].name))
    )
    plans.keep(right, right._load.plan.manifest, trace)
    model = Rows()
    assert "the load plan on disk was wrong" in push(model, ROWS, plans)[0]
    assert push(model, ROWS, plans) == []
    assert_holds(model, ROWS)


@pytest.mark.parametrize("damaged", [b"sows", b"\xff\xfe"])
def test_a_damaged_file_is_as_none(plans, tmp_path, damaged):
    push(Rows(), ROWS, plans)
    (path,) = (tmp_path / "plans").iterdir()
    path.write_bytes(path.read_bytes().replace(b"rows", damaged, 1))
    model = Rows()
    assert push(model, ROWS, plans) == []
    assert len(model.seen) == 2 * NUM_ROWS, "traced, and loaded"


def test_another_layout_or_version_has_a_plan_of_its_own(plans, tmp_path):
    push(Rows(), ROWS, plans)
    manifest = whole_buckets(ROWS, 2)
    assert plans.find(Rows(), manifest) is not None
    assert plans.find(Rows(NUM_ROWS + 1), manifest) is None
    assert plans.find(Rows(), whole_buckets(ROWS | {"more": torch.zeros(1)})) is None
    assert StoredPlans(tmp_path / "plans", ["rank 0", "sglang 2"]).find(Rows(), manifest) is None
