"""What both protocols share: the call of the engine, sessions, and small translations.

``call_sglang_generate`` is looked up here at every turn, so replacing it replaces the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime.agent.trajectory import Message, TurnRecord
from slime.utils.errors import EngineError
from slime.utils.http_utils import POST_TIMEOUT_S, post
from slime.utils.sglang_meta import read_output_tokens

__all__ = [
    "AdapterError",
    "Reply",
    "Session",
    "TurnRecord",
    "call_sglang_generate",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]

logger = logging.getLogger(__name__)

DEFAULT_SID = "default"
MAX_RESUMES = 6
"""How often one turn goes on after an abort; each weight update may cause one."""
RESUME_WAIT_S = 1.0
CONNECT_RETRIES = 60
"""One second apart: an engine that is restarted is back by then, and a dead one is reported."""


class AdapterError(Exception):
    """A request that gets an error as its answer, in the words of the protocol."""

    def __init__(self, status: int, message: str, *, code: str | None = None, may_retry: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """A finer name of the error, where the protocol has one."""
        self.may_retry = may_retry
        """False tells the official clients not to try the same again."""


@dataclass(kw_only=True)
class Session:
    """One agent's conversation, or its several ones."""

    sid: str
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    sampling_overrides: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    """Prompt and response of a turn together; 0: the engine's own limit."""
    num_turns: int = 0
    """Turns begun, those in flight included."""
    is_closed: bool = False
    hit_context_limit: bool = False
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(kw_only=True)
class Reply:
    """One turn's answer."""

    message: Message
    """As the chat template gets it when the conversation goes on."""
    finish_reason: str
    """In the protocol's words."""
    content: Any = None
    """In the protocol's form: Anthropic's content blocks, OpenAI's message."""


async def call_sglang_generate(
    sglang_url: str,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    session_id: str | None = None,
    tokenizer: Any = None,
    timeout_s: float = POST_TIMEOUT_S,
    max_resumes: int = MAX_RESUMES,
) -> TurnRecord:
    """One turn of the engine.

    A turn that is aborted (weights were updated, a rollout ended) goes on from the tokens it has; the record says
    which weights drew which tokens.  Cancelling the coroutine closes the connection, on which SGLang ends the request.

    Args:
        sglang_url: of the router or an engine, with or without ``/generate``.
        input_ids: the prompt.
        sampling_params: SGLang's.
        session_id: sent as routing key, so that a session's turns can share an engine's prefix cache.
        tokenizer: decodes the drawn ids; without one the engine's text is taken.
        timeout_s: deadline of the whole turn in seconds.
        max_resumes: continuations after an abort before the turn is given up as ``abort``.

    Raises:
        EngineError: the engine cannot be reached, refuses, or does not answer in time.
    """
    url = f"{sglang_url.rstrip('/').removesuffix('/generate')}/generate"
    headers = {"X-SMG-Routing-Key": session_id} if session_id else {}
    params: dict[str, Any] = {
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    params |= dict(sampling_params)
    began_s = time.monotonic()
    ids: list[int] = []
    log_probs: list[float] = []
    texts: list[str] = []
    spans: list[tuple[str | None, int]] = []
    metas: list[dict[str, Any]] = []
    reason: Mapping[str, Any] = {}
    for attempt in range(max_resumes + 1):
        if attempt:
            await asyncio.sleep(RESUME_WAIT_S)
        left = dict(params)
        if left.get("max_new_tokens") is not None:
            left["max_new_tokens"] -= len(ids)
            if left["max_new_tokens"] <= 0:
                reason = {"type": "length"}
                break
        payload = {
            "input_ids": [*input_ids, *ids],
            "sampling_params": left,
            "return_logprob": True,
            "rid": uuid.uuid4().hex,
        }
        remaining_s = timeout_s - (time.monotonic() - began_s)
        if remaining_s <= 0:
            raise TimeoutError(f"A turn was aborted {attempt} times and did not end within {timeout_s:.0f} s.")
        output = await post(url, payload, CONNECT_RETRIES, headers, timeout_s=remaining_s)
        meta = _meta_of(output)
        new_ids, new_log_probs = read_output_tokens(meta)
        ids += new_ids
        log_probs += new_log_probs
        texts.append(output.get("text") or "")
        version = meta.get("weight_version")
        spans.append((None if version is None else str(version), len(new_ids)))
        metas.append({key: value for key, value in meta.items() if not key.endswith("_logprobs")})
        reason = meta["finish_reason"]
        if reason.get("type") != "abort":
            break
    return TurnRecord(
        prompt_ids=list(input_ids),
        output_ids=ids,
        output_log_probs=log_probs,
        text=_text_of(ids, texts, reason, tokenizer),
        finish_reason=str(reason.get("type")),
        weight_spans=spans,
        meta_infos=metas,
        began_s=began_s,
        ended_s=time.monotonic(),
    )


def _meta_of(output: Any) -> dict[str, Any]:
    meta = output.get("meta_info") if isinstance(output, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        raise EngineError(
            f"The engine answered a turn with {str(output)[:300]!r}; /generate must give an object with 'text' and "
            "'meta_info', whose finish_reason is an object. Look at the log of the engine or the router."
        )
    if "output_token_logprobs" not in meta and meta.get("completion_tokens"):
        raise EngineError("The engine's answer has tokens without log-probs, which cannot be trained on.")
    return meta


def _text_of(ids: list[int], texts: list[str], reason: Mapping[str, Any], tokenizer: Any) -> str:
    """The drawn text without its stop token.  An interrupted turn may be split inside a character: decode it whole."""
    text = "".join(texts)
    if tokenizer is not None and len(texts) > 1:
        text = tokenizer.decode(ids, skip_special_tokens=False)
    matched = reason.get("matched")
    if isinstance(matched, int) and tokenizer is not None:
        matched = tokenizer.decode([matched], skip_special_tokens=False)
    return text.removesuffix(matched) if isinstance(matched, str) and matched else text


def flatten_content(content: Any) -> str:
    """Text of a message's content: a string, or a list of parts; parts that are no text leave a mark."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part.get("type") == "tool_result":
            texts.append(flatten_content(part.get("content")))
        else:
            texts.append(f"[{part.get('type', 'part')} omitted]")
    return "\n".join(text for text in texts if text)


def tool_call_dict(name: str, args: Any, call_id: str | None = None) -> dict[str, Any]:
    """A tool call as chat templates expect it: arguments as an object, also when they come as JSON text."""
    if isinstance(args, str):
        try:
            args = json.loads(args or "{}")
        except json.JSONDecodeError:
            pass  # the client wrote it; the template shows it as it is
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {} if args is None else args}}
    return {"id": call_id, **call} if call_id else call


def manager_finish_reason(raw_finish: str, tool_uses: Sequence[Any] | None = None) -> str:
    """The engine's finish reason, or ``tool_calls`` where the turn ended by itself with a call of a tool."""
    return "tool_calls" if tool_uses and raw_finish == "stop" else raw_finish


def sid_from_bearer(request: web.BaseRequest) -> str | None:
    """The session that the header ``Authorization: Bearer`` names; agents send their API key there."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() or None if kind.lower() == "bearer" else None


def sid_from_body(body: Mapping[str, Any]) -> str | None:
    """The session that ``metadata.session_id`` or ``user`` of the body names."""
    metadata = body.get("metadata")
    found = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    found = found or body.get("user")
    return str(found) if found else None
