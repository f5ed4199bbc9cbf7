"""The log entry of a weight version, and the rewards of a student."""

from __future__ import annotations

import json
from argparse import Namespace

from examples.delta_weight_sync.post_write import announce
from examples.on_policy_distillation.rewards import zeros
from slime.utils.types import Sample


def test_each_version_is_noted_with_its_files_and_bytes(tmp_path):
    for version, sizes in (("weight_v000001", [3, 4]), ("weight_v000002", [5])):
        folder = tmp_path / "versions" / version
        folder.mkdir(parents=True)
        for number, size in enumerate(sizes):
            (folder / f"{number}.safetensors").write_bytes(b"x" * size)
        announce(Namespace(save=str(tmp_path / "run")), str(folder), [object(), object()])
    lines = [json.loads(line) for line in (tmp_path / "run/versions.jsonl").read_text().splitlines()]
    assert lines == [
        {"version": "weight_v000001", "files": 2, "bytes": 7, "engines": 2},
        {"version": "weight_v000002", "files": 1, "bytes": 5, "engines": 2},
    ]
    announce(Namespace(save=None, delta_log=str(tmp_path / "other")), str(tmp_path / "versions/weight_v000001"), [])
    assert json.loads((tmp_path / "other").read_text())["bytes"] == 7


def test_the_graders_verdict_is_logged_and_not_trained():
    samples = [Sample(reward={"score": 1.0}), Sample(reward={"score": 0.0})]
    assert zeros(Namespace(reward_key="score"), samples) == ([1.0, 0.0], [0.0, 0.0])
