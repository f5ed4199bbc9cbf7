"""The service: items come in one by one, complete groups go out.

POST /buffer/write       {uid, instance_id, messages, reward, extra_info}
POST /get_rollout_data   -> {success, message, data: {data: [item, ...], meta_info}}
POST /start_rollout      runs the generator of ``task_type`` in a separate process
GET  /status             groups that wait, and whether the generator runs

Who writes an item decides what is trained: bodies are JSON, pages in a browser are refused
(``slime.utils.http_door``), and beyond loopback every request needs the secret of ``--secret-file``, which is the
job's ``--job-secret-file``.  Who starts a generator names the file that it reads, in a folder of ``--data-dir``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, HTTPException, Request

from slime.flags.kinds import port_number, positive_int
from slime.flags.security import secret_of_file
from slime.rollout.prompt_files import split_path
from slime.utils import env
from slime.utils.errors import ConfigError, SlimeError
from slime.utils.files import parse_object
from slime.utils.http_door import AsgiDoor
from slime.utils.http_utils import has_secret
from slime.utils.net import is_loopback
from slime_plugins.rollout_buffer.registry import Generator, Item, load_generators

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8889
DEFAULT_TASK_TYPE = "math"
STOP_WAIT_S = 5.0
REQUEST_S = 30.0
"""For a client to send its headers, and its body."""
MAX_BODY_BYTES = 256 << 20
SECRET_FLAG, DATA_FLAG = "--secret-file", "--data-dir"
_REQUIRED = ("instance_id", "messages", "reward")


class RolloutBuffer:
    """Items by instance, until their group is complete.  Thread-safe.

    Invariant: an item that was accepted is handed out once, with its whole group.
    """

    def __init__(self, generator: Generator, group_size: int = 1) -> None:
        self.generator = generator
        self.group_size = group_size
        self.source = ""
        """The file that the generator reads."""
        self._groups: dict[str, list[Item]] = {}
        self._since_reading: dict[str, list[Item]] = {}
        self._lock = threading.Lock()

    def write(self, item: Item) -> Item:
        """Accept an item; returns it with its time.

        Raises:
            ConfigError: a key is missing, or the reward is not a number.
        """
        missing = [key for key in _REQUIRED if item.get(key) is None]
        if missing:
            raise ConfigError(f"An item has no {', '.join(missing)}; it needs {', '.join(_REQUIRED)}.")
        reward = item["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
            raise ConfigError(f"An item's reward is {str(reward)[:80]!r}; it must be a finite number.")
        item = {"timestamp": time.time(), **item}
        with self._lock:
            for groups in (self._groups, self._since_reading):
                groups.setdefault(str(item["instance_id"]), []).append(item)
        return item

    def read(self) -> dict[str, Any]:
        """Return ``{"data": items of the complete groups, "meta_info": ...}``; the groups leave the buffer."""
        with self._lock:
            size, task_type = self.group_size, self.generator.task_type
            valid = [g for g in self._groups.items() if self.generator.is_valid_group(g, size, task_type)]
            if not valid:
                return {"data": [], "meta_info": {}}
            # Transformed before they leave: a transform that raises loses nothing.
            items = [item for group in valid for item in self.generator.transform_group(group, task_type)[1]]
            meta_info = self.generator.get_group_data_meta_info(self._since_reading)
            for instance_id, _ in valid:
                del self._groups[instance_id]
            self._since_reading = {}
            return {"data": items, "meta_info": meta_info}

    def restart(self, generator: Generator, group_size: int, source: str = "") -> list[str]:
        """Prepare for a generator's run; the instances that need not be played, for they wait here complete.

        Incomplete groups are forgotten, because their instances are played again from the start; everything is, when
        the run reads another ``source``.
        """
        with self._lock:
            is_same = (self.generator.task_type, self.source) == (generator.task_type, source)
            self.generator, self.group_size, self.source = generator, group_size, source
            complete = [
                g for g in self._groups.items() if generator.is_valid_group(g, group_size, generator.task_type)
            ]
            forgotten = len(self._groups) - (len(complete) if is_same else 0)
            self._groups = dict(complete) if is_same else {}
            if forgotten:
                logger.warning("%d groups that waited were forgotten for a new start.", forgotten)
            return list(self._groups)

    def waiting(self) -> dict[str, int]:
        """Return the waiting items by instance."""
        with self._lock:
            return {instance_id: len(items) for instance_id, items in self._groups.items()}


class GeneratorProcess:
    """The one generator that may run: a new start ends the run before it."""

    def __init__(self, secret_file: Path | None = None) -> None:
        self._secret_file = secret_file
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self, generator: Generator, data: dict[str, Any]) -> int:
        """Run the generator with ``data``; its process id."""
        with self._lock:
            self._stop()
            words = ["-m", "slime_plugins.rollout_buffer.registry", str(generator.file), json.dumps(data)]
            servers = [str(data[key]) for key in ("remote_engine_url", "remote_buffer_url") if data.get(key)]
            variables = env.copy() | env.no_proxy_for(*(urlsplit(server).hostname or "" for server in servers))
            if self._secret_file is not None:
                variables["SLIME_JOB_SECRET_FILE"] = str(self._secret_file.absolute())
                variables["SLIME_JOB_SERVERS"] = " ".join(servers)
            # In a separate process group, so that its workers end with it.
            self._process = subprocess.Popen([sys.executable, *words], env=variables, start_new_session=True)
            logger.info("Generator %s runs as process %d.", generator.task_type, self._process.pid)
            return self._process.pid

    def exit_code(self) -> int | None | str:
        """Return the exit code; "running", or None before the first start."""
        if self._process is None:
            return None
        code = self._process.poll()
        return "running" if code is None else code

    def stop(self) -> None:
        """End the generator and its workers."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:  # all of it has ended
                break
            try:
                self._process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.poll()


