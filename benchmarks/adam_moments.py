"""One optimizer step over a flat parameter: torch's fused AdamW against ours with bf16 and fp16 moments.

    python benchmarks/adam_moments.py --elements 1000000000        # on a GPU; smaller on a CPU

Prints for each: milliseconds per step (median), bytes of state per element, and the ratio of times to torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from slime.ext.small_adam.adam import LowPrecisionAdam  # noqa: E402


def main() -> None:
    """Time the steps one after the other and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parameter = torch.randn(asked.elements, device=device)
    parameter.grad = torch.randn_like(parameter)
    group = {"params": [parameter], "lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    rows: dict[str, dict[str, float]] = {}
    for name, dtype in (("torch fused, fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if dtype is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW([dict(group)], fused=True)
        else:
            optimizer = LowPrecisionAdam([dict(group)], {"exp_avg": dtype, "exp_avg_sq": dtype})
        times = [_step(optimizer, device) for _ in range(asked.steps + 3)][3:]
        state = sum(value.nbytes for value in optimizer.state[parameter].values())
        rows[name] = {"ms": 1e3 * statistics.median(times), "bytes_per_element": state / asked.elements}
        del optimizer
    for row in rows.values():
        row["time_over_torch"] = row["ms"] / rows["torch fused, fp32"]["ms"]
    print(json.dumps({"elements": asked.elements, "device": str(device), "rows": rows}))


def _step(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    started = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
