"""Comparing two runs: the first step that differs in each quantity, and the page."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest
import torch

from slime.ext.record.run_reader import read_run
from slime.observability.metrics_file import append_record
from slime.utils.types import Sample
from tests.ext.record import recording
from tools import diff

CHANGES = ("data order", "sampled tokens", "reward", "packing", "engine's log-probs", "trainer's log-probs",
           "advantages", "train/loss", "train/grad_norm", "weights", "train/critic-value_loss",
           "critic's weights")  # fmt: skip
"""What is changed in rollout 0, 1, 2, ..."""


def write_run(folder, changed=(), **settings):
    """Write two optimizer steps per rollout; ``changed`` of :data:`CHANGES` differs from its rollout on."""
    recording.start(Namespace(save=str(folder), lr=0.1, **settings), "driver", primary=True)
    for rollout_id in range(len(CHANGES)):
        other = {name for place, name in enumerate(CHANGES) if name in changed and place <= rollout_id}
        one = Sample(
            index=0, group_index=0, prompt="</script>q" + "?" * ("data order" in other), response="a",
            reward=1.0 + ("reward" in other), tokens=[1, 2 + ("sampled tokens" in other)], response_length=1,
            rollout_log_probs=[-0.5 - ("engine's log-probs" in other)], status=Sample.Status.COMPLETED,
        )  # fmt: skip
        recording.rollout(rollout_id, [one], [0.0])
        columns = {
            "trainer_log_probs": [torch.tensor([-0.5 - ("trainer's log-probs" in other)])],
            "advantages": [torch.tensor([float("advantages" in other)])],
        }
        recording.trained(rollout_id, 0, [0], columns, [int("packing" in other)])
        append_record(folder / "metrics.jsonl", {"rollout/raw_reward": 0.5, "rollout/step": rollout_id})
        for step in (2 * rollout_id, 2 * rollout_id + 1):
            values = {
                "train/loss": 0.25 + ("train/loss" in other),
                "train/grad_norm": 1 + ("train/grad_norm" in other),
                "train/critic-value_loss": 1 + ("train/critic-value_loss" in other),
            }
            append_record(folder / "metrics.jsonl", values | {"train/step": step})
        for role, what in (("actor", "weights"), ("critic", "critic's weights")):
            recording.event("weights", role=role, rollout=rollout_id, digest="b" if what in other else "a")
    recording.stop()
    return folder


def test_each_kind_of_difference_is_found_at_its_step_in_the_order_in_which_it_follows(tmp_path):
    same, twin, other = (write_run(tmp_path / name, c) for name, c in (("a", ()), ("b", ()), ("c", CHANGES)))
    runs = [read_run(folder) for folder in (same, twin, other)]
    assert list(diff.first_differences(runs[0], runs[1])) == []
    assert [(what, step) for what, step, _ in diff.first_differences(runs[0], runs[2])] == [
        (name, str(rollout_id + 1)) for rollout_id, name in enumerate(CHANGES)
    ]


@pytest.mark.parametrize("changed", CHANGES)
def test_what_alone_differs_is_named_alone(tmp_path, changed):
    first, second = (read_run(write_run(tmp_path / name, c)) for name, c in (("a", ()), ("b", (changed,))))
    ((what, step, size),) = diff.first_differences(first, second)
    assert (what, step) == (changed, str(CHANGES.index(changed) + 1)) and size


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([[1.0, float("nan")], [2.0]], [[1.0, float("nan")], [2.0]], None),
        ([[float("nan"), 2.0]], [[float("nan"), 2.5]], "0.5 (1 of 2 values)"),
        ([[2.0, 3.0]], [[2.0, float("nan")]], "nan (1 of 2 values)"),
        ([[1], [2, 3]], [[1, 2], [3]], "0 (0 of 3 values)"),
    ],
)
def test_a_step_that_is_broken_in_the_same_way_is_the_same(a, b, said):
    assert diff._difference(a, b) == said


def test_the_page_has_tables_and_both_curves_and_no_script(tmp_path, capsys):
    first, second = write_run(tmp_path / "<script>x"), write_run(tmp_path / "b", ("train/loss",))
    with pytest.raises(SystemExit) as left:
        diff.main([str(first), str(second), "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert left.value.code == 1 and "page.html" in capsys.readouterr().out
    assert "<script" not in page and not re.search(r"""(?:src|href)=""", page) and "default-src 'none'" in page
    assert "<td>train/loss</td><td>8</td>" in page and "Nothing differs." in page
    assert "train/loss: B - A is at most 1" in page and "rollout/raw_reward: B - A is at most 0" in page
    assert [page.count(f'<polyline class="{name}"') for name in "abd"] == [3, 3, 3]
    assert json.loads((first / "config.json").read_text())["values"]["lr"]["value"] == 0.1
