"""Summarize torch profiler traces: the longest operations, and the share of time in which the device was busy.

    python tools/analyze_profile.py --profile-dir /tmp/profile [--rank 0 | --all-ranks] [--top-n 20]

Reads every ``*.json`` and ``*.json.gz`` of the folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.flags.kinds import non_negative_int, positive_int
from slime.utils.errors import DataError
from tools.cli import clean_exit
from tools.terminal import plain, say

DEVICE_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
HOST_CATEGORIES = {"cpu_op": "operator", "user_annotation": "annotation"}
COMMUNICATION = re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_RANK = re.compile(r"(?:rank|TP|DP)[-_]?(\d+)", re.IGNORECASE)


@dataclass
class Total:
    """All calls of one operation."""

    kind: str
    microseconds: float = 0.0
    calls: int = 0


@dataclass
class Summary:
    """One trace file."""

    path: Path
    rank: int
    totals: dict[str, Total] = field(default_factory=dict)
    span_us: float = 0.0
    """From the first to the last event."""
    busy_us: float = 0.0
    """Time in which a kernel or copy ran; without a device, in which an operator of the host ran."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile-dir", type=Path, required=True)
    parser.add_argument("--rank", type=non_negative_int, default=0, help="Show this rank.")
    parser.add_argument("--all-ranks", action="store_true", help="Show every rank.")
    parser.add_argument("--top-n", type=positive_int, default=20, help="Operations to show.")
    args = parser.parse_args(argv)
    with clean_exit():
        for path in find_traces(args.profile_dir, None if args.all_ranks else args.rank):
            say(*report(summarise(path), args.top_n).split("\n"))


def find_traces(folder: Path, rank: int | None) -> list[Path]:
    """Find the traces of one rank, or of all.

    Raises:
        DataError: there are none.
    """
    found = sorted(path for path in folder.rglob("*.json*") if path.name.endswith((".json", ".json.gz")))
    if not found:
        raise DataError(f"{folder} holds no *.json or *.json.gz; --profile-dir must be a folder of profiler traces.")
    chosen = [path for path in found if rank is None or rank_of_name(path) == rank]
    if not chosen:
        ranks = sorted({rank_of_name(path) for path in found})
        raise DataError(
            f"{folder} holds no trace of rank {rank}; there are {ranks}. Choose with --rank or --all-ranks."
        )
    return chosen


def rank_of_name(path: Path) -> int:
    """Return the rank in a file's name; 0 without one."""
    match = _RANK.search(path.name)
    return int(match[1]) if match else 0


def summarise(path: Path) -> Summary:
    """Add up the events of one trace.

    Raises:
        DataError: the file is cut or damaged, or no trace.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        try:
            content = json.load(file)
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is not JSON ({error}); the file may be incomplete.") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise DataError(f"{path} has no traceEvents; --profile-dir must be a folder of profiler traces alone.")
    info = content.get("distributedInfo") or {} if isinstance(content, dict) else {}
    summary = Summary(path, int(info.get("rank", rank_of_name(path))))
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    device = [event for event in timed if event.get("cat") in DEVICE_CATEGORIES]
    host = [event for event in timed if event.get("cat") in HOST_CATEGORIES]
    for event in device + host:
        total = summary.totals.setdefault(event["name"], Total(kind_of(event)))
        total.microseconds += float(event["dur"])
        total.calls += 1
    if timed:
        first = min(float(event["ts"]) for event in timed)
        summary.span_us = max(float(event["ts"]) + float(event["dur"]) for event in timed) - first
    summary.busy_us = covered(device or host)
    return summary


def kind_of(event: dict[str, Any]) -> str:
    """Return kernel, communication, copy, operator or annotation."""
    kind = DEVICE_CATEGORIES.get(event["cat"]) or HOST_CATEGORIES[event["cat"]]
    return "communication" if kind == "kernel" and COMMUNICATION.search(event["name"]) else kind


def covered(events: Iterable[dict[str, Any]]) -> float:
    """Return the microseconds in which at least one of the events ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def report(summary: Summary, top_n: int) -> str:
    """Format the summary as text."""
    share = summary.busy_us / summary.span_us if summary.span_us else 0.0
    lines = [
        f"{summary.path} (rank {summary.rank}): {summary.span_us / 1e3:.1f} ms, busy {share:.0%}",
        f"{'kind':<14}{'ms':>12}{'calls':>9}{'mean us':>12}  name",
    ]
    by_time = sorted(summary.totals.items(), key=lambda item: -item[1].microseconds)
    for name, total in by_time[:top_n]:
        mean = total.microseconds / total.calls
        lines.append(
            f"{total.kind:<14}{total.microseconds / 1e3:>12.3f}{total.calls:>9}{mean:>12.1f}  {plain(name)[:120]}"
        )
    kinds: dict[str, float] = {}
    for total in summary.totals.values():
        kinds[total.kind] = kinds.get(total.kind, 0.0) + total.microseconds
    lines.append("  ".join(f"{kind}: {us / 1e3:.1f} ms" for kind, us in sorted(kinds.items(), key=lambda k: -k[1])))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
