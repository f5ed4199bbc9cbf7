"""``--custom-generate-function-path generate_with_tau.generate``: an agent between a user and a database.

A turn that calls one of the environment's tools is that action; any other turn is a message to the user.  The task is
the sample's ``metadata["task_index"]``.  Settings, by ``--custom-config-path``: ``tau_env`` and ``tau_env_settings``
(for ``get_env``), ``tau_max_turns``.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import tau_env

from slime.rollout.multi_turn import converse
from slime.rollout.parsing import parse_model_output
from slime.rollout.prompts import render
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample

MAX_TURNS = 8


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Play one task; the reward is the environment's, or 0 if a limit ended the conversation."""
    env, action_class = tau_env.get_env(getattr(args, "tau_env", "orders"), **getattr(args, "tau_env_settings", {}))
    # The simulated user may be a model behind HTTP, whose calls must not block the event loop.
    begun = await asyncio.to_thread(env.reset, task_index=int(sample.metadata["task_index"]))
    if not sample.tokens:
        messages = [{"role": "system", "content": env.wiki}] if env.wiki else []
        messages.append({"role": "user", "content": begun.observation})
        tokenizer, kwargs = GenerateState(args).tokenizer, sample.apply_chat_template_kwargs
        sample.prompt = render(tokenizer, messages, env.tools_info, f"Sample {sample.index}", **kwargs)
    reward = 0.0
    actions = sample.metadata.setdefault("actions", [])
    for name, arguments in actions:  # replay the actions of an interrupted sample
        await asyncio.to_thread(env.step, action_class(name=name, kwargs=arguments))

    async def environment(turn: str) -> list[dict[str, Any]] | None:
        nonlocal reward
        parsed = parse_model_output(
            turn,
            tools_schema=env.tools_info,
            tool_parser_name=getattr(args, "sglang_tool_call_parser", None),
            reasoning_parser_name=getattr(args, "sglang_reasoning_parser", None),
        )
        use = parsed.tool_uses[0] if parsed.tool_uses else None
        name, arguments = (use["name"], use["input"]) if use else (tau_env.RESPOND, {"content": parsed.text})
        response = await asyncio.to_thread(env.step, action_class(name=name, kwargs=arguments))
        actions.append((name, arguments))
        if response.done:
            reward = float(response.reward)
            return None
        said_by = {"role": "tool", "name": name} if use else {"role": "user"}
        return [said_by | {"content": response.observation}]

    max_turns = getattr(args, "tau_max_turns", MAX_TURNS)
    sample = await converse(args, sample, sampling_params, environment, max_turns=max_turns)
    if sample.status is not Sample.Status.ABORTED:
        sample.reward = reward
    return sample
