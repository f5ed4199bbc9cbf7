"""Environments of the package verifiers, and the rows of their data sets as prompts.

``--prompt-data 'verifiers:NAME?argument=value'`` reads the rows for training, ``verifiers-eval:NAME`` the held-out
ones.  A row names its environment and its number; ``verifiers_env`` runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from slime.ext.agent.flags import PREFIXES
from slime.rollout.prompt_files import parse_query
from slime.utils.errors import ConfigError

LOAD_LIMIT_S = 600.0
"""For an environment, its data set included."""

_LOADED: dict[str, Any] = {}
_LOCK = threading.Lock()


def load(path: str, flag: str = "--prompt-data") -> Any:
    """Return the environment of a path, which is made once in a process.

    Raises:
        ConfigError: the package is missing, the environment cannot be made, or it is of a kind that cannot be trained.
    """
    wanted = path.partition(":")[2]
    with _LOCK:
        if wanted not in _LOADED:
            if importlib.util.find_spec("verifiers") is None:
                raise ConfigError(f"{flag} {path} needs the package verifiers; pip install -e '.[verifiers]'.")
            _LOADED[wanted] = _made(path, flag)
        return _LOADED[wanted]


def _made(path: str, flag: str) -> Any:
    name, arguments = parse_query(path)
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            package = importlib.import_module("verifiers")
            if (module := sys.modules.get("verifiers.envs.environment")) is not None:
                # Environments take SIGINT and SIGTERM for themselves; they belong to the job.
                module.signal = SimpleNamespace(**vars(signal) | {"signal": lambda *_: None})  # type: ignore[attr-defined]
            outcome.append(package.load_environment(name, **arguments))
        except BaseException as error:  # raised by the caller's thread
            failure.append(error)

    thread = threading.Thread(target=work, name=f"load {path}", daemon=True)
    thread.start()
    thread.join(LOAD_LIMIT_S)
    if not outcome:
        error = failure[0] if failure else TimeoutError(f"nothing within {LOAD_LIMIT_S:.0f} s")
        raise ConfigError(
            f"{flag} {path}: verifiers says {type(error).__name__}: {error}. Install the environment's package, or "
            "correct its name or its arguments."
        ) from error
    problem = _problem_with(outcome[0])
    if problem:
        raise ConfigError(f"{flag} {path}: {problem}.")
    return outcome[0]


def _problem_with(environment: Any) -> str:
    if environment.message_type != "chat":
        return f"its message_type is {environment.message_type!r}; only chat is supported"
    for rubric in getattr(environment.rubric, "rubrics", [environment.rubric]):
        if functions := rubric._get_group_reward_funcs():
            return f"its rubric has {functions[0].__name__}, a reward of whole groups; give each answer its own"
    return ""


def row_of(path: str, index: int) -> dict[str, Any]:
    """Return one row, as the environment takes it."""
    return dict(_rows(load(path), path)[index])


def _rows(environment: Any, path: str) -> Any:
    return environment.get_eval_dataset() if path.startswith(PREFIXES[1]) else environment.get_dataset()


def read_environment(path: str, rows: slice, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for the selected rows, with the keys input, label and metadata.

    Raises:
        ConfigError: see ``load``; or it has no such rows.
    """
    environment = load(path, flag)
    try:
        asked = _rows(environment, path)
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: it has no such rows ({error}).") from error
    for index in range(len(asked))[rows]:
        row = asked[index]
        metadata = {"source_name": parse_query(path)[0], "verifiers": {"environment": path, "index": index}}
        yield f"{path} row {index}", {"input": row["prompt"], "label": row.get("answer"), "metadata": metadata}
