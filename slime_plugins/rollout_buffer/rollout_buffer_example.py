"""``--rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout``.

Trajectories are made elsewhere and wait in a rollout buffer service; a rollout reads them, tokenises them and hands
them over through the data source, so that what is not needed yet stays there, and is saved with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from slime.flags.cluster import add_cluster_arguments
from slime.flags.config import FlagConfig
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sft_rollout import mask_generator
from slime.utils.async_utils import run
from slime.utils.errors import ConfigError, DataError, DeadlineError
from slime.utils.http_utils import add_job_servers, post
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.net import http_url
from slime.utils.types import Sample

__all__ = ["generate_rollout"]

logger = logging.getLogger(__name__)

POLL_S = 2.0
REQUEST_TIMEOUT_S = 120.0
SEEN_KEY = "rollout_buffer_instance_ids"
"""Under which the data source keeps the instances that were read, for the start after a resume."""
_STARTED: set[str] = set()
"""Services that this process has told to start."""


@dataclass(frozen=True, kw_only=True)
class BufferConfig(FlagConfig, flags=(add_cluster_arguments,)):
    """Settings of the requests to the service: a flag, and a key of ``--custom-config-path``."""

    rollout_timeout_s: float
    rollout_buffer_num_process: int = 100


def generate_rollout(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Take ``--rollout-batch-size`` groups from the service at ``--rollout-buffer-url``.

    Raises:
        ConfigError: asked to evaluate, or no address was given.
        DeadlineError: the service has no complete group after ``--fetch-trajectory-retry-times`` questions in a row,
            or ``--rollout-timeout-s`` passed.
    """
    if evaluation:
        raise ConfigError("The rollout buffer has no evaluation. Set --eval-function-path.")
    if not args.rollout_buffer_url:
        raise ConfigError(
            "--rollout-buffer-url is not set; it is the address of the rollout buffer, http://host:8889."
        )
    timeout_s = BufferConfig.of(args).rollout_timeout_s
    metrics = run(_fill(args, data_buffer, timeout_s), timeout_s + REQUEST_TIMEOUT_S)
    return RolloutFnTrainOutput(samples=data_buffer.get_samples(args.rollout_batch_size), metrics=metrics)


async def _fill(args: Namespace, data_buffer: Any, timeout_s: float) -> dict[str, Any]:
    """Read from the service until the data source holds a rollout."""
    url = args.rollout_buffer_url.rstrip("/")
    add_job_servers(url)
    await _start_once(args, url, data_buffer)
    missing = args.rollout_batch_size - data_buffer.get_buffer_length()
    items: list[dict[str, Any]] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    meta_info: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    empty = 0
    while len(groups) < missing:
        answer = await post(f"{url}/get_rollout_data", {}, timeout_s=REQUEST_TIMEOUT_S)
        if answer.get("success"):
            empty = 0
            items += answer["data"]["data"]
            groups = _whole_groups(items, args.n_samples_per_prompt)
            meta_info = answer["data"].get("meta_info") or {}
            continue
        empty += 1
        retries = args.fetch_trajectory_retry_times
        wanted = f"{len(items)} of {missing * args.n_samples_per_prompt} items are there"
        if 0 <= retries < empty:
            raise DeadlineError(
                f"The rollout buffer at {url} had no complete group {empty} times in a row; {wanted}. See the log of "
                "its generator, or raise --fetch-trajectory-retry-times."
            )
        if time.monotonic() > deadline:
            raise DeadlineError(f"The rollout buffer at {url} did not fill within {timeout_s:.0f} s; {wanted}.")
        await asyncio.sleep(POLL_S)
    if groups:
        taken = {name: group[: args.n_samples_per_prompt] for name, group in groups.items()}
        _hand_over(data_buffer, taken, mask_generator(args))
    return {f"rollout_buffer/{name}": value for name, value in meta_info.items() if isinstance(value, int | float)}


async def _start_once(args: Namespace, url: str, data_buffer: Any) -> None:
    """Tell the service to generate, on the first rollout of this process."""
    if url in _STARTED:
        return
    params = {
        "max_tokens": args.rollout_max_response_len,
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
    }
    payload = {
        "num_process": str(BufferConfig.of(args).rollout_buffer_num_process),
        "num_epoch": str(args.num_epoch or 1),
        "remote_engine_url": http_url(args.sglang_router_ip, args.sglang_router_port),
        "remote_buffer_url": url,
        "task_type": args.rollout_task_type,
        "input_file": str(args.prompt_data),
        "num_repeat_per_sample": str(args.n_samples_per_prompt),
        "max_tokens": str(args.rollout_max_response_len),
        "sampling_params": params,
        "tokenizer_path": args.hf_checkpoint,
        "skip_instance_ids": list(data_buffer.get_metadata().get(SEEN_KEY, [])),
    }
    if kwargs := getattr(args, "apply_chat_template_kwargs", None):
        payload["chat_template_kwargs"] = kwargs
    await post(f"{url}/start_rollout", payload, timeout_s=REQUEST_TIMEOUT_S)
    _STARTED.add(url)


def _whole_groups(items: list[dict[str, Any]], size: int) -> dict[str, list[dict[str, Any]]]:
    """Return the items of each instance that has ``size`` of them or more."""
    by_instance: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        by_instance.setdefault(str(item["instance_id"]), []).append(item)
    whole = {name: group for name, group in by_instance.items() if len(group) >= size}
    if len(whole) < len(by_instance):
        short = {name: len(group) for name, group in by_instance.items() if name not in whole}
        logger.warning("Groups with fewer than %d items are left out: %s", size, short)
    return whole


def _hand_over(
    data_buffer: Any, groups: dict[str, list[dict[str, Any]]], generator: MultiTurnLossMaskGenerator
) -> None:
    """Give groups of samples, the newest first, and their instances to the data source."""
    newest_first = sorted(groups.values(), key=lambda group: max(i.get("timestamp", 0.0) for i in group), reverse=True)
    data_buffer.add_samples([_group(data_buffer, group, generator) for group in newest_first])
    seen = [*data_buffer.get_metadata().get(SEEN_KEY, []), *groups]
    data_buffer.update_metadata({SEEN_KEY: seen})


def _group(data_buffer: Any, items: list[dict[str, Any]], generator: MultiTurnLossMaskGenerator) -> list[Sample]:
    """Make the samples of one instance, numbered by the data source's own counters."""
    group_index = data_buffer.sample_group_index
    data_buffer.sample_group_index += 1
    group = []
    for item in items:
        sample = sample_of(item, generator)
        sample.group_index, sample.index = group_index, data_buffer.sample_index
        data_buffer.sample_index += 1
        group.append(sample)
    return group


def sample_of(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> Sample:
    """Make a finished sample of an item: the response begins at the first word of the assistant."""
    messages = item["messages"]
    extra_info = item.get("extra_info") or {}
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=extra_info.get("tools"))
    [response_length] = generator.get_response_lengths([loss_mask])
    first_answer = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first_answer is None or response_length == 0:
        raise DataError(f"The item of instance {item['instance_id']} has nothing to train: no word of the assistant.")
    was_cut = extra_info.get("finish_reason") in ("length", "abort")
    return Sample(
        prompt=messages[:first_answer],
        tokens=token_ids,
        response=str(messages[-1].get("content") or ""),
        response_length=response_length,
        loss_mask=loss_mask[-response_length:],
        label=extra_info.get("label"),
        reward=item["reward"],
        status=Sample.Status.TRUNCATED if was_cut else Sample.Status.COMPLETED,
        metadata={"instance_id": item["instance_id"], "extra_info": extra_info},
    )
