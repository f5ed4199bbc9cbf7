"""The contracts of tools and environments, as a conversation calls them."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from slime.rollout.prompts import as_messages
from slime.rollout.tools import TurnsConfig, call_in_time, toolbox
from slime.utils.misc import load_function
from tools.plugin_check.bench import Bench
from tools.plugin_check.findings import Findings, expect

VALUES = {"string": "2 + 3", "integer": 2, "number": 0.5, "boolean": True, "array": [], "object": {}}
"""JSON type of a parameter -> the argument of a trial."""
ACTIONS = ("5", "", "I think it is \\boxed{5}.")


def _tool(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = Namespace(rollout_tools=[path])
    arguments: dict[str, Any] = {}
    with findings.step("it can be described to the model, by its annotations and docstring"):
        [description] = toolbox(TurnsConfig.of(args)).schemas
        described = description["function"]
        expect(described.get("description"), "its docstring is empty; the model reads it")
        for name, parameter in described["parameters"]["properties"].items():
            if name in described["parameters"].get("required", ()):
                arguments[name] = parameter.get("enum", [VALUES.get(parameter.get("type"), "2 + 3")])[0]
    if findings.failures:
        return
    name = described["name"]
    shown = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    with findings.step(f"it answers {shown} with text"):
        answer = findings.run(
            toolbox(TurnsConfig.of(args)).call(name, arguments, timeout_s=bench.timeout_s), bench.timeout_s
        )
        if answer.startswith("Error: "):
            findings.warn("answer", f"{shown} raised; the model reads {answer[:200]!r} and may call it better")
    with findings.step("a wrong call is answered with an error, and does not end the run"):
        call = toolbox(TurnsConfig.of(args)).call(name, {"no_such_argument": 1}, timeout_s=bench.timeout_s)
        expect(findings.run(call, bench.timeout_s), "it answered nothing")


def _environment(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    async def call(function: Any, *values: Any, **named: Any) -> Any:
        return await call_in_time(function, bench.timeout_s, *values, **named)

    def run(function: Any, *values: Any, **named: Any) -> Any:
        return findings.run(call(function, *values, **named), bench.timeout_s)

    first: list[Any] = []
    for number in range(2):
        with findings.step("reset(seed, options) begins and returns (observation, info)"):
            made = run(load_function(path))
            begun = run(made.reset, seed=7, options={"row": 0})
            expect(isinstance(begun, tuple) and len(begun) == 2, f"reset returned {str(begun)[:100]}, no pair")
            first.append(begun[0])
            if begun[0]:
                check_observation(begun[0])
        if findings.failures:
            return
        if number and first[0] != first[1]:
            findings.warn("seed", "two resets with one seed differ, so the samples of a group play different games")
    with findings.step("step(action) returns (observation, reward, terminated, truncated, info)"):
        for action in ACTIONS:
            taken = run(made.step, action)
            expect(isinstance(taken, tuple) and len(taken) == 5, f"step returned {str(taken)[:100]}, no five values")
            observation, reward, terminated, truncated, _ = taken
            expect(isinstance(reward, int | float) and math.isfinite(reward), f"the reward is {reward!r}, no number")
            if terminated or truncated:
                break
            check_observation(observation)
    if hasattr(made, "close"):
        with findings.step("close()"):
            run(made.close)


def check_observation(observation: Any) -> None:
    """Text, or a list of messages."""
    if isinstance(observation, list):
        as_messages(observation, "the observation")
    else:
        expect(isinstance(observation, str), f"the observation is {observation!r}; it must be text or messages")


CONTRACTS = {"--rollout-tools": _tool, "--rollout-environment": _environment}
