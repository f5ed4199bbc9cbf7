"""Shared by conversations: the policy's tools (``--rollout-tools``), and rewards given by an environment."""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.flags.config import FlagConfig
from slime.flags.reward import RewardConfig
from slime.flags.rollout import add_rollout_arguments
from slime.rollout.rm_hub.policy import GraderThreads, grade_by_policy, leave_out, within
from slime.utils.errors import ConfigError
from slime.utils.misc import load_function
from slime.utils.redaction import redacted_text
from slime.utils.types import Sample

NUM_THREADS = 32
_THREADS = GraderThreads(NUM_THREADS)
_READING = threading.Lock()
"""Held while the tools are read, which may start servers; other threads wait."""


@dataclass(frozen=True, kw_only=True)
class TurnsConfig(FlagConfig, flags=(add_rollout_arguments,)):
    """Flags of conversations with tools and environments."""

    rollout_max_turns: int
    turn_timeout_s: float
    rollout_tools: list[str] | None = None
    rollout_environment: str | None = None
    sglang_tool_call_parser: str | None = None
    sglang_reasoning_parser: str | None = None
    tool_readers: Mapping[str, str]


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run."""

    functions: Mapping[str, Callable[..., Any]]
    schemas: list[dict[str, Any]]
    """Tool descriptions in OpenAI format, as chat templates expect them."""

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        """Call a tool and return the text that the policy reads: its result, or the error of a failed call."""
        try:
            answer = await call_in_time(self.functions[name], timeout_s, **arguments)
            return answer if isinstance(answer, str) else json.dumps(answer, default=str)
        except Exception as error:  # the policy's arguments may break a tool in any way
            return redacted_text(f"Error: {type(error).__name__}: {error}")  # the error may contain the tool's address


ReadTools = Callable[[str], Iterable[tuple[dict[str, Any], Callable[..., Any]]]]
"""Called with one value of ``--rollout-tools``; returns (description in OpenAI format, function) of each tool."""


@functools.cache
def _toolbox(paths: tuple[str, ...], readers: tuple[tuple[str, str], ...]) -> Toolbox:
    functions: dict[str, Callable[..., Any]] = {}
    schemas = []
    for path in paths:
        reader = next((reader for prefix, reader in readers if path.startswith(prefix)), None)
        read: ReadTools = _function_of if reader is None else load_function(reader)
        for schema, function in read(path):
            name = schema["function"]["name"]
            if name in functions:
                raise ConfigError(f"--rollout-tools names two tools {name!r}; rename one of them.")
            functions[name] = function
            schemas.append(schema)
    return Toolbox(functions, schemas)


def _function_of(path: str) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    from transformers.utils import get_json_schema

    try:
        function = load_function(path)
        return [(get_json_schema(function), function)]
    except Exception as error:  # raised by the user's module, or a missing import
        raise ConfigError(
            f"--rollout-tools {path} cannot be offered to the model ({type(error).__name__}: {error}). It must be "
            "a function with annotated parameters, and a docstring with a line for each of them under 'Args:'."
        ) from error


def toolbox(config: TurnsConfig) -> Toolbox:
    """Return the tools of ``--rollout-tools``; the first call in a process may take minutes.

    Raises:
        ConfigError: a tool cannot be imported or described, or its server does not answer.
    """
    with _READING:
        return _toolbox(tuple(config.rollout_tools or ()), tuple(config.tool_readers.items()))


async def call_in_time(function: Callable[..., Any], timeout_s: float, /, *values: Any, **named: Any) -> Any:
    """Call a user function, in a new thread unless it is a coroutine function; return its result or raise its error.

    Raises:
        RuntimeError: the function called ``exit``.
        TimeoutError: the call took more than ``timeout_s`` seconds.
        TypeError: the arguments do not fit the function's signature.
    """
    inspect.signature(function).bind(*values, **named)  # fails before a thread is started
    late = "no answer within {:g} s (--turn-timeout-s)"

    # Catch SystemExit inside the call: it would end the event loop, and with it the run.
    async def await_call() -> Any:
        try:
            return await function(*values, **named)
        except SystemExit as error:
            raise _exited(error) from error

    def call() -> Any:
        try:
            return function(*values, **named)
        except SystemExit as error:
            raise _exited(error) from error

    if inspect.iscoroutinefunction(function):
        return await within(timeout_s, await_call(), late)
    return await _THREADS.run(call, timeout_s=timeout_s, late=late)


def _exited(error: SystemExit) -> RuntimeError:
    return RuntimeError(f"it called exit({'' if error.code is None else repr(error.code)})")


class EnvironmentFailure(RuntimeError):
    """An environment raised an error, did not answer in time, or returned an invalid answer."""


async def set_reward(config: RewardConfig, sample: Sample, reward: float, failure: EnvironmentFailure | None) -> None:
    """Set an environment's reward unless a grader is configured; failures are handled like those of graders."""
    has_grader = sample.custom_rm_path or config.custom_rm_path or sample.metadata.get("rm_type") or config.rm_type
    sample.metadata["environment_reward"] = reward

    async def grade() -> list[float]:
        return [reward]

    if failure is not None:
        leave_out(config, sample, failure)
    elif not has_grader:
        sample.reward = (await grade_by_policy(config, [sample], grade, grader="the environment"))[0]