def create_app(
    folders: Iterable[Path] = (),
    group_size: int = 1,
    secret_file: Path | None = None,
    data_folders: Iterable[Path] = (Path(),),
) -> FastAPI:
    """Create the service.

    Args:
        folders: of generators beside those of the package.
        group_size: items of a group until a start says otherwise.
        secret_file: every request needs its secret.
        data_folders: a generator reads no file outside of them.
    """
    data_folders = [folder.resolve() for folder in data_folders]
    generators = load_generators(folders)
    buffer = RolloutBuffer(generators[DEFAULT_TASK_TYPE], group_size)
    process = GeneratorProcess(secret_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        process.stop()

    secret = None if secret_file is None else secret_of_file(secret_file, SECRET_FLAG)

    def check(request: Request) -> None:
        if secret is not None and not has_secret(request.headers.get("Authorization"), secret):
            raise HTTPException(401, f"This buffer needs the secret of its {SECRET_FLAG}.")

    # No pages that describe the service: they would be open to everybody.
    app = FastAPI(title="slime rollout buffer", lifespan=lifespan, dependencies=[Depends(check)], openapi_url=None)
    app.add_middleware(AsgiDoor)
    app.state.buffer = buffer

    @app.post("/buffer/write")
    async def write(request: Request) -> dict[str, Any]:
        try:
            item = buffer.write(await _object(request))
        except ConfigError as error:
            raise HTTPException(422, str(error)) from error
        return {"success": True, "message": "written", "data": {"data": [item], "meta_info": {}}}

    @app.post("/get_rollout_data")
    def read() -> dict[str, Any]:
        data = buffer.read()
        if not data["data"]:
            return {"success": False, "message": "no complete group yet", "data": data}
        return {"success": True, "message": f"{len(data['data'])} items", "data": data}

    @app.post("/start_rollout")
    async def start(request: Request) -> dict[str, Any]:
        data = await _object(request)
        task_type = data.get("task_type", DEFAULT_TASK_TYPE)
        if not isinstance(task_type, str) or task_type not in generators:
            raise HTTPException(
                422, f"task_type is {str(task_type)[:80]!r}; there is {', '.join(sorted(generators))}."
            )
        try:
            repeats = positive_int(str(data.get("num_repeat_per_sample", 1)))
        except argparse.ArgumentTypeError as error:
            raise HTTPException(422, f"num_repeat_per_sample: {error}.") from error
        if not isinstance(data.get("skip_instance_ids"), list | None):
            raise HTTPException(422, f"skip_instance_ids is {str(data['skip_instance_ids'])[:80]!r}; it is a list.")
        source = str(data.get("input_file", ""))
        _check_source(source, data_folders)
        await asyncio.to_thread(process.stop)  # before the buffer is looked at: it still writes
        waiting = buffer.restart(generators[task_type], repeats, source)
        data["skip_instance_ids"] = [*(data.get("skip_instance_ids") or []), *waiting]
        return {"message": "Rollout started", "process": process.start(generators[task_type], data)}

    @app.get("/status")
    def status() -> dict[str, Any]:
        waiting = buffer.waiting()
        return {
            "task_type": buffer.generator.task_type,
            "groups": len(waiting),
            "items": sum(waiting.values()),
            "generator": process.exit_code(),
        }

    return app


async def _object(request: Request) -> dict[str, Any]:
    body = bytearray()
    try:
        async with asyncio.timeout(REQUEST_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
        return parse_object(bytes(body))
    except TimeoutError as error:
        raise HTTPException(408, f"The body was not sent within {REQUEST_S:.0f} s.") from error
    except ValueError as error:
        raise HTTPException(422, f"The body is not a JSON object: {error}.") from error


def _check_source(source: str, folders: list[Path]) -> None:
    """Refuse what is no file in one of ``folders``."""
    try:
        file = Path(split_path(source)[0]).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise HTTPException(422, f"input_file is {source[:200]!r}: {error}.") from error
    is_inside = any(file.is_relative_to(folder) for folder in folders)
    if source and not is_inside:
        allowed = ", ".join(map(str, folders))
        raise HTTPException(
            403, f"input_file is {source[:200]!r}; it must be a file in {allowed} ({DATA_FLAG} of the buffer)."
        )


def patient_protocol() -> type[H11Protocol]:
    """Return uvicorn's protocol with a deadline for the headers of a request, which uvicorn has not."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._late is not None:
                self._late.cancel()

        def _expect(self) -> None:
            """Close the connection ``REQUEST_S`` after it began to wait for headers, unless they come."""
            is_answered = self.cycle is not None and not self.cycle.response_complete
            if is_answered and self._late is not None:
                self._late.cancel()
                self._late = None
            elif not is_answered and self._late is None:
                self._late = self.loop.call_later(REQUEST_S, self.transport.close)

    return Protocol


def main() -> None:
    """Serve until the process is ended."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; beyond loopback with a secret only")
    parser.add_argument("--port", type=port_number, default=DEFAULT_PORT)
    parser.add_argument("--generator-dir", type=Path, action="append", default=[], help="more *_generator.py files")
    parser.add_argument(
        "--group-size", type=positive_int, default=1, help="items of a group until a start says otherwise"
    )
    parser.add_argument(SECRET_FLAG, type=Path, help="every request needs the secret in this file, made when missing")
    parser.add_argument(
        DATA_FLAG, type=Path, action="append", help="a start names files in it alone; default: the working directory"
    )
    parser.add_argument("--no-job-secret", action="store_true", help="listen beyond loopback without a secret")
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if not is_loopback(flags.host) and flags.secret_file is None:
        if not flags.no_job_secret:
            parser.error(
                f"--host {flags.host}: whoever reaches it would read files of {DATA_FLAG} and write what is trained; "
                f"give {SECRET_FLAG}, with the file of the job's --job-secret-file, or --no-job-secret"
            )
        logger.warning("--no-job-secret: whoever reaches %s writes what is trained.", flags.host)
    try:
        app = create_app(flags.generator_dir, flags.group_size, flags.secret_file, flags.data_dir or [Path()])
    except SlimeError as error:
        parser.error(str(error))
    uvicorn.run(app, host=flags.host, port=flags.port, http=patient_protocol())


if __name__ == "__main__":
    main()
