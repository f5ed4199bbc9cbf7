"""What a run with a critic refuses to replay, before anything starts."""

from __future__ import annotations

import json
import re

import pytest

from slime.observability.metrics_file import append_record
from tools import replay


@pytest.fixture
def run(tmp_path):
    """Three rollouts, and a checkpoint after the first."""
    values = {
        "use_critic": True, "megatron_config_path": "roles.yaml", "critic_args": {"role_overrides": {"save": "/mine"}}
    }  # fmt: skip
    config = {"command": ["train.py"], "values": {name: {"value": value} for name, value in values.items()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for folder in ("samples", "iter_0000000"):
        (tmp_path / folder).mkdir()
    (tmp_path / "iter_0000000/metadata.json").touch()
    for rollout_id in range(3):
        append_record(tmp_path / "metrics.jsonl", {"rollout/step": rollout_id})
        (tmp_path / f"samples/rollout_{rollout_id:06d}.parquet").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "2", "--pdb"), "has a critic, which takes its steps in separate processes; drop --pdb"),
        (("--step", "2", "--sample", "0"), "drop --pdb, --micro-batch and --sample"),
        (("--step", "2", "--save-checkpoint"), "would write over the critic's in /mine, .*config-path roles.yaml"),
        (("--step", "3", "--set", "lr=1"), "would write over the critic's in /mine"),
        (("--step", "2", "--set", "lr=1"), "has 0 samples of rollout 1"),
    ],
)
def test_what_a_critic_cannot_do_is_refused_before_anything_starts(run, capsys, words, message):
    with pytest.raises(SystemExit) as left:
        replay.main([str(run), *words])
    assert left.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()  # an earlier test may have set up logging, which warns here
    assert re.search(message, line)
