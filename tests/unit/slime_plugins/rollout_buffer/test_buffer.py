"""The rollout buffer over HTTP: what goes in, what comes out and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from slime_plugins.rollout_buffer import buffer as buffer_module
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, create_app
from slime_plugins.rollout_buffer.registry import load_generators
from tests.eventually import wait_until

JSON = {"Content-Type": "application/json"}


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
    # The statistics count since the last read; the group is complete.
    answer = client.post("/get_rollout_data").json()["data"]
    assert (len(answer["data"]), answer["meta_info"]["total_samples"]) == (2, 1)


@pytest.mark.parametrize("broken", [{"messages": None}, {"reward": "high"}, {"reward": 1e999}, {"instance_id": None}])
def test_an_item_that_cannot_be_used_is_refused_when_it_is_written(broken):
    client = TestClient(create_app())
    body = json.dumps(item("a") | broken)  # httpx refuses to send Infinity
    assert client.post("/buffer/write", content=body, headers=JSON).status_code == 422


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
    with TestClient(create_app([tmp_path], data_folders=[tmp_path])) as client:
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


def test_a_transform_that_fails_loses_nothing(tmp_path):
    (tmp_path / "bad_generator.py").write_text(
        "TASK_TYPE = 'bad'\ndef run_rollout(data): pass\ndef transform_group(group, task_type): raise ValueError\n"
    )
    buffer = RolloutBuffer(load_generators([tmp_path])["bad"], 1)
    buffer.write(item("a"))
    with pytest.raises(ValueError):
        buffer.read()
    assert buffer.waiting() == {"a": 1}


def test_a_buffer_with_a_secret_answers_nobody_else(tmp_path):
    file = tmp_path / "secret"
    client = TestClient(create_app(secret_file=file))
    paths = {route.path for route in client.app.routes}
    assert {"/buffer/write", "/get_rollout_data", "/start_rollout", "/status"} <= paths
    for path in [*paths, "/docs", "/openapi.json"]:
        for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": file.read_text().strip()}):
            assert not client.get(path, headers=key).is_success
            assert not client.post(path, json=item("a"), headers=key).is_success
    client.headers["Authorization"] = f"Bearer {file.read_text().strip()}"
    assert client.get("/status").json()["items"] == 0
    assert client.post("/buffer/write", json=item("a")).json()["success"]


def test_the_generators_of_a_buffer_with_a_secret_send_it_to_engines_and_buffer(tmp_path):
    (tmp_path / "own_generator.py").write_text(
        """
TASK_TYPE = "own"

def run_rollout(data):
    from pathlib import Path
    from slime.utils.http_utils import job_headers
    urls = [data["remote_engine_url"] + "/generate", data["remote_buffer_url"] + "/x", "http://elsewhere:1"]
    Path(data["input_file"]).write_text(str([len(job_headers(url)) for url in urls]))
"""
    )
    out = tmp_path / "out"
    data = {"task_type": "own", "input_file": str(out), "remote_engine_url": "http://10.0.0.1:3"}
    with TestClient(create_app([tmp_path], 1, tmp_path / "secret", [tmp_path])) as client:
        client.headers["Authorization"] = f"Bearer {(tmp_path / 'secret').read_text().strip()}"
        assert client.post("/start_rollout", json=data | {"remote_buffer_url": "http://10.0.0.2:4"}).is_success
        wait_until(lambda: out.exists() and out.read_text(), "the generator's file")
    assert out.read_text() == "[1, 1, 0]"


def test_a_start_names_no_file_beyond_those_of_the_operator(tmp_path):
    inside, outside = tmp_path / "data", tmp_path / "secret.jsonl"
    inside.mkdir()
    outside.write_text('{"prompt": "secret"}')
    (inside / "link.jsonl").symlink_to(outside)
    (inside / "folder").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    client = TestClient(create_app(data_folders=[inside]))
    for name in (
        outside, f"{outside}@[0:1]", inside / ".." / "secret.jsonl", inside / "link.jsonl", "a\0b", inside / "loop/a",
        inside / "folder/secret.jsonl", f"{inside}-other/a.jsonl", "secret.jsonl", "/proc/self/environ", "/etc/passwd",
        "gym:countdown", "verifiers:os", "verifiers-eval:os", "~/a", ["/etc/passwd"], {"a": "/etc"}, 1, None, True,
    ):  # fmt: skip
        start = {"input_file": str(name) if isinstance(name, Path) else name}
        answer = client.post("/start_rollout", json=start)
        assert answer.status_code in (403, 422) and "input_file" in answer.json()["detail"], name
        assert client.get("/status").json()["generator"] is None
    with TestClient(create_app(data_folders=[tmp_path / "none", inside])) as client:
        start = {"input_file": f"{inside}/new.jsonl@[0:1]", "remote_engine_url": "", "remote_buffer_url": ""}
        assert client.post("/start_rollout", json=start).json()["message"] == "Rollout started"


def test_the_service_does_not_listen_beyond_loopback_without_a_secret():
    words = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer", "--host", "0.0.0.0", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 2 and "--secret-file" in ended.stderr and "--no-job-secret" in ended.stderr


STUBBORN = """
import signal, time
TASK_TYPE = "stubborn"
def run_rollout(data):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(data["started"], "w").close()
    time.sleep(600)
"""


def test_a_generator_that_ignores_its_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer_module, "STOP_WAIT_S", 0.3)
    (tmp_path / "stubborn_generator.py").write_text(STUBBORN)
    generator = load_generators([tmp_path])["stubborn"]
    process, started = buffer_module.GeneratorProcess(), tmp_path / "started"
    process.start(generator, {"started": str(started)})
    wait_until(started.exists, "the start of the generator")
    assert process.exit_code() == "running"
    process.stop()
    assert process.exit_code() == -signal.SIGKILL
