"""Streaming generation, which keeps the tokens of a request that does not complete.

``--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming`` replaces the built-in
generate function.  Tokens that have arrived are kept if the connection breaks, or if the engine does not respond after
the rollout was aborted.  After a broken connection the request continues from them, on another engine if necessary.

Each SGLang event repeats the whole response so far, so the traffic grows with the square of the response length.  For
long responses, raise ``--sglang-stream-interval`` (tokens between events).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout import sglang_rollout
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import NotForWorkers, WorkerPicker, router_would_drop
from slime.rollout.engine_request import (
    CUT,
    Decode,
    append_checked,
    append_output,
    check_answer,
    decoder_of,
    request_payload,
)
from slime.rollout.waiting import cancel_all
from slime.utils import http_utils
from slime.utils.errors import ConfigError, EngineError, ProcessError
from slime.utils.http_utils import RETRIED_STATUSES, HttpStatusError, post_for_events, waits_for_engines
from slime.utils.sglang_meta import decode_generate_answer, read_output_tokens
from slime.utils.types import Sample

__all__ = ["generate_streaming"]

logger = logging.getLogger(__name__)

RETRY_WAIT_S = 1.0
ABORT_POLL_S = 0.5
ABORT_GRACE_S = 3.0
"""Seconds for the engine to send its last event after the rollout is over."""


async def generate_streaming(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate one response as a stream and append it to ``sample``.

    Returns:
        The same object, with status COMPLETED, TRUNCATED or ABORTED.  An aborted sample holds the tokens that arrived.

    Raises:
        ConfigError: ``--sglang-incremental-streaming-output`` is set.
        EngineError: no engine answered, after as many attempts as the built-in generate function makes.
    """
    config, state = RolloutConfig.of(args), sglang_rollout.GenerateState(args)
    if config.sglang_incremental_streaming_output:
        raise ConfigError(
            "--sglang-incremental-streaming-output sends only new text in each event; generate_streaming needs the "
            "whole text. Drop the flag."
        )
    num_failed, deadline_s = 0, time.monotonic() + http_utils.POST_TIMEOUT_S
    while True:
        payload = request_payload(config, sample, sampling_params, state)
        if payload is None:
            return sample
        try:
            with trace_span(sample, "sglang_generate_stream") as span:
                output = await _read_stream(args, config, sample, payload | {"stream": True}, state)
                span.update(build_sglang_meta_trace_attrs(output["meta_info"]))
        except NotForWorkers:
            raise
        except ProcessError as error:
            if isinstance(error, HttpStatusError) and error.status not in RETRIED_STATUSES:
                raise  # the request is at fault
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            num_failed += not waits_for_engines(error) or time.monotonic() >= deadline_s
            if num_failed > config.request_retries:
                raise
            logger.warning(
                "The stream of sample %s broke; it continues from %d tokens: %s",
                sample.index,
                sample.response_length,
                error,
            )
            await asyncio.sleep(RETRY_WAIT_S)
            continue
        append_checked(args, sample, output, decoder_of(state, payload))
        return sample


async def _read_stream(
    args: Namespace, config: RolloutConfig, sample: Sample, payload: dict[str, Any], state: Any
) -> dict[str, Any]:
    """Return the answer, with finish reason ``abort`` if the rollout ended before it was complete.

    If the stream breaks before its last event, append what has arrived to the sample and raise the error.
    """
    decode = decoder_of(state, payload)
    latest: bytes | None = None  # the last event repeats all earlier ones, so only it is decoded

    async def read() -> None:
        nonlocal latest
        async for event in _events(config, sample, payload):
            if event != b"[DONE]":
                latest = event

    try:
        await _until_over(asyncio.create_task(read()), state)
        output = _decode(latest)
        if not state.aborted and not output["meta_info"].get("finish_reason"):
            raise EngineError(f"The stream of sample {sample.index} ended without a finish_reason.")
    except (ProcessError, asyncio.CancelledError) as error:
        output = _decode(latest)
        # If the last event has arrived, the answer is complete: only the end of the stream was lost.
        if not isinstance(error, ProcessError) or not _is_whole(output):
            if latest is not None:
                append_output(args, sample, _cut_off(output, decode), decode)
            raise
    output = _cut_off(output, decode)
    check_answer(config, sample, output, payload)
    return output


async def _until_over(reader: asyncio.Task[None], state: Any) -> None:
    """Wait until the stream ends, or until ``ABORT_GRACE_S`` seconds after the rollout was aborted."""
    given_s = 0.0
    try:
        while given_s < ABORT_GRACE_S:
            done, _ = await asyncio.wait([reader], timeout=ABORT_POLL_S)
            if done:
                return reader.result()
            given_s = given_s + ABORT_POLL_S if state.aborted else 0.0
    finally:
        await cancel_all([reader])


def _decode(event: bytes | None) -> dict[str, Any]:
    if event is None:
        return {"text": "", "meta_info": {}}
    output = decode_generate_answer(event)
    if not isinstance(output, dict) or not isinstance(output.get("meta_info"), dict):
        raise EngineError(f"An engine streamed {str(output)[:300]!r}; an event must have 'text' and 'meta_info'.")
    return output


def _is_whole(output: dict[str, Any]) -> bool:
    """Return True if the answer is complete and was not aborted."""
    reason = output["meta_info"].get("finish_reason")
    return isinstance(reason, dict) and reason.get("type") not in (None, "abort")


def _cut_off(output: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """Mark an unfinished answer as aborted, and return it.

    The engine holds back text before an incomplete character, but sends its ids, so the text is decoded from the ids.
    """
    if not output["meta_info"].get("finish_reason"):
        output["meta_info"]["finish_reason"] = {"type": "abort"}
        text = decode(read_output_tokens(output["meta_info"])[0]) if decode else ""
        output["text"] = text if text.endswith(CUT) else output.get("text")
    return output


async def _events(config: RolloutConfig, sample: Sample, payload: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the events of the request, from the router, or from a worker if the router would drop a field."""
    with contextlib.ExitStack() as stack:
        address, headers = config.router_url, config.routing_headers(sample.session_id)
        if router_would_drop(payload):
            picker = WorkerPicker(config)
            urls = await picker.urls()
            if not urls:
                raise EngineError("The router lists no worker.")
            address, headers = picker.choose(urls, sample.session_id), {}
            stack.enter_context(picker.counted(address))
        async with contextlib.aclosing(post_for_events(f"{address}/generate", payload, headers)) as events:
            async for event in events:
                yield event
