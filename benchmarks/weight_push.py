"""Weights into flat buckets and out of them: tables of kernels against one tensor at a time, in one run.

    python benchmarks/weight_push.py                                       # tiny, on whatever there is
    python benchmarks/weight_push.py --models glm4-9b qwen3-30b-a3b qwen3-4b

For each model with random bf16 weights in the trainer's layout, and for an FP8 (128 x 128 blocks) and a bf16 engine:

    torch     one HF tensor at a time: make its rows contiguous, ``quantize_block``, ``digest_bytes``
    launches  one HF tensor at a time, but with one fused launch and one digest launch each
    fused     one launch and one digest launch per bucket, from tables built once

All three write the same bytes; their digests are compared.  They are timed by the host's clock, including digests, on
the first ``--plain-layers`` layers; then the fused way on the whole model, by the GPU's clock.  GB/s counts bytes read
and written by the push itself, not those that a digest reads again; "of copy" is relative to a device-to-device copy
measured in the same run.  Then follows the engine's side for one bucket: copying it into parameters, and comparing
them with it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.model_shapes import MODELS, Output, outputs, random_parameters  # noqa: E402
from slime.ext.fast_push.kernels.tables import CastItem, CastTable, CopyItem, CopyTable, DigestTable, as_unsigned  # noqa: E402
from slime.ext.fast_push.manifest import align  # noqa: E402
from slime.weights.digest import digest_bytes  # noqa: E402
from slime.weights.quantize.block_fp8 import num_blocks, quantize_block  # noqa: E402

BLOCK = 128


@dataclass
class Bucket:
    """The tables of one bucket."""

    cast: CastTable
    digest: DigestTable
    pieces: list[tuple[str, int, tuple[int, int], torch.dtype]]
    """HF name, offset, shape and dtype; scales are separate pieces."""


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of single synchronized runs; on a GPU by its own clock."""
    run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def wall_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """One run by the host's clock, which includes launch overhead."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a device-to-device copy."""
    size = (4 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device, 9) * 1e3


def placed(output: Output, is_fp8: bool, end: int) -> tuple[CastItem, list[tuple], int]:
    """The item of one HF tensor at byte ``end`` of a bucket, its pieces, and the new end."""
    columns = output.source.size(1)
    quantize = is_fp8 and output.is_quantized
    offset = align(end)
    end = offset + output.rows * columns * (1 if quantize else 2)
    dtype = torch.float8_e4m3fn if quantize else torch.bfloat16
    pieces: list[tuple] = [(output.name, offset, (output.rows, columns), dtype)]
    scale_offset = None
    if quantize:
        scale_offset = align(end)
        shape = num_blocks(output.rows, columns)
        end = scale_offset + 4 * shape[0] * shape[1]
        pieces.append((output.name + "_scale_inv", scale_offset, shape, torch.float32))
    kind = "fp8_block" if quantize else "copy"
    item = CastItem(output.source, output.row_run, output.run_stride, output.rows, offset, kind, scale_offset)
    return item, pieces, end


def make_bucket(items: list[CastItem], pieces: list[tuple], device: torch.device) -> Bucket:
    lengths = [shape[0] * shape[1] * dtype.itemsize for _, _, shape, dtype in pieces]
    digest = DigestTable([piece[1] for piece in pieces], lengths, device)
    return Bucket(CastTable(items, torch.bfloat16), digest, pieces)


def make_buckets(found: Iterable[Output], is_fp8: bool, limit: int, device: torch.device) -> list[Bucket]:
    """Buckets of at most ``limit`` bytes, unless a single tensor is larger."""
    buckets: list[Bucket] = []
    items: list[CastItem] = []
    pieces: list[tuple] = []
    end = 0
    for output in found:
        placing = placed(output, is_fp8, end)
        if items and placing[2] > limit:
            buckets.append(make_bucket(items, pieces, device))
            items, pieces = [], []
            placing = placed(output, is_fp8, 0)
        items.append(placing[0])
        pieces += placing[1]
        end = placing[2]
    if items:
        buckets.append(make_bucket(items, pieces, device))
    return buckets


