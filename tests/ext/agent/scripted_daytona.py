"""The part of Daytona's HTTP interface that its client uses; commands run on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from pathlib import Path
from typing import Any

from aiohttp import MultipartWriter, web

from slime.utils.aiohttp_threaded import run_app_in_thread

SANDBOX = {
    "organizationId": "o", "name": "box", "user": "root", "env": {}, "public": False, "networkBlockAll": False,
    "kvm": False, "target": "here", "cpu": 1, "gpu": 0, "memory": 1, "disk": 1, "recoverable": False,
}  # fmt: skip


class ScriptedDaytona:
    """Serves sandboxes in the working directory ``folder``; loses ``losses`` answers of commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.losses = folder, 0
        self.created: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []
        self.destroyed: list[str] = []
        self.is_queued = True
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/api/sandbox", self._create)
        app.router.add_get("/api/sandbox/{id}", self._look)
        app.router.add_delete("/api/sandbox/{id}", self._destroy)
        app.router.add_post("/box/{id}/process/execute", self._execute)
        app.router.add_post("/box/{id}/files/bulk-upload", self._upload)
        app.router.add_post("/box/{id}/files/bulk-download", self._download)
        self._server = run_app_in_thread(app)
        self.url = f"http://127.0.0.1:{self._server.port}"

    def stop(self) -> None:
        self._server.stop()

    def _sandbox(self, name: str, state: str) -> web.Response:
        facts = {"id": name, "state": state, "labels": {}, "toolboxProxyUrl": f"{self.url}/box"}
        return web.json_response(SANDBOX | facts)

    async def _create(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        self.created.append(await request.json())
        return self._sandbox(uuid.uuid4().hex, "creating")

    async def _look(self, request: web.Request) -> web.Response:
        return self._sandbox(request.match_info["id"], "started")

    async def _destroy(self, request: web.Request) -> web.Response:
        self.destroyed.append(request.match_info["id"])
        return self._sandbox(request.match_info["id"], "destroyed")

    async def _execute(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.commands.append(asked)
        if self.losses:
            self.losses -= 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", asked["command"], cwd=self.folder, env={**os.environ, **(asked.get("envs") or {})},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = await asyncio.wait_for(process.communicate(), asked["timeout"])
        except TimeoutError:
            os.killpg(process.pid, 9)
            return self._error(408, "PROCESS_EXECUTION_TIMEOUT")
        return web.json_response({"exitCode": process.returncode, "result": out.decode()})

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        (self.folder / str(form["files[0].path"])).write_bytes(form["files[0].file"].file.read())
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        [name] = (await request.json())["paths"]
        with MultipartWriter("form-data") as parts:
            path = self.folder / name
            if path.is_file():
                parts.append(path.read_bytes()).set_content_disposition("form-data", False, name="file", filename=name)
            else:
                error = json.loads(self._error(404, "FILE_NOT_FOUND").text or "")
                parts.append_json(error).set_content_disposition("form-data", False, name="error", filename=name)
        return web.Response(body=parts)

    def _error(self, status: int, code: str) -> web.Response:
        error = {"statusCode": status, "message": code.lower(), "code": code, "source": "DAYTONA_DAEMON"}
        return web.json_response(error, status=status)
