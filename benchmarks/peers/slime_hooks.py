"""Hooks of slime: responses with the lengths in the prompts' rows, and a free reward."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.peers import workload
from slime.rollout import sglang_rollout


async def generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Answer a sample as a job does, with its length forced."""
    length = workload.forced_length(sample.metadata, sample.index % args.n_samples_per_prompt)
    return await sglang_rollout.generate(
        args, sample, sampling_params | {"max_new_tokens": length, "ignore_eos": True}
    )


async def reward(args: Namespace, sample: Any, **more: Any) -> float:
    """Grade a sample."""
    return workload.score(sample.response)
