"""Numbers of train_mfu.py's steps: seconds, FLOP/s and memory, and the vision tower's part."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.tower_in_step import HostWaits, SampleImages
from slime.train_data.model_dims import ModelDims

PEAK_FLOPS = 989e12


@dataclass
class Step:
    """One optimizer step with its log-prob passes."""

    lengths: list[int]
    """Tokens of each sequence, on all ranks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by pass."""
    tower: dict[str, float] = field(default_factory=dict)
    """Seconds of the vision tower in the training step, by direction, on this rank."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the enclosed code, including its kernels."""
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] = time.perf_counter() - start


def numbers(dims: ModelDims, steps: list[Step], images: SampleImages | None, waits: HostWaits) -> dict[str, Any]:
    """Return the numbers of the median step, as :func:`report` prints them; seconds and FLOP/s."""
    step = sorted(steps, key=lambda step: step.seconds["step"])[len(steps) // 2]
    world, seconds, num_tokens = dist.get_world_size(), step.seconds["step"], sum(step.lengths)
    text = dims.train_flops(sum(map(dims.forward_flops, step.lengths)), 0)
    tower = 0.0 if images is None else dims.train_flops(0, len(step.lengths) * images.forward_flops)
    rate = (text + tower) / seconds / world
    row: dict[str, Any] = {
        **{"tokens": num_tokens, "sequences": len(step.lengths)},
        **{"multiply_adds_per_token": (text + tower) / 6 / num_tokens, "seconds": step.seconds},
        **{
            "tokens_per_s_per_gpu": num_tokens / seconds / world,
            "flops_per_s_per_gpu": rate,
            "mfu": rate / PEAK_FLOPS,
        },
    }
    if torch.cuda.is_available():
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if images is not None:
        in_tower = sum(step.tower.values())
        row |= {
            **{"images_per_sample": images.num_images, "patches_per_image": images.height * images.width},
            **{"tower_seconds": step.tower, "tower_share": in_tower / seconds},
            "is_tower_trained": images.tower.is_trained,
            "tower_mfu": tower / in_tower / world / PEAK_FLOPS if in_tower else None,
            "text_mfu": text / (seconds - in_tower) / world / PEAK_FLOPS,
            "host_waits": None if waits.places is None else waits.places.total(),
            "host_waits_at": None if waits.places is None else dict(waits.places.most_common()),
        }
    return row


def write_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the rows as JSON, on the first rank."""
    if path is not None and dist.get_rank() == 0:
        path.write_text(json.dumps({"command": sys.argv[1:], "rows": rows}, indent=1))


def report(row: dict[str, Any]) -> None:
    """Print a line of numbers, a line with the share of each pass, and one of the tower."""
    line = (
        f"{row['name']}: {row['multiply_adds_per_token'] / 1e9:.3f} B multiply-adds a token, "
        f"{row['tokens']} tokens in {row['sequences']} sequences, {row['microbatches']} micro-batches: "
        f"step {row['seconds']['step']:.3f} s, {row['tokens_per_s_per_gpu']:,.0f} tok/s/GPU, "
        f"{row['flops_per_s_per_gpu'] / 1e12:.0f} TFLOP/s = MFU {row['mfu']:.1%}"
    )
    if "peak_memory_gib" in row:
        line += f"; peak memory {row['peak_memory_gib']:.1f} GiB"
    whole = sum(row["seconds"].values())
    print(line, "; ".join(f"{k} {v:.3f} s ({v / whole:.0%})" for k, v in row["seconds"].items()), sep="\n", flush=True)
    if "tower_seconds" in row:
        passes = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in row["tower_seconds"].items())
        print(
            f"{row['images_per_sample']} images a sample of {row['patches_per_image']} patches: tower {passes}, "
            f"{row['tower_share']:.1%} of the step; MFU of the tower {row['tower_mfu'] or 0:.1%}, of the text "
            f"{row['text_mfu']:.1%}; the host waits {row['host_waits']} times in a step: {row['host_waits_at']}",
            flush=True,
        )


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
