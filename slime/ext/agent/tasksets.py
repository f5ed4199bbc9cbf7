"""Tasks of verifiers 0.4 or later, harbor's included: ``--prompt-data 'taskset:NAME?argument=value'``.

The package does not go together with SGLang's, so it runs in an interpreter that has it, the one that
``SLIME_AGENT_VERIFIERS_PYTHON`` names: one process (``taskset_worker``) for each that reads rows or plays.  Its agents
talk to the adapter of ``slime.agent`` as to any OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import subprocess
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from slime.ext.agent.flags import PYTHON, needs_python
from slime.ext.agent.session import play
from slime.ext.agent.verifiers_data import LOAD_LIMIT_S
from slime.ext.agent.verifiers_env import check, rewarded
from slime.flags.reward import RewardConfig
from slime.rollout.prompt_files import parse_query
from slime.rollout.rm_hub.policy import within
from slime.rollout.tools import EnvironmentFailure, TurnsConfig
from slime.utils import env
from slime.utils.errors import ConfigError, DataError, ProcessError
from slime.utils.types import Sample

END_LIMIT_S = 15.0
_FILE = Path(__file__).with_name("taskset_worker.py")


class _Process:
    """The other interpreter, and the questions that it has not answered yet."""

    def __init__(self, python: str) -> None:
        # Its packages are its own; -P keeps this folder's modules out of its sight.
        variables = {name: value for name, value in env.copy().items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = subprocess.Popen(
            [python, "-P", str(_FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self._numbers = itertools.count()
        self._open: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # apart: a full pipe must not keep answers from being read
        self.has_ended = False
        threading.Thread(target=self._read, name="answers of tasksets", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._open.pop(answer["id"], None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(answer)
        with self._lock:
            self.has_ended, lost = True, list(self._open.values())
        for future in lost:
            if future.set_running_or_notify_cancel():
                future.set_exception(ProcessError("the process of verifiers has ended; its log says why"))

    def ask(self, do: str, **facts: Any) -> tuple[int, Future[dict[str, Any]]]:
        """Send a question; returns its number and its answer.

        Raises:
            OSError: the process has ended.
        """
        number, future = next(self._numbers), Future[dict[str, Any]]()
        with self._lock:
            if self.has_ended:
                raise BrokenPipeError("the process of verifiers has ended")
            self._open[number] = future
        self._send({"id": number, "do": do, **facts})
        return number, future

    def give_up(self, number: int) -> None:
        """Have the process leave a question alone."""
        with self._lock:
            known = self._open.pop(number, None)
        if known is not None and not self.has_ended:
            self._send({"id": -1, "do": "cancel", "of": number})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(message) + "\n"
        with self._writing:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(END_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()


_PROCESSES: list[_Process] = []
_STARTING = threading.Lock()


def _process() -> _Process:
    """Return the process, started again where it has ended."""
    with _STARTING:
        if not _PROCESSES or _PROCESSES[-1].has_ended:
            python = env.agent_setting(PYTHON)
            if python is None:
                raise ConfigError(needs_python("taskset:NAME"))
            try:
                _PROCESSES[:] = [_Process(python)]
            except OSError as error:
                raise ConfigError(f"SLIME_AGENT_{PYTHON}={python} cannot be started: {error}.") from error
            atexit.register(_PROCESSES[0].close)
        return _PROCESSES[0]


def stop() -> None:
    """End the process."""
    while _PROCESSES:
        _PROCESSES.pop().close()


def read_tasks(path: str, rows: slice, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for the selected tasks, with the keys input and metadata.

    Raises:
        ConfigError: there is no interpreter, or the package does not load the tasks.
    """
    name, arguments = parse_query(path)
    is_open = rows.stop is None or rows.stop < 0 or (rows.start or 0) < 0
    process = _process()
    try:
        number, answer = process.ask("rows", name=name, arguments=arguments, stop=None if is_open else rows.stop)
        try:
            said = answer.result(LOAD_LIMIT_S)
        finally:
            process.give_up(number)
    except (OSError, TimeoutError, ProcessError) as error:
        raise ConfigError(f"{flag} {path}: no tasks within {LOAD_LIMIT_S:.0f} s ({error!r}).") from error
    if "failure" in said:
        raise ConfigError(
            f"{flag} {path}: verifiers says {said['failure']}. Install the taskset's package beside it, or correct "
            "its name or its arguments."
        )
    for index in range(len(said["rows"]))[rows]:
        metadata = {"source_name": name, "taskset": {"path": path, "index": index}}
        yield f"{path} task {index}", {"input": said["rows"][index], "label": None, "metadata": metadata}


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Let verifiers play the task of the row, and return its samples with the task's reward.

    A limit that ends it makes them TRUNCATED.  A task that raises, or takes more than ``--taskset-timeout-s``, costs
    its sample, which is FAILED and trains nothing.
    """
    asked = sample.metadata.get("taskset")
    if asked is None:
        raise DataError(f"Sample {sample.index} is no row of a --prompt-data taskset:NAME, which {__name__} plays.")
    name, arguments = parse_query(asked["path"])
    ended: dict[str, Any] = {}

    async def agent(url: str, sid: str) -> float:
        facts = {"name": name, "arguments": arguments, "index": asked["index"], "url": f"{url}/v1", "key": sid}
        facts |= {"max_turns": TurnsConfig.of(args).rollout_max_turns, "is_unsafe": args.unsafe_local_sandbox}
        process = await asyncio.to_thread(_process)
        number, answer = await asyncio.to_thread(process.ask, "play", **facts)
        late = "the task did not end within {:g} s (--taskset-timeout-s)"
        try:
            said = await within(args.taskset_timeout_s, asyncio.wrap_future(answer), late)
        finally:
            process.give_up(number)
        ended.update({"reward": 0.0} | said)
        errors = [said["failure"]] if "failure" in said else said["errors"]
        ended["is_cut"] = said.get("is_truncated") or any("context_length_exceeded" in error for error in errors)
        if errors and not ended["is_cut"]:
            raise EnvironmentFailure(f"{asked['path']}: {'; '.join(errors)[:2000]}")
        return float(ended["reward"])

    played = await play(args, sample, sampling_params, agent, evaluation=evaluation)
    return await rewarded(RewardConfig.of(args), played, ended, is_cut=bool(ended.get("is_cut")))


generate.check_args = check  # type: ignore[attr-defined]
