"""``--custom-generate-function-path examples.agent_calculator.generate.generate``.

Each sample is played by an agent that knows nothing of training: a loop around the ``openai`` client with a tool that
multiplies.  The adapter between it and the engines writes its turns down; they come back as samples.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from typing import Any

import openai

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_TURNS = 8
TURN_TIMEOUT_S = 1800.0
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

_SERVERS: list[tuple[OpenAIAdapter, AppHandle]] = []
_SERVERS_LOCK = threading.Lock()


def adapter_of(args: Any) -> tuple[OpenAIAdapter, str]:
    """The adapter of this process and its URL; started on the first call."""
    with _SERVERS_LOCK:
        if not _SERVERS:
            adapter = OpenAIAdapter(
                tokenizer=GenerateState(args).tokenizer,
                sglang_url=get_model_url(args, "default"),
                tool_parser=getattr(args, "sglang_tool_call_parser", None),
                reasoning_parser=getattr(args, "sglang_reasoning_parser", None),
                max_turns_per_sid=MAX_TURNS,
                generate_timeout_s=TURN_TIMEOUT_S,
            )
            _SERVERS.append((adapter, run_app_in_thread(adapter.app, host="127.0.0.1")))
        adapter, handle = _SERVERS[0]
        return adapter, f"http://127.0.0.1:{handle.port}/v1"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Let the agent answer ``sample.prompt``; the samples of its session, with the reward of the last answer."""
    adapter, url = adapter_of(args)
    sid = uuid.uuid4().hex
    adapter.open_session(
        sid,
        sampling_overrides=sampling_params,  # what is drawn must be what is trained, whatever the agent asks for
        max_context_tokens=getattr(args, "rollout_max_context_len", None) or 0,
    )
    try:
        answer = await agent(url, sid, str(sample.prompt))
    except openai.APIError as error:  # a limit was hit, or the rollout ended
        logger.info("The agent of sample %s stopped: %s", sample.index, error)
        answer = ""
    correct = answer.strip().rstrip(".").endswith(str(sample.label))
    samples = await adapter.finish_session(sid, base_sample=sample, reward=float(correct))
    if samples:
        return samples
    sample.status = Sample.Status.ABORTED
    return sample


async def agent(url: str, key: str, question: str) -> str:
    """Any program would do: it sends a conversation, runs the tools it is asked for, and ends with an answer."""
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
    """The tool.  Wrong arguments are an answer like any other: the policy is to learn from it."""
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) * int(values["b"]))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
