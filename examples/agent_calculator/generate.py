"""``--custom-generate-function-path examples.agent_calculator.generate.generate``.

An ordinary agent, a loop around the ``openai`` client with a multiplication tool, plays each sample.
``slime.ext.agent.session`` connects it to the engines through an adapter.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import openai

from slime.ext.agent.session import TURN_TIMEOUT_S, play
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Let the agent answer ``sample.prompt``; return its session's samples with the reward of its last answer."""

    async def answer(url: str, sid: str) -> float:
        try:
            said = await agent(f"{url}/v1", sid, str(sample.prompt))
        except openai.APIError as error:  # a limit was hit, or the rollout ended
            logger.info("The agent of sample %s stopped: %s", sample.index, error)
            said = ""
        return float(said.strip().rstrip(".").endswith(str(sample.label)))

    return await play(args, sample, sampling_params, answer)


async def agent(url: str, key: str, question: str) -> str:
    """Send the conversation and run the requested tools until the model answers.  Any other agent program would do."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=TURN_TIMEOUT_S) as client:
        while True:
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = multiply(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def multiply(arguments: str) -> str:
    """The tool.  Invalid arguments return an error, from which the policy can learn."""
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) * int(values["b"]))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
