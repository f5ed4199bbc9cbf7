"""Cost of the ledger: bytes and microseconds per sample, against the naive way of pickling every sample to a file.

    python benchmarks/ledger.py
    python benchmarks/ledger.py --lengths 64 1024 --samples 2048

For each response length, groups of eight samples go through the calls of the default rollout:
``record_issued``, ``record_response`` for each sample, ``record_finished`` and ``record_batch`` for each group.
Prints the best of ``--repeats`` for:

* loop: CPU time of the calling thread, in a job the event loop's; the writer runs in the background
* all: CPU time of the process for the same, including the writer's thread, minus the benchmark's own loop
* naive: CPU time of ``pickle.dump`` of each sample twice (answered, rewarded), flushed each time
* bytes per sample on disk, of both; the payload (4 bytes per token id and 4 per log-prob) is the minimum
"""

from __future__ import annotations

import argparse
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.ledger.frames import folder_bytes
from slime.ext.ledger.journal import Journal, UserCode
from slime.ext.ledger.segments import JournalWriter
from slime.utils.types import Sample

GROUP_SIZE = 8
PROMPT_TOKENS = 128


def make_groups(num_samples: int) -> list[list[Sample]]:
    """Groups as the data source returns them."""
    return [
        [
            Sample(group_index=g, index=g * GROUP_SIZE + k, prompt="What is the sum? " * 20, label="42", metadata={})
            for k in range(GROUP_SIZE)
        ]
        for g in range(num_samples // GROUP_SIZE)
    ]


def answers(num_samples: int, length: int) -> list[dict]:
    """Fields that an engine's answer sets; created before the clock starts."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS + length)]
    log_probs = [-rng.random() for _ in range(length)]
    return [
        {
            "tokens": tokens[:],
            "rollout_log_probs": log_probs[:],
            "loss_mask": [1] * length,
            "response": "word " * (length * 4 // 5),
            "response_length": length,
            "status": Sample.Status.COMPLETED,
            "weight_versions": ["1"],
        }
        for _ in range(num_samples)
    ]


def cpu_s() -> float:
    """CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class IdleJournal(Journal):
    """Takes every call and does nothing, to measure the loop around the calls."""

    def record_issued(self, *args: object) -> None:
        """Do nothing."""

    record_response = record_finished = record_batch = record_issued  # type: ignore[assignment]

    def __init__(self, folder: Path, **options: object) -> None:
        self.writer = JournalWriter(folder, bytes, flush_s=0.02, timeout_s=60.0)

    def record_start(self, start_rollout_id: int, *, first_segment: int) -> None:
        """Do nothing."""

    def record_begin(self, rollout_id: int) -> None:
        """Do nothing."""


def run_ledger(
    folder: Path, num_samples: int, length: int, *, has_user_code: bool, kind: type[Journal] = Journal
) -> tuple[float, float, float]:
    """``(loop microseconds, all microseconds, bytes)`` per sample."""
    groups, fields = make_groups(num_samples), iter(answers(num_samples, length))
    journal = kind(folder, fingerprint={}, user_code=UserCode(before_finish=has_user_code))
    journal.record_start(0, first_segment=0)
    journal.record_begin(0)
    start_all, loop = cpu_s(), 0.0
    start = time.thread_time()
    journal.record_issued(len(groups), groups, [False] * len(groups))
    loop += time.thread_time() - start
    for number, group in enumerate(groups):
        for sample in group:
            sample.__dict__.update(next(fields))
            start = time.thread_time()
            journal.record_response(sample, sample)
            loop += time.thread_time() - start
        for sample in group:
            sample.reward = 1.0
        start = time.thread_time()
        journal.record_finished(group)
        loop += time.thread_time() - start
        if number % 8 == 7:
            journal.writer.flush()  # in a job the writer keeps up, because answers take time
    if kind is Journal:
        journal.record_batch(0, groups, {}, keeps_open=False)  # on the manager's thread
    total = cpu_s() - start_all
    journal.close()
    written = folder_bytes(folder)
    return loop / num_samples * 1e6, total / num_samples * 1e6, written / num_samples


def run_naive(folder: Path, num_samples: int, length: int) -> tuple[float, float]:
    """``(microseconds, bytes)`` per sample."""
    samples = [sample for group in make_groups(num_samples) for sample in group]
    for sample, fields in zip(samples, answers(num_samples, length), strict=True):
        sample.__dict__.update(fields)
    folder.mkdir(parents=True)
    start = cpu_s()
    with open(folder / "samples.pkl", "wb") as file:
        for sample in samples:
            for reward in (None, 1.0):
                sample.reward = reward
                pickle.dump(sample.to_dict(), file, protocol=pickle.HIGHEST_PROTOCOL)
                file.flush()
        size = file.tell()
    return (cpu_s() - start) / num_samples * 1e6, size / num_samples


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 32768], help="response tokens")
    parser.add_argument("--samples", type=int, default=2048, help="samples of short responses; long ones get fewer")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ledger-benchmark-"))
    print("tokens  hooks   loop us   all us   naive us   bytes   naive bytes   payload bytes")
    try:
        for length in options.lengths:
            num_samples = max(GROUP_SIZE, min(options.samples, (1 << 21) // length) // GROUP_SIZE * GROUP_SIZE)
            for has_user_code in (False, True):
                best = [float("inf")] * 5
                for repeat in range(options.repeats):
                    place = folder / f"{length}-{has_user_code}-{repeat}"
                    ledger = run_ledger(place / "ledger", num_samples, length, has_user_code=has_user_code)
                    around = run_ledger(place / "none", num_samples, length, has_user_code=False, kind=IdleJournal)
                    ledger = max(0.0, ledger[0] - around[0]), max(0.0, ledger[1] - around[1]), ledger[2]
                    naive = run_naive(place / "naive", num_samples, length)
                    best = [min(old, new) for old, new in zip(best, (*ledger, *naive), strict=True)]
                    shutil.rmtree(place)
                loop, total, size, naive_us, naive_bytes = best
                payload = 4 * (PROMPT_TOKENS + length) + 4 * length
                hooks = "yes" if has_user_code else "no"
                print(
                    f"{length:6}  {hooks:>5} {loop:9.1f} {total:8.1f} {naive_us:10.1f} {size:7.0f} "
                    f"{naive_bytes:13.0f} {payload:15}"
                )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
