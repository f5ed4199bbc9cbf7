"""What filling the buckets of a push costs one rank: tables of its shards against one tensor after the other.

    python benchmarks/shard_fill.py --model qwen3-4B -- --num-layers 2          # small, on whatever there is
    python benchmarks/shard_fill.py --model qwen3-30B-A3B --format fp8          # one GPU with 140 GB

Builds the model with random weights in one process, which therefore holds and sends all of it, and prints for both
ways how long making the source takes, a push (each bucket waited for), the part of it that Python takes, launches, and
bytes per second counting those read and written.  ``--host`` reads pinned host copies, as a trainer that sleeps does.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.train_mfu import start_trainer  # noqa: E402

if TYPE_CHECKING:
    from slime.backends.megatron_utils.update_weight.sources.bucket_source import BucketSource

BLOCK = (128, 128)


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Our options, and Megatron's flags behind ``--``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a file of scripts/models without its ending")
    parser.add_argument("--format", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--host", action="store_true", help="read pinned host copies instead of the parameters")
    parser.add_argument("--bucket-mib", type=int, default=512, help="size of the buckets")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-gathered", action="store_true", help="only the tables")
    parser.set_defaults(tokens=1024)
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    return parser.parse_args(own), extra


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Seconds until it is done, on the GPU too."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def build(args: Namespace) -> torch.nn.Module:
    """The model without buffers for gradients, with small random numbers in place of costly initial values."""
    from slime.backends.megatron_utils.model_provider import get_model_provider

    args.perform_initialization = False
    model = get_model_provider(args)()
    if torch.cuda.is_available():
        model.cuda()  # what the provider leaves on the host, such as routers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05)
    return model


def main() -> None:
    """Print both ways."""
    options, extra = parse_options()
    args = start_trainer(options, ["--bf16", *extra])

    from slime.backends.megatron_utils.update_weight.sources.bucket_source import GatheredBuckets
    from slime.backends.megatron_utils.update_weight.sources.headers import hf_headers
    from slime.backends.megatron_utils.update_weight.sources.shard_buckets import ShardBuckets
    from slime.weights.kernels.cast_table import CastTable
    from slime.weights.quantize import Quantizer
    from slime.weights.quantize.formats import BlockFp8
    from slime.weights.quantize.offline_rules import is_quantized_offline

    model = [build(args)]
    name = "qwen3_moe" if args.num_experts else "qwen3"
    (headers,) = hf_headers(args, model, model_name=name, dtype=torch.bfloat16)
    quantizer = None
    if options.format == "fp8":
        quantized = [n for n, shape, _ in headers if len(shape) == 2 and is_quantized_offline(n)]
        quantizer = Quantizer(BlockFp8(BLOCK), quantized)
    host = None
    if options.host:
        host = {f"0.{n}": p.detach().to("cpu").pin_memory() for n, p in model[0].named_parameters()}
    common: dict[str, Any] = dict(
        model_name=name, dtype=torch.bfloat16, quantizer=quantizer, bucket_bytes=options.bucket_mib << 20
    )
    launches = [0]
    run = CastTable.run

    def counted(self: CastTable, out: torch.Tensor) -> None:
        launches[0] += 1
        run(self, out)

    CastTable.run = counted  # type: ignore[method-assign]
    ways: dict[str, Callable[[], BucketSource]] = {"tables": lambda: ShardBuckets(args, model, lambda: host, **common)}
    if not options.no_gathered:
        ways["gathered"] = lambda: GatheredBuckets(args, model, lambda: host, across_stages=True, **common)
    read = sum(p.numel() * p.element_size() for p in model[0].parameters())
    for label, make in ways.items():
        start = time.perf_counter()
        source = make()
        made_s = time.perf_counter() - start

        push = functools.partial(walk, source)
        first_s = timed(push)
        launches[0] = 0
        seconds = [timed(push) for _ in range(options.repeats)]
        per_push = launches[0] // options.repeats
        python_s = statistics.median(python_seconds(push, CastTable) for _ in range(options.repeats))
        written = sum(bucket.num_bytes for bucket in source.manifest.buckets)
        best_s = statistics.median(seconds)
        print(
            f"{label}: {len(source.manifest.tensors)} tensors, {len(source.manifest.buckets)} buckets, "
            f"{written / 1e9:.2f} GB; made in {made_s:.2f} s, first push {first_s:.2f} s, then {best_s * 1e3:.1f} ms "
            f"({(read + written) / best_s / 1e9:.0f} GB/s), {per_push} launches of tables"
            + (f", Python {python_s * 1e3:.2f} ms" if label == "tables" else ""),
            flush=True,
        )


def walk(source: BucketSource) -> None:
    """A push to nobody."""
    for _ in source.iter_buckets():
        pass


def python_seconds(push: Callable[[], None], table: type) -> float:
    """A push in which no table does anything: what is left is the walk over the buckets."""
    run = table.run  # type: ignore[attr-defined]
    table.run = lambda self, out: None  # type: ignore[attr-defined]
    try:
        return timed(push)
    finally:
        table.run = run  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