def rows_of(output: Output) -> Tensor:
    """The HF tensor as a separate tensor."""
    if output.row_run >= output.rows:
        return output.source[: output.rows]
    runs = output.rows // output.row_run
    columns = output.source.size(1)
    stride = output.source.stride(0)
    shape = (runs, output.row_run, columns)
    return output.source.as_strided(shape, (output.run_stride * stride, stride, 1)).reshape(output.rows, columns)


def push_in_torch(found: Sequence[Output], is_fp8: bool, flat: Tensor) -> list[int]:
    """One tensor at a time by torch; digests in the order of the pieces."""
    digests = []
    end = 0
    for output in found:
        matrix = rows_of(output)
        tensors = quantize_block(matrix) if is_fp8 and output.is_quantized else (matrix,)
        for tensor in tensors:
            data = tensor.contiguous().view(-1).view(torch.uint8)
            if align(end) + data.numel() > flat.numel():
                end = 0
            begin = align(end)
            end = begin + data.numel()
            flat[begin:end].copy_(data)
            digests.append(digest_bytes(flat[begin:end]))
    return digests


def per_tensor_buckets(found: Sequence[Output], is_fp8: bool, device: torch.device) -> list[Bucket]:
    buckets = []
    for output in found:
        item, pieces, _ = placed(output, is_fp8, 0)
        buckets.append(make_bucket([item], pieces, device))
    return buckets


def push_tables(buckets: Sequence[Bucket], flat: Tensor) -> list[Tensor]:
    """Fill and digest each bucket, one after the other in the same memory."""
    digests = []
    for bucket in buckets:
        bucket.cast.run(flat)
        digests.append(bucket.digest.run(flat))
    return digests


class Report:
    """Lines of the table; bytes read by digests do not count as moved."""

    HEADER = ("model", "engine", "path", "tensors", "launches", "GB", "ms", "GB/s", "of copy", "digest ms", "share")

    def __init__(self, copy_rate: float) -> None:
        self.copy_rate = copy_rate
        self.rows: list[tuple[str, ...]] = []

    def add(
        self, model: str, engine: str, path: str, tensors: int, launches: int, size: int, ms: float,
        digest_ms: float | None = None,
    ) -> None:  # fmt: skip
        rate = size / ms * 1e3
        digest = ("", "") if digest_ms is None else (f"{digest_ms:.2f}", f"{digest_ms / ms:.1%}")
        self.rows.append(
            (
                model,
                engine,
                path,
                f"{tensors:,}",
                f"{launches:,}" if launches else "many",
                f"{size / 1e9:.2f}",
                f"{ms:.2f}",
            )
            + (f"{rate / 1e9:,.0f}", f"{rate / self.copy_rate:.2f}", *digest)
        )
        print("  ".join(self.rows[-1]), flush=True)

    def print(self) -> None:
        table = [self.HEADER, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(self.HEADER))]
        print()
        for row in table:
            print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths)) + " |")
            if row is self.HEADER:
                print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")


