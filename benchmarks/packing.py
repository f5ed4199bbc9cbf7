"""Speed and quality of packing the samples of a rollout, against the naive way in the same run.

    python benchmarks/packing.py                        2,048 and 65,536 samples
    python benchmarks/packing.py --samples 8192 --dp 8  another size

Lengths come from a long-tailed distribution (log-normal, median 1.8k tokens, at most 32k), for 16 data-parallel
and 2 context-parallel ranks with 16,384 tokens per GPU.  Each row is one way to schedule the whole rollout:

* first fit: ``--use-dynamic-batch-size``; the naive baseline scans all micro-batches for each sample,
* balanced: with ``--balance-data``, micro-batches are distributed by FLOPs,
* FLOPs: with ``--balance-by-flops``, they are also packed by FLOPs; the naive baseline sorts all micro-batches for
  each pair that it merges.

Prints seconds of processor time; real tokens per token of budget in the micro-batches (``perf/packing_budget_use``)
and per computed token (``perf/packing_efficiency``); the heaviest rank's FLOPs over the mean.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.train_data import schedule as schedule_module  # noqa: E402
from slime.train_data.model_dims import ModelDims  # noqa: E402
from slime.train_data.schedule import (  # noqa: E402
    DPSchedule,
    ScheduleConfig,
    build_dp_schedule,
    capacity_utilisation,
    packing_efficiency,
)

GLM4_9B = ModelDims(
    num_layers=40,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=2,
    head_dim=128,
    ffn_hidden_size=13696,
    vocab_size=151552,
)


def reference_lengths(num_samples: int) -> list[int]:
    """Prompt and response together, in tokens."""
    rng = random.Random(0)
    return [min(32768, int(rng.lognormvariate(7.5, 1.0)) + 10) for _ in range(num_samples)]


def naive_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Naive first fit: for each length, check the bins from the first on."""
    bins: list[list[int]] = []
    totals: list[int] = []
    for index, length in enumerate(lengths):
        for position, total in enumerate(totals):
            if total + length <= capacity:
                bins[position].append(index)
                totals[position] += length
                break
        else:
            bins.append([index])
            totals.append(length)
    return bins


class _State:
    """k subsets, heaviest first; states with the larger spread sort first."""

    def __init__(self, subsets: list[tuple[float, int, list[int]]]) -> None:
        self.subsets = sorted(subsets, reverse=True)

    def __lt__(self, other: _State) -> bool:
        spreads = [state.subsets[0][0] - state.subsets[-1][0] for state in (self, other)]
        return spreads[0] > spreads[1] if spreads[0] != spreads[1] else self.subsets[0] > other.subsets[0]


def naive_karmarkar_karp(weights: list[float], k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Largest differencing with all k subsets, including empty ones, in each state."""
    order = sorted(range(len(weights)), key=lambda index: (weights[index], index))
    chunks = [order[i : i + k] for i in range(0, len(order), k)] if equal_size else [[i] for i in range(len(weights))]
    empty: tuple[float, int, list[int]] = (0, 0, [])
    heap = []
    for chunk in chunks:
        heap.append(_State([(weights[i], 1, [i]) for i in chunk] + [empty] * (k - len(chunk))))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap).subsets, heapq.heappop(heap).subsets
        pairs = zip(first, reversed(second), strict=True)
        heapq.heappush(heap, _State([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]))
    return [sorted(items) for _, _, items in heap[0].subsets]


def schedule_timed(config: ScheduleConfig, lengths: list[int], repeats: int) -> tuple[DPSchedule, float]:
    """The schedule of one step, and the least processor time of ``repeats`` runs, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        schedule = build_dp_schedule(
            config, lengths, global_batch_size=len(lengths), rollout_indices=range(len(lengths))
        )
        best = min(best, time.process_time() - start)
    return schedule, best


def rank_imbalance(schedule: DPSchedule, lengths: list[int]) -> float:
    """FLOPs of the heaviest rank over the mean of the ranks."""
    flops = [sum(GLM4_9B.forward_flops(lengths[i]) for i in partition) for partition in schedule.partitions]
    return max(flops) * len(flops) / sum(flops)


KINDS: dict[str, dict[str, Any]] = {
    "first fit": {},
    "balanced": {"balance_data": True},
    "FLOPs": {"balance_data": True, "balance_by_flops": True},
}
NAIVE: dict[str, Callable[..., list[list[int]]]] = {
    "first_fit": naive_first_fit,
    "karmarkar_karp": naive_karmarkar_karp,
}
NAIVE_FLOPS_LIMIT = 10_000
"""Samples above which naive packing by FLOPs is skipped, because it would take minutes and gigabytes."""


def main() -> None:
    """Print one table for each number of samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[2048, 65536], help="Samples of one step.")
    parser.add_argument("--dp", type=int, default=16, help="Data-parallel ranks.")
    parser.add_argument("--cp", type=int, default=2, help="Context-parallel ranks.")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for num_samples in options.samples:
        lengths = reference_lengths(num_samples)
        print(f"{num_samples} samples, {sum(lengths):,} tokens")
        print(f"  {'':10} {'ours s':>8} {'naive s':>8} {'same':>5} {'budget':>7} {'computed':>8} {'imbalance':>9}")
        for name, kind in KINDS.items():
            config = ScheduleConfig(
                dp_size=options.dp,
                cp_size=options.cp,
                use_dynamic_batch_size=True,
                max_tokens_per_gpu=options.max_tokens_per_gpu,
                flops=GLM4_9B,
                **kind,
            )
            ours, ours_s = schedule_timed(config, lengths, options.repeats)
            naive_text = same = "-"
            if name != "FLOPs" or num_samples <= NAIVE_FLOPS_LIMIT:
                with mock.patch.multiple(schedule_module, **NAIVE):
                    naive, naive_s = schedule_timed(config, lengths, 1)
                naive_text, same = f"{naive_s:.3f}", "yes" if naive == ours else "NO"
            use = capacity_utilisation(ours, lengths, capacity_tokens=config.capacity_tokens)
            computed = packing_efficiency(ours, lengths, cp_size=options.cp, pad_multiple=128)
            print(
                f"  {name:10} {ours_s:8.3f} {naive_text:>8} {same:>5} {use:7.4f} {computed:8.4f} "
                f"{rank_imbalance(ours, lengths):9.4f}"
            )


if __name__ == "__main__":
    main()
