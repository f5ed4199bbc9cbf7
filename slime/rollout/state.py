"""What all requests of a rollout process share: tokenizer, concurrency limit, sampling parameters, pending groups."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.rollout.groups import Group
from slime.rollout.replaceable import entry_points
from slime.rollout.waiting import FinishedTasks
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_processor, load_tokenizer


def training_sampling_params(args: Namespace) -> dict[str, Any]:
    """The ``sampling_params`` of a training request, from the ``--rollout-*`` flags."""
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_top_p != 1.0:
        # The trainer renormalises over the nucleus that the engine sampled from, so it needs the ids in it.
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


PROMPTS_KEPT = 16
OBJECTS_PER_REQUEST = 256
"""Containers that a request in flight keeps alive: its tasks, connection, buffers, sample and spans."""
MIN_YOUNG_OBJECTS = 20_000


@functools.cache
def _spare_the_collector(num_requests: int) -> None:
    """Let the garbage collector look at what may be garbage.

    Half a million objects of torch and transformers live as long as the process; they are taken out of its sight.  And
    it begins when there are more new objects than ``num_requests`` in flight need.  Python's own threshold, 700, would
    have it go through the same living requests again and again, for a third of the client's processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(MIN_YOUNG_OBJECTS, OBJECTS_PER_REQUEST * num_requests), 10, 10)
    atexit.register(gc.unfreeze)  # libraries that look for leaks at the end must find what they left


class GenerateState(metaclass=SingletonMeta):
    """One per process: the arguments of the first construction count, later ones are ignored.

    Invariant: ``remaining_batch_size`` is the number of groups in flight plus the number kept in this rollout.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        num_requests = args.sglang_server_concurrency * get_rollout_num_engines(args)
        self.semaphore = asyncio.Semaphore(num_requests)
        self.sampling_params = training_sampling_params(args)
        self.group_sampling_seeds: list[int] | None = None
        if getattr(args, "sglang_enable_deterministic_inference", False):
            self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (getattr(args, "sglang_dp_size", None) or 1)
        self.dp_rank = 0
        self._prompt_ids: OrderedDict[str, list[int]] = OrderedDict()
        self.reset()
        _spare_the_collector(num_requests)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The tokens of a prompt; do not change them.  Its siblings ask in a row, so those of a few are kept."""
        ids = self._prompt_ids.get(prompt)
        if ids is None:
            ids = self._prompt_ids[prompt] = self.tokenizer.encode(prompt, add_special_tokens=False)
            if len(self._prompt_ids) > PROMPTS_KEPT:
                self._prompt_ids.popitem(last=False)
        return ids

    def reset(self) -> None:
        """Forget the rollout that has just ended."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Group]] = set()
        self.aborted = False
        self.finished = FinishedTasks()
        """Of ``pendings`` and tasks that were taken out of it, those that are done and were not looked at yet."""
        self._submitted = 0
        self._submission_of: dict[asyncio.Task[Group], int] = {}

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank with the fewest requests, held for one request; also left in ``dp_rank``."""
        rank = min(range(len(self.dp_counts)), key=self.dp_counts.__getitem__)
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def submit_generate_tasks(self, groups: Iterable[Group]) -> None:
        """Start one task for each group, with its own copy of the sampling parameters."""
        for group in groups:
            generate_group = entry_points().generate_and_rm_group
            task = asyncio.create_task(
                generate_group(self.args, group, sampling_params=self.sampling_params.copy(), evaluation=False)
            )
            self.pendings.add(task)
            self.finished.watch(task)
            self._submission_of[task] = self._submitted
            self._submitted += 1
            self.remaining_batch_size += 1

    def in_submission_order(self, tasks: Iterable[asyncio.Task[Group]]) -> list[asyncio.Task[Group]]:
        """Tasks sorted by when they were started, so that ties between finished groups do not depend on hashing."""
        return sorted(tasks, key=lambda task: self._submission_of.get(task, self._submitted))
