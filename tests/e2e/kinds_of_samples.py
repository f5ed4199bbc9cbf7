"""Requests samples of every kind from an engine through slime's rollout code."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.rollout.engine_request import append_output, request_payload
from slime.utils.http_utils import add_job_servers, get, init_http_client, post
from slime.utils.sglang_meta import decode_generate_answer
from slime.utils.types import Sample

ABORT_AT_TOKENS = 40


async def go_on(
    args: Namespace, url: str, sample: Sample, sampling: Mapping[str, Any], num_tokens: int, *, abort_at: int = 0
) -> None:
    """Continue a sample as a rollout does; with ``abort_at``, stop it once it has that many tokens."""
    params = {**sampling, "max_new_tokens": num_tokens + sample.response_length}
    nothing = Namespace(tokenizer=None, processor=None)
    payload = request_payload(args, sample, params, nothing)  # type: ignore[arg-type]
    answer = asyncio.create_task(post(f"{url}/generate", payload, 1, decode=decode_generate_answer))
    if abort_at:
        # By tokens, not by time: the more tokens a fast machine generates, the larger the largest error among them.
        while sum(one["num_used_tokens"] for one in (await get(f"{url}/v1/loads?include=core"))["loads"]) < abort_at:
            await asyncio.sleep(0.01)
        await post(f"{url}/abort_request", {"abort_all": True}, 1, decode=lambda body: body)
    append_output(args, sample, await answer)


async def collect(args: Namespace, url: str, sampling: Mapping[str, Any]) -> list[Sample]:
    """Return four samples: two complete ones with a common prefix, one aborted, one with a tool's text."""
    init_http_client(args)
    add_job_servers(url)
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, *range(20, 60)], [11, 12, 13], [30, 31]]
    samples = [Sample(index=index, prompt="", tokens=prompt) for index, prompt in enumerate(prompts)]
    await go_on(args, url, samples[0], sampling, 16)
    await go_on(args, url, samples[1], sampling, 24)
    await go_on(args, url, samples[2], sampling, 1500, abort_at=ABORT_AT_TOKENS)
    assert samples[2].status == Sample.Status.ABORTED and 0 < samples[2].response_length < 1500
    await go_on(args, url, samples[2], sampling, 8)
    await go_on(args, url, samples[3], sampling, 6)
    samples[3].append_response_tokens(tokens=[70, 71, 72], trainable=False)
    samples[3].status = Sample.Status.PENDING
    await go_on(args, url, samples[3], sampling, 6)
    samples[3].append_response_tokens(tokens=[73, 74], trainable=False)
    return samples