def compare(name: str, found: list[Output], is_fp8: bool, options: argparse.Namespace, report: Report) -> None:
    device = found[0].source.device
    engine = "fp8" if is_fp8 else "bf16"
    start = time.perf_counter()
    buckets = make_buckets(found, is_fp8, options.bucket_mb << 20, device)
    build = time.perf_counter() - start
    num_bytes = max(options.bucket_mb << 20, *(bucket.cast.num_bytes for bucket in buckets))
    flat = torch.empty(align(num_bytes), dtype=torch.uint8, device=device)
    moved = sum(bucket.cast.bytes_read + bucket.cast.bytes_written for bucket in buckets)
    print(f"{name} {engine}: {len(buckets)} buckets of {options.bucket_mb} MiB, tables made in {build:.2f} s")

    # The slow ways run on a few layers; all ways must agree there.
    part = [output for output in found if 0 <= output.layer < options.plain_layers]
    single = per_tensor_buckets(part, is_fp8, device)
    few = make_buckets(part, is_fp8, options.bucket_mb << 20, device)
    results = [
        [value for digests in push_tables(few, flat) for value in as_unsigned(digests)],
        [value for digests in push_tables(single, flat) for value in as_unsigned(digests)],
        push_in_torch(part, is_fp8, flat),
        [value for bucket in few for value in as_unsigned(bucket.cast.run_with_digests(flat))],
    ]
    if any(result != results[0] for result in results):
        raise SystemExit(f"{name} {engine}: the ways differ")
    part_moved = sum(bucket.cast.bytes_read + bucket.cast.bytes_written for bucket in few)
    layers = f"{min(options.plain_layers, 1 + max(output.layer for output in found))} layers: "
    for path, launches, run in (
        ("torch", 0, lambda: push_in_torch(part, is_fp8, flat)),
        ("launches", 2 * len(single), lambda: push_tables(single, flat)),
        ("fused", 2 * len(few), lambda: push_tables(few, flat)),
    ):
        ms = min(wall_milliseconds(run, device) for _ in range(3))
        report.add(name, engine, layers + path, len(part), launches, part_moved, ms)

    ms = milliseconds(lambda: push_tables(buckets, flat), device, options.repeats)
    digest_ms = milliseconds(lambda: [bucket.digest.run(flat) for bucket in buckets], device, options.repeats)
    cast_ms = milliseconds(lambda: [bucket.cast.run(flat) for bucket in buckets], device, options.repeats)
    inside_ms = milliseconds(
        lambda: [bucket.cast.run_with_digests(flat) for bucket in buckets], device, options.repeats
    )
    report.add(name, engine, "all: fused", len(found), len(buckets), moved, cast_ms)
    written = sum(bucket.cast.bytes_written for bucket in buckets)
    report.add(name, engine, "all: digests", len(found), len(buckets), written, digest_ms)
    report.add(name, engine, "all: fused, digests", len(found), 2 * len(buckets), moved, ms, digest_ms)
    report.add(
        name, engine, "all: digests inside", len(found), 2 * len(buckets), moved, inside_ms, inside_ms - cast_ms
    )

    bucket = max(buckets, key=lambda bucket: len(bucket.pieces))
    items = engine_items(bucket, device)
    table = CopyTable(items)
    bucket.cast.run(flat)
    ms = milliseconds(lambda: table.copy(flat), device, options.repeats)
    report.add(name, engine, "engine: copy", len(items), 1, table.bytes_read + table.bytes_written, ms)
    if table.count_differences(flat).sum() != 0:
        raise SystemExit(f"{name} {engine}: an engine's parameters differ from the bucket")
    ms = milliseconds(lambda: table.count_differences(flat), device, options.repeats)
    report.add(name, engine, "engine: compare", len(items), 1, table.bytes_read + table.bytes_written, ms)


def engine_items(bucket: Bucket, device: torch.device) -> list[CopyItem]:
    """An engine's parameters that take each piece whole; every other matrix is the left half of a wider one,
    like columns of a fused parameter."""
    items = []
    for index, (_, offset, (rows, columns), dtype) in enumerate(bucket.pieces):
        wide = torch.zeros(rows, columns * (1 + index % 2), dtype=dtype, device=device)
        items.append(CopyItem(wide[:, :columns], offset, (columns, 1), dtype))
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=sorted(MODELS))
    parser.add_argument("--engines", nargs="+", default=["fp8", "bf16"], choices=["fp8", "bf16"])
    parser.add_argument("--layers", type=int, help="only the first so many layers of each model")
    parser.add_argument("--plain-layers", type=int, default=4, help="layers on which the slow ways are compared")
    parser.add_argument("--bucket-mb", type=int, default=1024, help="MiB of a bucket")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    copy_rate = copy_bandwidth(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; device copy {copy_rate / 1e9:,.0f} GB/s read and written")
    report = Report(copy_rate)
    for name in options.models:
        found = outputs(MODELS[name], random_parameters(device, torch.bfloat16), options.layers)
        for engine in options.engines:
            compare(name, found, engine == "fp8", options, report)
        del found
    report.print()


if __name__ == "__main__":
    main()
