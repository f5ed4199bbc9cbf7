"""Seconds per million tokens from finished samples to a rank's tensors, against the plain way and the minimum.

    python benchmarks/train_columns.py --samples 512 --tokens 8192

Prints processor time per million tokens of: ours (columns, checks, tensors, serialized and read back), the
plain way (``torch.tensor`` of every list, likewise), the minimum (one copy of the finished columns, likewise), and
the minimum if each column were one array.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from slime.train_data.convert import samples_to_train_data  # noqa: E402
from slime.train_data.schedule import DPSchedule  # noqa: E402
from slime.train_data.split import split_by_rank  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

PROMPT_TOKENS = 200


def make_samples(num_samples: int, num_tokens: int) -> list[Sample]:
    """Return samples of one length; every second one has a loss mask."""
    rng = random.Random(0)
    response = num_tokens - PROMPT_TOKENS
    return [
        Sample(
            index=index,
            tokens=[rng.randrange(150_000) for _ in range(num_tokens)],
            response_length=response,
            rollout_log_probs=[-rng.random() for _ in range(response)],
            loss_mask=[1] * response if index % 2 else None,
            reward=1.0,
        )
        for index in range(num_samples)
    ]


def travel(value: Any) -> Any:
    """Return the data after serialization and deserialization."""
    return pickle.loads(pickle.dumps(value, protocol=5))  # noqa: S301  # just made


def ours(samples: list[Sample]) -> Any:
    """Return one rank's batch of all samples, as the rank receives it."""
    everything = list(range(len(samples)))
    schedule = DPSchedule(
        partitions=[everything],
        micro_batch_indices=[[everything]],
        num_microbatches=[1],
        global_batch_sizes=[len(samples)],
    )
    rewards = [1.0] * len(samples)
    (batch,) = split_by_rank(samples_to_train_data(samples, rewards, rewards), schedule)
    return travel(batch)


def plain(samples: list[Sample]) -> Any:
    """Return the same three columns, built list by list."""
    columns = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "loss_masks": [
            torch.tensor(sample.loss_mask or [1] * sample.response_length, dtype=torch.int32) for sample in samples
        ],
        "rollout_log_probs": [torch.tensor(sample.rollout_log_probs) for sample in samples],
    }
    return travel(columns)


def timed(work: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of some runs, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="Of each sample, prompt included.")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    samples = make_samples(options.samples, options.tokens)
    batch = ours(samples)
    columns = (batch.tokens, batch.loss_masks, batch.rollout_log_probs)
    ways: dict[str, Callable[[], object]] = {
        "floor": lambda: travel([[entry.clone() for entry in column] for column in columns]),
        "arrays": lambda: travel([torch.cat(column).numpy() for column in columns]),
        "ours": lambda: ours(samples),
        "plain": lambda: plain(samples),
    }
    million = options.samples * options.tokens / 1e6
    seconds = {name: timed(way, options.repeats) / million for name, way in ways.items()}
    print(
        f"{million:.1f} million tokens; s a million: floor {seconds['floor']:.4f}, of arrays {seconds['arrays']:.4f}"
    )
    for name in ("ours", "plain"):
        times = [seconds[name] / seconds[floor] for floor in ("floor", "arrays")]
        print(f"  {name:6} {seconds[name]:.4f}, {times[0]:.1f} and {times[1]:.1f} times that")


if __name__ == "__main__":
    main()
