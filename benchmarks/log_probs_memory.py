"""Peak memory and time of log-probs and entropy over a large vocabulary, forward and backward, against the naive way.

    python benchmarks/log_probs_memory.py                  CUDA: 8,192 tokens x 151,552; CPU: 256 x 32,768
    python benchmarks/log_probs_memory.py --device cpu --tokens 512 --vocabulary 16384 --repeats 3

The logits are bf16, as from a model.  In the same run:

* naive: ``log_softmax(logits.float() / temperature)``, gather, ``-(p * log p).sum()``, and autograd,
* chunked: ours in plain torch, one float32 chunk at a time, with the gradient in a separate tensor,
* chunked, in place: the gradient overwrites the logits,
* fused, in place: the Triton kernels that training on CUDA uses.

Prints the peak GiB of each in addition to the logits (on CUDA from the allocator, on a CPU by counting the
storages that operations create), the median time of forward and backward, and the largest difference from the naive
log-probs (nats) and gradient (relative to its largest entry).
"""

from __future__ import annotations

import argparse
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.algorithms import log_probs  # noqa: E402

GIB = 2**30
TEMPERATURE = 0.8
ENTROPY_WEIGHT = 0.01


class AllocationMeter(TorchDispatchMode):
    """Bytes of live storages that operations created, and their peak."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0
        self._known = known.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key != self._known and key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


class _Source(torch.autograd.Function):
    """Represents the output layer: provides the logits, and keeps the gradient."""

    gradient: Tensor

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        _Source.gradient = grads[0]
        return None, None


def naive(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, written naively."""
    log_p = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def ours(*, overwrite: bool, fused: bool, chunk_size: int = -1) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """slime's function, with or without its kernels."""

    def run(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden = mock.patch.object(log_probs, "_kernels_for", lambda logits: None)
        settings = {
            "with_entropy": True,
            "temperature": TEMPERATURE,
            "overwrite_logits": overwrite,
            "chunk_size": chunk_size,
        }
        if fused:
            assert log_probs._kernels_for(logits) is not None, "Triton is missing"
            log_prob, entropy = log_probs.vocab_parallel_log_probs(logits, targets, **settings)
        else:
            with hidden:
                log_prob, entropy = log_probs.vocab_parallel_log_probs(logits, targets, **settings)
        assert entropy is not None
        return log_prob, entropy

    return run


def measure(
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], original: Tensor, targets: Tensor, repeats: int
) -> dict[str, Any]:
    """Peak bytes beyond the logits, median milliseconds, and the results of the last repetition."""
    is_cuda = original.is_cuda

    def now() -> float:
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    times: dict[str, list[float]] = {"forward": [], "backward": []}
    weight = torch.linspace(-1.0, 1.0, len(targets), device=original.device)
    peak = 0
    for repetition in range(repeats + 1):  # the first repetition warms up, and its memory is measured
        logits = original.clone()
        anchor = torch.zeros((), requires_grad=True, device=original.device)
        meter = AllocationMeter(logits)
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() if is_cuda else 0
        if not is_cuda and repetition == 0:
            meter.__enter__()
        start = now()
        log_prob, entropy = function(_Source.apply(anchor, logits), targets)  # type: ignore[no-untyped-call]
        middle = now()
        ((log_prob * weight).sum() - ENTROPY_WEIGHT * entropy.sum()).backward()
        end = now()
        if not is_cuda and repetition == 0:
            meter.__exit__(None, None, None)
        if is_cuda:
            peak = max(peak, torch.cuda.max_memory_allocated() - base)
        else:
            peak = max(peak, meter.peak)
        if repetition:
            times["forward"].append(middle - start)
            times["backward"].append(end - middle)
        found = {"log_prob": log_prob.detach(), "gradient": _Source.gradient}
        del logits, log_prob, entropy
        if repetition < repeats:
            found.clear()
            _Source.gradient = torch.empty(0)
    return {"peak": peak, **{name: 1e3 * median(values) for name, values in times.items()}, **found}


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Compares row by row, so that the comparison itself needs no memory."""
    rows = zip(left.split(512), right.split(512), strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="Rows; default 8192 on CUDA, 256 on CPU.")
    parser.add_argument("--vocabulary", type=int, help="Columns; default 151552 on CUDA, 32768 on CPU.")
    parser.add_argument("--chunk-size", type=int, help="Rows; default as many as fit into 256 MiB on CUDA, 16 on CPU.")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    is_cuda = options.device.startswith("cuda")
    num_tokens = options.tokens or (8192 if is_cuda else 256)
    vocabulary = options.vocabulary or (151552 if is_cuda else 32768)
    chunk_size = options.chunk_size or (-1 if is_cuda else 16)
    generator = torch.Generator(options.device).manual_seed(0)
    shape = (num_tokens, vocabulary)
    logits = torch.empty(shape, dtype=torch.bfloat16, device=options.device).normal_(0, 2, generator=generator)
    targets = torch.randint(0, vocabulary, (num_tokens,), device=options.device, generator=generator)

    ways = {
        "naive": naive,
        "chunked": ours(overwrite=False, fused=False, chunk_size=chunk_size),
        "chunked, in place": ours(overwrite=True, fused=False, chunk_size=chunk_size),
    }
    if is_cuda:
        ways["fused"] = ours(overwrite=False, fused=True)
        ways["fused, in place"] = ours(overwrite=True, fused=True)
    name = torch.cuda.get_device_name() if is_cuda else "CPU"
    print(f"{num_tokens:,} tokens x {vocabulary:,}, bf16, {name}: the logits are {logits.nbytes / GIB:.2f} GiB")
    print(f"{'':18} {'peak GiB':>9} {'forward ms':>11} {'backward ms':>12} {'log-prob':>9} {'gradient':>9}")
    wanted: dict[str, Tensor] = {}
    for label, function in ways.items():
        found = measure(function, logits, targets, options.repeats)
        if not wanted:
            wanted = {name: found[name] for name in ("log_prob", "gradient")}
            scale = max(part.abs().max().item() for part in wanted["gradient"].split(512))
        log_prob = largest_difference(found["log_prob"], wanted["log_prob"])
        gradient = largest_difference(found["gradient"], wanted["gradient"]) / scale
        print(
            f"{label:18} {found['peak'] / GIB:9.3f} {found['forward']:11.1f} {found['backward']:12.1f} "
            f"{log_prob:9.1e} {gradient:9.1e}"
        )
        del found


if __name__ == "__main__":
    main()
