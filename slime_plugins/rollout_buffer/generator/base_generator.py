"""``math``: one answer for each prompt, graded by its box; the pattern for generators of your own.

Worker processes play instances against the engines' OpenAI endpoint and post each item to the buffer.  A subclass of
``Worker`` with another ``play`` makes another generator.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

from slime.rollout.engine_request import CUT
from slime.rollout.prompt_files import read_file
from slime.rollout.rm_hub import async_rm
from slime.utils.errors import ConfigError, GraderError, SlimeError
from slime.utils.http_utils import post
from slime.utils.types import Sample

TASK_TYPE = "math"

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
"""Calls of the engine for one answer: weight updates abort it, the next call continues."""
ABORT_WAIT_S = 1.0
MODEL = "default"

Message = dict[str, Any]


class Worker:
    """A player of the instances of one process."""

    def __init__(self, data: Mapping[str, Any], concurrency: int) -> None:
        self.engine_url = str(data["remote_engine_url"]).rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.buffer_url = str(data["remote_buffer_url"]).rstrip("/").removesuffix("/buffer/write") + "/buffer/write"
        given = dict(data.get("sampling_params") or {})
        max_tokens = given.pop("max_tokens", None) or data.get("max_tokens") or 4096
        # Numbers may come as strings.
        self.sampling = {"max_tokens": int(max_tokens)} | {key: float(value) for key, value in given.items()}
        kwargs = data.get("chat_template_kwargs")
        self.template = {"chat_template_kwargs": kwargs} if kwargs else {}
        self.slots = asyncio.Semaphore(concurrency)

    async def run(self, instances: list[dict[str, Any]]) -> int:
        """Play all of them; returns how many failed."""
        return sum(await asyncio.gather(*[self._play_and_post(instance) for instance in instances]))

    async def _play_and_post(self, instance: dict[str, Any]) -> int:
        async with self.slots:
            try:
                item = await self.play(instance)
                await post(self.buffer_url, {"uid": uuid.uuid4().hex, "instance_id": instance["instance_id"], **item})
            except SlimeError as error:
                logger.error("Instance %s has no item: %s", instance["instance_id"], error)
                return 1
            return 0

    async def play(self, instance: dict[str, Any]) -> dict[str, Any]:
        """Play one instance; returns ``{"messages", "reward", "extra_info"}``."""
        began = time.time()
        text, finish_reason = await self.answer(instance["messages"])
        sample = Sample(prompt=instance["messages"], response=text, label=instance["label"])
        reward = await async_rm(Namespace(rm_type="deepscaler"), sample)
        if not sample.is_graded:
            raise GraderError(f"it could not be graded: {sample.metadata['reward_error']}")
        extra_info = {"finish_reason": finish_reason, "label": instance["label"], "seconds": time.time() - began}
        messages = [*instance["messages"], {"role": "assistant", "content": text}]
        return {"messages": messages, "reward": float(reward), "extra_info": extra_info}

    async def answer(self, messages: list[Message]) -> tuple[str, str]:
        """Return the engine's answer and its finish reason; an aborted one continues from its text.

        ``max_tokens`` bounds the answer as a whole.
        """
        text, reason, left = "", "abort", int(self.sampling["max_tokens"])
        for attempt in range(MAX_ATTEMPTS):
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": False}
            body |= {**self.sampling, **self.template, "max_tokens": left}
            if text:
                partial = {"role": "assistant", "content": text}
                body |= {"messages": [*messages, partial], "continue_final_message": True}
                body["add_generation_prompt"] = False
            answer = await post(self.engine_url, body)
            piece, reason = _read_choice(answer)
            text += piece
            left -= int((answer.get("usage") or {}).get("completion_tokens") or 0)
            if reason != "abort":
                break
            text = text.rstrip(CUT)  # the engine reads text: a character without all of its bytes is drawn again
            if left <= 0:
                return text, "length"
            if attempt + 1 < MAX_ATTEMPTS:
                await asyncio.sleep(ABORT_WAIT_S)
        return text, reason


def _read_choice(answer: Any) -> tuple[str, str]:
    """Return ``(text, finish reason)``; reasoning that the engine took out of the text is put back."""
    try:
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        reasoning = choice["message"].get("reasoning_content")
        return (f"<think>{reasoning}</think>{text}" if reasoning else text), choice.get("finish_reason") or "stop"
    except (TypeError, KeyError, IndexError) as error:
        raise SlimeError(f"The engine's answer is no chat completion: {str(answer)[:300]}.") from error


def read_instances(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every instance as many times as it is to be played, except those named in ``skip_instance_ids``.

    A row has ``prompt`` (text or messages) or ``messages``, ``label``, and optionally ``instance_id``.  In later
    epochs, ids get a suffix, so that each epoch makes separate groups.
    """
    skipped = Counter(str(name) for name in data.get("skip_instance_ids") or [])
    instances = []
    for epoch in range(int(data.get("num_epoch", 1))):
        for number, row in enumerate(read_file(str(data["input_file"]))):
            prompt = row.get("messages") or row.get("prompt")
            if not prompt:
                raise ConfigError(f"Row {number} of {data['input_file']} has neither 'prompt' nor 'messages'.")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            name = f"{row.get('instance_id', number)}" + (f"#{epoch}" if epoch else "")
            if not skipped[name]:
                instance = {"instance_id": name, "messages": messages, "label": row.get("label")}
                instances += [instance] * int(data.get("num_repeat_per_sample", 1))
    return instances


def work(data: dict[str, Any], instances: list[dict[str, Any]], concurrency: int) -> None:
    """Run a worker process."""
    logging.basicConfig(level=logging.INFO)

    async def run() -> int:
        return await Worker(data, concurrency).run(instances)

    failed = asyncio.run(run())
    if failed:
        raise SystemExit(f"{failed} of {len(instances)} instances failed; see the lines above.")


def run_rollout(data: dict[str, Any]) -> None:
    """Play everything that ``data`` (the body of ``/start_rollout``) asks for, ``num_process`` answers at a time."""
    instances = read_instances(data)
    in_parallel = max(1, min(int(data.get("num_process", 1)), len(instances) or 1))
    num_workers = min(in_parallel, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    workers = []
    for index in range(num_workers):
        concurrency = in_parallel // num_workers + (index < in_parallel % num_workers)
        worker = context.Process(target=work, args=(dict(data), instances[index::num_workers], concurrency))
        worker.start()
        workers.append(worker)
    for worker in workers:  # the service that started this process ends it, and them, when it must
        worker.join()
    codes = [worker.exitcode for worker in workers]
    if any(codes):
        raise SystemExit(f"Workers of {TASK_TYPE} ended with codes {codes}.")
