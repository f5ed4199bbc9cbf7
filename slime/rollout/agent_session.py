"""A sample that an agent program plays, which knows nothing of training.

The adapter of slime.agent stands between the agent and the engines, and makes samples of its turns.
"""

from __future__ import annotations

import json
import threading
import uuid
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from slime.agent.adapters import BaseAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.rollout.tools import turns_config
from slime.utils.types import Sample

TURN_TIMEOUT_S = 1800.0

Agent = Callable[[str, str], Awaitable[float]]
"""(URL of the adapter, session id) -> reward; the session id is the API key."""

_SERVERS: dict[tuple[type[BaseAdapter], str, str], tuple[BaseAdapter, AppHandle]] = {}
_SERVERS_LOCK = threading.Lock()


async def play(
    args: Namespace,
    sample: Sample,
    sampling_params: dict[str, Any],
    agent: Agent,
    *,
    adapter_class: type[BaseAdapter] = OpenAIAdapter,
    host: str = "127.0.0.1",
    evaluation: bool = False,
) -> Sample | list[Sample]:
    """Let ``agent`` play and return the samples of its session; an ABORTED sample when it did not say a word.

    A turn has ``max_new_tokens``, and a session ``--rollout-max-turns`` and ``--rollout-max-context-len``.

    Args:
        adapter_class: the protocol that the agent speaks.
        host: where this process listens, as the agent reaches it.
        evaluation: whether ``--eval-max-context-len`` bounds it.
    """
    adapter, url = _adapter_of(args, adapter_class, host, sample.apply_chat_template_kwargs)
    max_context_tokens = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    sid = uuid.uuid4().hex
    adapter.open_session(
        sid,
        sampling_overrides=sampling_params,  # what is drawn must be what is trained, whatever the agent asks for
        max_context_tokens=max_context_tokens or 0,
    )
    try:
        reward = await agent(url, sid)
    except BaseException:
        await adapter.drop_session(sid)
        raise
    samples = await adapter.finish_session(sid, base_sample=sample, reward=reward, extra_metadata=sample.metadata)
    if samples:
        return samples
    sample.status = Sample.Status.ABORTED
    return sample


def _adapter_of(
    args: Namespace, adapter_class: type[BaseAdapter], host: str, template_kwargs: dict[str, Any]
) -> tuple[BaseAdapter, str]:
    """Return the adapter of this process and its URL; the first call starts it."""
    key = (adapter_class, host, json.dumps(template_kwargs, sort_keys=True))
    config = turns_config(args)
    with _SERVERS_LOCK:
        if key not in _SERVERS:
            adapter = adapter_class(
                tokenizer=GenerateState(args).tokenizer,
                sglang_url=get_model_url(args, "default"),
                tool_parser=config.sglang_tool_call_parser,
                reasoning_parser=config.sglang_reasoning_parser,
                max_turns_per_sid=config.rollout_max_turns,
                generate_timeout_s=TURN_TIMEOUT_S,
                chat_template_kwargs=template_kwargs,
            )
            _SERVERS[key] = (adapter, run_app_in_thread(adapter.app, host=host))
        adapter, handle = _SERVERS[key]
        return adapter, f"http://{host}:{handle.port}"


def stop_servers() -> None:
    """Stop every adapter of this process; a job ends them with the process."""
    with _SERVERS_LOCK:
        while _SERVERS:
            _, (_, handle) = _SERVERS.popitem()
            handle.stop()
