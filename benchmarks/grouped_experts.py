"""Experts in one grouped product against one product per expert, in the same run: forward and backward of one layer.

    python benchmarks/grouped_experts.py                                  # small, on whatever there is
    python benchmarks/grouped_experts.py --tokens 16384 --experts 128 --topk 8 --hidden 2048 --ffn 768

Prints, for even and for skewed routing, milliseconds and TFLOP/s of both ways, their ratio, and
the largest relative difference of outputs and gradients.  "modules" is megatron-core's one module per expert.  On a
CPU there is no grouped kernel, so the stacked parameter with its loop is compared with the modules.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils.layers.experts import grouped_linear, has_grouped_product  # noqa: E402

Run = Callable[[], list[Tensor]]


def routing(name: str, rows: int, experts: int) -> list[int]:
    """Rows of each expert: equal, or falling as 1 / rank with a quarter of the experts idle."""
    shares = [1.0] * experts if name == "even" else [1.0 / (rank + 1) for rank in range(experts - experts // 4)]
    counts = [int(rows * share / sum(shares)) for share in shares] + [0] * (experts - len(shares))
    counts[0] += rows - sum(counts)
    return counts


def make_runs(options: argparse.Namespace, counts: list[int], device: torch.device) -> dict[str, Run]:
    """One forward and backward pass in each way, returning the output and all gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    x = random(sum(counts), options.hidden).requires_grad_()
    first = random(options.experts, 2 * options.ffn, options.hidden, scale=0.02).requires_grad_()
    second = random(options.experts, options.hidden, options.ffn, scale=0.02).requires_grad_()
    modules = [
        (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()) for a, b in zip(first, second)
    ]
    grad = random(sum(counts), options.hidden)
    on_device = torch.tensor(counts, device=device)

    def activation(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up

    def stacked(counts_e: Tensor, use_grouped_product: bool) -> list[Tensor]:
        inner = grouped_linear(x, first, counts_e, use_grouped_product=use_grouped_product)
        y = grouped_linear(activation(inner), second, counts_e, use_grouped_product=use_grouped_product)
        return [y, *torch.autograd.grad(y, (x, first, second), grad)]

    def one_module_each() -> list[Tensor]:
        pieces = [F.linear(activation(F.linear(rows, a)), b) for rows, (a, b) in zip(x.split(counts), modules)]
        y = torch.cat(pieces)
        grads = torch.autograd.grad(y, (x, *(w for pair in modules for w in pair)), grad)
        return [y, grads[0], torch.stack(grads[1::2]), torch.stack(grads[2::2])]

    runs: dict[str, Run] = {"modules": one_module_each, "loop": lambda: stacked(torch.tensor(counts), False)}
    if has_grouped_product(x, first) and has_grouped_product(x, second):
        runs["grouped"] = lambda: stacked(on_device, True)
    return runs


def milliseconds(run: Run, repeats: int, device: torch.device) -> float:
    """Median over repeats, each synchronized."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="before each is copied to its experts")
    parser.add_argument("--experts", type=int, default=16, help="of this rank")
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = options.tokens * options.topk
    flops = 3 * 2 * rows * options.hidden * options.ffn * 3  # three matrices; backward is twice forward
    print(f"{device}: {rows} rows, {options.experts} experts, hidden {options.hidden}, ffn {options.ffn}")
    for name in ("even", "skewed"):
        runs = make_runs(options, routing(name, rows, options.experts), device)
        expected = runs["modules"]()
        base = milliseconds(runs["modules"], options.repeats, device)
        for way, run in runs.items():
            elapsed = base if way == "modules" else milliseconds(run, options.repeats, device)
            difference = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(run(), expected))
            print(
                f"{name:7s} {way:8s} {elapsed:9.2f} ms  {flops / elapsed / 1e9:8.2f} TFLOP/s  "
                f"{base / elapsed:5.2f} x modules  difference {difference:.1e}"
            )


if __name__ == "__main__":
    main()
