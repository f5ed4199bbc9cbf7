"""The rollout buffer over its wire: what goes in, what comes out and when."""

from __future__ import annotations

import time

import pytest
from fastapi.testclient import TestClient

from slime.utils.errors import ConfigError
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, create_app
from slime_plugins.rollout_buffer.registry import load_generators


def item(instance_id, reward=1.0, **more):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return {"uid": "u", "instance_id": instance_id, "messages": messages, "reward": reward, "extra_info": {}, **more}


def test_a_group_leaves_when_it_is_complete_and_only_once():
    client = TestClient(create_app(group_size=2))
    assert client.post("/buffer/write", json=item("a")).json()["success"]
    answer = client.post("/get_rollout_data").json()
    assert (answer["success"], answer["data"]["data"]) == (False, [])
    client.post("/buffer/write", json=item("b", 0.0))
    client.post("/buffer/write", json=item("a", 0.0))
    answer = client.post("/get_rollout_data", json={}).json()
    assert [i["instance_id"] for i in answer["data"]["data"]] == ["a", "a"]
    facts = {"total_samples": 3, "num_groups": 2, "avg_group_size": 1.5, "avg_reward": pytest.approx(1 / 3)}
    assert answer["data"]["meta_info"] == facts
    assert not client.post("/get_rollout_data").json()["success"]
    client.post("/buffer/write", json=item("b"))
    # The statistics count from the last reading; the group is whole.
    answer = client.post("/get_rollout_data").json()["data"]
    assert (len(answer["data"]), answer["meta_info"]["total_samples"]) == (2, 1)


@pytest.mark.parametrize("broken", [{"messages": None}, {"reward": "high"}, {"instance_id": None}])
def test_an_item_that_cannot_be_used_is_refused_when_it_is_written(broken):
    client = TestClient(create_app())
    assert client.post("/buffer/write", json=item("a") | broken).status_code == 422


def test_bodies_that_are_no_objects_and_unknown_tasks_are_refused():
    client = TestClient(create_app())
    assert client.post("/buffer/write", content=b"nonsense").status_code == 422
    refused = client.post("/start_rollout", json={"task_type": "chess"})
    assert refused.status_code == 422 and "math" in refused.json()["detail"]


OWN = """
TASK_TYPE = "own"

def run_rollout(data):
    from pathlib import Path
    Path(data["input_file"]).write_text(f"{data['skip_instance_ids']} {data['num_repeat_per_sample']}")

def is_valid_group(group, min_size, task_type):
    return len(group[1]) >= min_size - 1

def transform_group(group, task_type):
    return group[0], [dict(item, reward=item["reward"] + 1) for item in group[1]]

def get_group_data_meta_info(temp_data):
    return {"ids": sorted(temp_data)}
"""


def test_a_generator_of_ones_own_is_run_and_judges_its_groups(tmp_path):
    (tmp_path / "own_generator.py").write_text(OWN)
    written = tmp_path / "seen.txt"
    with TestClient(create_app([tmp_path])) as client:
        start = {"task_type": "own", "num_repeat_per_sample": "2", "input_file": str(written)}
        assert client.post("/start_rollout", json=start).json()["message"] == "Rollout started"
        client.post("/buffer/write", json=item("a", 0.5))
        until = time.monotonic() + 40
        while client.get("/status").json()["generator"] == "running" and time.monotonic() < until:
            time.sleep(0.1)
        assert client.get("/status").json() == {"task_type": "own", "groups": 1, "items": 1, "generator": 0}
        assert written.read_text() == "[] 2"
        data = client.post("/get_rollout_data").json()["data"]
    assert [i["reward"] for i in data["data"]] == [1.5]
    assert data["meta_info"] == {"ids": ["a"]}


def test_a_new_start_keeps_complete_groups_and_plays_the_others_again():
    generator = load_generators()["math"]
    buffer = RolloutBuffer(generator, 1)
    buffer.restart(generator, 2, "file")
    for name in ("a", "a", "b"):
        buffer.write(item(name))
    assert buffer.restart(generator, 2, "file") == ["a"]
    assert buffer.waiting() == {"a": 2}
    assert buffer.restart(generator, 2, "another file") == []
    assert buffer.waiting() == {}


def test_a_generator_file_without_its_two_names_is_refused(tmp_path):
    (tmp_path / "half_generator.py").write_text("TASK_TYPE = 'half'")
    with pytest.raises(ConfigError, match="run_rollout"):
        load_generators([tmp_path])


def test_a_transform_that_fails_loses_nothing(tmp_path):
    (tmp_path / "bad_generator.py").write_text(
        "TASK_TYPE = 'bad'\ndef run_rollout(data): pass\ndef transform_group(group, task_type): raise ValueError\n"
    )
    buffer = RolloutBuffer(load_generators([tmp_path])["bad"], 1)
    buffer.write(item("a"))
    with pytest.raises(ValueError):
        buffer.read()
    assert buffer.waiting() == {"a": 1}
