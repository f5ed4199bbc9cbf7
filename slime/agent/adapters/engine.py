"""One turn of the engine: its token-exact prompt, and the call.

Chat templates produce text, and encoding a rendered conversation may split the model's own output into other tokens
than were drawn.  If a conversation continues recorded ids, these ids are therefore kept, and only the text that the
template adds after them is encoded.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.agent.adapters.messages import PromptEncoder, read_part
from slime.agent.adapters.sessions import AdapterError, Session
from slime.agent.trajectory import KnownPrefix, Message, Pictures, TurnRecord
from slime.utils.chat_template import apply_chat_template, special_text, text_after_end
from slime.utils.errors import EngineError
from slime.utils.http_utils import post
from slime.utils.processing_utils import check_image_tokens, encode_image_for_rollout_engine, one_id_an_image
from slime.utils.sglang_meta import problem_with_answer, read_output_tokens

MAX_RESUMES = 6
"""Maximum continuations of one turn after aborts; each weight update may cause one."""
RESUME_WAIT_S = 1.0
CONNECT_RETRIES = 60
"""Retries one second apart: by then a restarted engine is back, or a dead one has been reported."""
_FIXED_SAMPLING_PARAMS = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
_PROBE = "\u2063probe\u2063"
"""Message content that no template changes and no conversation contains."""


def build_prompt_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    known: KnownPrefix | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    encode: PromptEncoder | None = None,
) -> list[int]:
    """Return the ids to send to the engine.

    Args:
        known: Prefix of the conversation whose ids were recorded with the same tools.
    """
    encode = encode or PromptEncoder(tokenizer, None)
    shown = {"tools": list(tools) if tools else None, **(template_kwargs or {})}

    def render(messages: Sequence[Message], **kwargs: Any) -> str:
        return apply_chat_template(tokenizer, messages, **shown | kwargs)

    text = render(messages, add_generation_prompt=True)
    rest = None if known is None else _text_after(tokenizer, render, text, known)
    if known is None or rest is None:
        return encode(text, messages)
    return known.ids + encode(rest, messages[len(known.messages) :], continues=True)


def _text_after(tokenizer: Any, render: Callable[..., str], text: str, known: KnownPrefix) -> str | None:
    head = render(known.messages, add_generation_prompt=False)
    if not text.startswith(head):
        return None
    last = {"role": known.messages[-1]["role"], "content": _PROBE}
    _, found, closure = render([*known.messages[:-1], last], add_generation_prompt=False).rpartition(_PROBE)
    if not found:
        return None
    # A turn that ended with a stop string has no stop token.
    end = special_text(tokenizer, known.ids[-1]) if known.finish_reason == "stop" and known.ids else ""
    return text_after_end(tokenizer, closure + text[len(head) :], closure, end)


async def call_sglang_generate(
    prompt_ids: Sequence[int],
    session: Session,
    body: Mapping[str, Any],
    *,
    adapter: Any,
    session_id: str | None = None,
    pictures: Sequence[Pictures] = (),
) -> TurnRecord:
    """Generate one turn.

    An aborted turn (weights were updated, a rollout ended) continues from its tokens, at most ``MAX_RESUMES`` times;
    the record tells which weights drew which tokens.  Cancelling the coroutine closes the connection, and SGLang then
    ends the request.

    Args:
        adapter: A ``BaseAdapter``, which provides the engine (``ask``), the processor, and the body's keys for token
            limits and stop strings.
        session_id: Sent as routing key, so that a session's turns can share an engine's prefix cache.

    Raises:
        AdapterError: a parameter of the request is invalid, or the prompt leaves no room.
        EngineError: the engine cannot be reached, refuses the request, or does not answer in time.
    """
    images = [image for part in pictures for image in part.images]
    keys = adapter.max_token_keys, adapter.stop_keys
    params = {**_FIXED_SAMPLING_PARAMS, **read_part(lambda: session.sampling_params(body, len(prompt_ids), *keys))}
    began_s = time.monotonic()
    ids: list[int] = []
    log_probs: list[float] = []
    spans: list[tuple[str | None, int]] = []
    metas: list[dict[str, Any]] = []
    reason: Mapping[str, Any] = {}
    text = ""
    for attempt in range(MAX_RESUMES + 1):
        if attempt:
            await asyncio.sleep(RESUME_WAIT_S)
        left = dict(params)
        if left.get("max_new_tokens") is not None:
            left["max_new_tokens"] -= len(ids)
            if left["max_new_tokens"] <= 0:
                reason = {"type": "length"}
                break
        sent = [*prompt_ids, *ids]
        payload = _inputs(sent, images, adapter.processor)
        payload |= {"sampling_params": left, "return_logprob": True, "rid": uuid.uuid4().hex}
        payload |= {"return_routed_experts": True} if adapter.replays_routes else {}
        output = await adapter.ask(payload, session_id)
        if problem := problem_with_answer(output, payload):
            raise EngineError(
                f"The answer to a turn cannot be used (request {payload['rid']}, {adapter.sglang_url}): {problem}"
            )
        meta = output["meta_info"]
        check_image_tokens("A turn", payload, meta, len(sent))
        # The texts of several calls may be cut within a character, so spoken_text decodes all ids together.
        text = "" if attempt else output.get("text") or ""
        new_ids, new_log_probs = read_output_tokens(meta)
        ids += new_ids
        log_probs += new_log_probs
        version = meta.get("weight_version")
        spans.append((None if version is None else str(version), len(new_ids)))
        metas.append({key: value for key, value in meta.items() if not key.endswith("_logprobs")})
        reason = meta["finish_reason"]
        if reason.get("type") != "abort":
            break
    return TurnRecord(
        prompt_ids=list(prompt_ids),
        output_ids=ids,
        output_log_probs=log_probs,
        finish_reason=str(reason.get("type")),
        text=text,
        weight_spans=spans,
        meta_infos=metas,
        began_s=began_s,
        ended_s=time.monotonic(),
        pictures=list(pictures),
    )


async def ask_router(sglang_url: str, payload: dict[str, Any], session_id: str | None) -> Any:
    """Post a request to the router or engine at ``sglang_url`` (with or without ``/generate``); return its answer."""
    headers = {"X-SMG-Routing-Key": session_id} if session_id else {}
    url = f"{sglang_url.rstrip('/').removesuffix('/generate')}/generate"
    return await post(url, payload, CONNECT_RETRIES, headers)


def spoken_text(tokenizer: Any, turn: TurnRecord) -> str:
    """Return the text of a turn without the stop token or stop string that ended it."""
    text = turn.text or tokenizer.decode(turn.output_ids, skip_special_tokens=False)
    reason = turn.meta_infos[-1].get("finish_reason") if turn.meta_infos else None
    matched = (reason or {}).get("matched")
    if reason is None and turn.finish_reason == "stop" and turn.output_ids[-1:] == [tokenizer.eos_token_id]:
        matched = turn.output_ids[-1]
    if isinstance(matched, int):
        matched = tokenizer.decode([matched], skip_special_tokens=False)
    return text.removesuffix(matched or "")


def _inputs(ids: list[int], images: list[Any], processor: Any) -> dict[str, Any]:
    """Return the request fields for ``ids`` and ``images``.

    Raises:
        AdapterError: the number of image tokens differs from the number of images, because the policy drew one.
    """
    if not images:
        return {"input_ids": ids}
    ids = one_id_an_image(ids, processor.image_token_id)
    if (places := ids.count(processor.image_token_id)) != len(images):
        raise AdapterError(400, f"The conversation has {len(images)} images and {places} image tokens.")
    return {"input_ids": ids, "image_data": [encode_image_for_rollout_engine(image) for image in images]}
