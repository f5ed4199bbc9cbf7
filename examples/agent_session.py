"""A sample that an agent program plays: the adapter below the examples whose agent knows nothing of training.

The adapter of slime.agent stands between the agent and the engines, and makes samples of its turns.
"""

from __future__ import annotations

import threading
import uuid
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from slime.agent.adapters import BaseAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.types import Sample

MAX_TURNS = 8
TURN_TIMEOUT_S = 1800.0

Agent = Callable[[str, str], Awaitable[float]]
"""(URL of the adapter, session id) -> reward; the session id is the API key."""

_SERVERS: dict[tuple[type[BaseAdapter], str], tuple[BaseAdapter, AppHandle]] = {}
_SERVERS_LOCK = threading.Lock()


async def play(
    args: Namespace,
    sample: Sample,
    sampling_params: dict[str, Any],
    agent: Agent,
    *,
    adapter_class: type[BaseAdapter] = OpenAIAdapter,
    host: str = "127.0.0.1",
) -> Sample | list[Sample]:
    """Let ``agent`` play and return the samples of its session; an ABORTED sample when it did not say a word.

    Args:
        adapter_class: the protocol that the agent speaks.
        host: where this process listens, as the agent reaches it.
    """
    adapter, url = _adapter_of(args, adapter_class, host)
    sid = uuid.uuid4().hex
    adapter.open_session(
        sid,
        sampling_overrides=sampling_params,  # what is drawn must be what is trained, whatever the agent asks for
        max_context_tokens=getattr(args, "rollout_max_context_len", None) or 0,
    )
    try:
        reward = await agent(url, sid)
    except BaseException:
        await adapter.drop_session(sid)
        raise
    samples = await adapter.finish_session(sid, base_sample=sample, reward=reward)
    if samples:
        return samples
    sample.status = Sample.Status.ABORTED
    return sample


def _adapter_of(args: Namespace, adapter_class: type[BaseAdapter], host: str) -> tuple[BaseAdapter, str]:
    """Return the adapter of this process and its URL; the first call starts it."""
    with _SERVERS_LOCK:
        if (adapter_class, host) not in _SERVERS:
            adapter = adapter_class(
                tokenizer=GenerateState(args).tokenizer,
                sglang_url=get_model_url(args, "default"),
                tool_parser=getattr(args, "sglang_tool_call_parser", None),
                reasoning_parser=getattr(args, "sglang_reasoning_parser", None),
                max_turns_per_sid=MAX_TURNS,
                generate_timeout_s=TURN_TIMEOUT_S,
            )
            _SERVERS[adapter_class, host] = (adapter, run_app_in_thread(adapter.app, host=host))
        adapter, handle = _SERVERS[adapter_class, host]
        return adapter, f"http://{host}:{handle.port}"


def stop_servers() -> None:
    """Stop every adapter of this process; a job ends them with the process."""
    with _SERVERS_LOCK:
        while _SERVERS:
            _, (_, handle) = _SERVERS.popitem()
            handle.stop()
