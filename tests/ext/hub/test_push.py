"""Exports go to a hub repository, here of a server that keeps what it gets; a missing token is refused."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from argparse import Namespace
from typing import Any

import pytest

from slime.compose import flag_groups
from slime.ext.hub.flags import check_repository, derive_repository
from slime.ext.hub.push import HubSink
from slime.observability import telemetry
from slime.utils.errors import ConfigError


class Hub(http.server.ThreadingHTTPServer):
    """The endpoints that an upload of small files uses; ``OTHER/...`` belongs to someone else."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert self.headers["Authorization"] == "Bearer hf_mine"
        if self.path == "/api/repos/create":
            name = f"{json.loads(body)['organization']}/{json.loads(body)['name']}"
            self.answer({"url": f"{self.server.url}/{name}"}, 403 if name.startswith("OTHER/") else 200)
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self.answer({"files": [one | {"shouldIgnore": False} for one in files]})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines[1:]}
            self.server.commits.append((lines[0]["value"]["summary"], files))
            self.answer({"commitUrl": f"{self.server.url}/o/n/commit/1", "commitOid": "1", "success": True})

    def answer(self, value: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield server
        server.shutdown()


def arguments(folder: Any, repository: str) -> Namespace:
    args = Namespace(
        save=str(folder / "{a}"), save_hf=f"hub:{repository}", hub_repository=None, wandb_run_id="r", runs_here=True
    )
    derive_repository(args)
    return args


def test_each_save_is_a_commit_in_its_order(tmp_path, hub):
    args = arguments(tmp_path, "org/name")
    assert list(check_repository(args)) == []
    telemetry.start(args, "driver", (HubSink,), primary=True)
    for rollout_id in (3, 7):
        folder = tmp_path / "{a}/hf" / str(rollout_id)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"rollout": {rollout_id}}}')
        telemetry.event("save", rollout=rollout_id)
    telemetry.stop()
    assert hub.commits == [(f"Rollout {number}", {"config.json": b'{"rollout": %d}' % number}) for number in (3, 7)]


def test_a_push_that_fails_is_logged_with_its_command_and_a_repository_of_others_refused(tmp_path, hub, caplog):
    args = arguments(tmp_path, "org/name")
    telemetry.start(args, "driver", (HubSink,), primary=True)
    telemetry.event("save", rollout=1)  # nothing was exported
    telemetry.stop()
    assert "hf upload org/name" in caplog.text and hub.commits == []
    with pytest.raises(ConfigError, match="--save-hf hub:OTHER/name: .* refuses it"):
        HubSink(arguments(tmp_path, "OTHER/name"), "driver", primary=True)


def test_the_end_of_a_run_says_what_it_waits_for_until_the_deadline_that_it_names(tmp_path, hub, caplog, monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda *_, **__: ends.wait(60))
    monkeypatch.setattr("slime.ext.hub.push.CLOSE_S", 0.3)
    monkeypatch.setattr("slime.ext.hub.push.SAY_S", 0.1)
    caplog.set_level("INFO")
    sink = HubSink(arguments(tmp_path, "org/name"), "driver", primary=True)
    sink.event("save", {"rollout": 1})
    sink.close()
    ends.set()
    *waits, given_up = [record.getMessage() for record in caplog.records if "last push" in record.getMessage()]
    assert waits and all("org/name is under way" in line for line in waits)
    assert "has not ended in 0 s (slime.ext.hub.push.CLOSE_S)" in given_up


def test_what_could_not_be_pushed_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    [said] = check_repository(arguments(tmp_path, "org/name"))
    assert said == "--save-hf hub:org/name has no token: set HF_TOKEN, or run `hf auth login`."
    said, *_ = check_repository(arguments(tmp_path, "org/na/me"))
    assert "names no repository" in said
    plain = Namespace(save="s", save_hf="out/{rollout_id}", hub_repository=None)
    derive_repository(plain)
    assert plain.save_hf == "out/{rollout_id}" and not list(check_repository(plain))
    assert any(check_repository in group.check for group in flag_groups())
