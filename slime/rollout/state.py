"""State that all requests of a process share: tokenizer, concurrency limit, sampling parameters, pending groups."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from slime.flags.security import trusts_remote_code
from slime.rollout.base_types import Group
from slime.rollout.config import RolloutConfig, rollout_config
from slime.rollout.prompt_template import encode
from slime.rollout.rm_hub import TOKENIZERS
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.sglang_meta import TOP_P_ASK


def training_sampling_params(config: RolloutConfig) -> dict[str, Any]:
    """Return the ``sampling_params`` of a training request."""
    params: dict[str, Any] = {
        "temperature": config.rollout_temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": config.rollout_max_response_len,
        "stop": config.rollout_stop,
        "stop_token_ids": config.rollout_stop_token_ids,
        "skip_special_tokens": config.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if config.rollout_top_p != 1.0:
        # The trainer renormalises over the nucleus that the engine sampled from, so it needs the ids in it.
        params["custom_params"] = {TOP_P_ASK: True}
    return params


PROMPTS_KEPT = 16
OBJECTS_PER_REQUEST = 256
"""Containers that a request in flight keeps alive: its tasks, connection, buffers, sample and spans."""
MIN_YOUNG_OBJECTS = 20_000


@functools.cache
def _tune_garbage_collection(num_requests: int) -> None:
    """Exclude long-lived objects from garbage collection, and collect less often.

    Half a million objects of torch and transformers live as long as the process; they are frozen.  A collection starts
    once there are more new objects than ``num_requests`` in flight need.  With Python's default threshold, 700, it
    scans the same live requests again and again, for a third of the client's processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(MIN_YOUNG_OBJECTS, OBJECTS_PER_REQUEST * num_requests), 10, 10)
    atexit.register(gc.unfreeze)  # libraries that look for leaks at the end must find what they left


class RequestState(metaclass=SingletonMeta):
    """State that all requests of a process share; ``GenerateState`` of ``slime.rollout.sglang_rollout`` is one.

    The arguments of the first construction count, later ones are ignored.
    """

    def __init__(self, args: Namespace) -> None:
        config = rollout_config(args)
        self.args = args
        self.tokenizer = load_tokenizer(config.hf_checkpoint, trust_remote_code=trusts_remote_code(args))
        TOKENIZERS[config.hf_checkpoint] = self.tokenizer
        self.processor = load_processor(config.hf_checkpoint, trust_remote_code=trusts_remote_code(args))
        num_requests = args.sglang_server_concurrency * get_rollout_num_engines(args)
        self.semaphore = asyncio.Semaphore(num_requests)
        self.sampling_params = training_sampling_params(config)
        self.group_sampling_seeds: list[int] | None = None
        if config.sglang_enable_deterministic_inference:
            self.group_sampling_seeds = [config.rollout_seed + i for i in range(config.n_samples_per_prompt)]
        self.dp_counts = [0] * (config.sglang_dp_size or 1)
        self.dp_rank = 0
        self._prompt_ids: OrderedDict[str, list[int]] = OrderedDict()
        self.reset()
        _tune_garbage_collection(num_requests)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt; do not change them.  Siblings ask in a row, so those of a few are kept."""
        ids = self._prompt_ids.get(prompt)
        if ids is None:
            ids = self._prompt_ids[prompt] = encode(self.tokenizer, prompt)
            if len(self._prompt_ids) > PROMPTS_KEPT:
                self._prompt_ids.popitem(last=False)
        return ids

    def reset(self) -> None:
        """Forget the rollout that has just ended."""
        self.remaining_batch_size = 0
        """Groups in flight and finished ones, of the rollout in progress."""
        self.pendings: set[asyncio.Task[Group]] = set()
        self.aborted = False
        self._num_started = 0

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Hold the data-parallel rank with the fewest requests for one request; it is also left in ``dp_rank``."""
        rank = min(range(len(self.dp_counts)), key=self.dp_counts.__getitem__)
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def start_group(self, call: Coroutine[Any, Any, Group]) -> asyncio.Task[Group]:
        """Start the task of a group."""
        self._num_started += 1
        task = asyncio.get_running_loop().create_task(call, name=f"group {self._num_started:012}")
        self.pendings.add(task)
        return task

    def pending_in_order(self) -> list[asyncio.Task[Group]]:
        """Return the pending tasks in the order in which they were started."""
        return sorted(self.pendings, key=lambda task: task.get_name())
