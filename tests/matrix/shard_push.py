"""Every family in every layout: buckets that ranks fill from their shards hold the same bytes as by gathering.

    python -m tests.matrix.shard_push                               # every family, every layout it supports
    python -m tests.matrix.shard_push --family qwen3 --layout TP2   # one cell

A cell builds the trainer's model on gloo ranks, reconstructs all HF tensors from all ranks' buckets, and compares them
bit for bit with the gathered, converted and quantized ones, once for each of :data:`FORMATS`.  The exit code is 1
if a tensor differs, is missing, or is sent twice.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
from slime.backends.megatron_utils.update_weight.transport import SentWeights
from slime.compose import parts
from slime.ext.fast_push.carrier import NO_BUCKET, BucketSource
from slime.ext.fast_push.manifest import Manifest
from slime.ext.fast_push.shard_buckets import CollectedBuckets, ShardBuckets
from slime.ray.parts import load_all
from slime.utils.distributed_utils import get_gloo_group, init_gloo_group
from slime.weights.quantize import Quantizer
from slime.weights.quantize.formats import BlockFp8, ChannelFp8, WeightFormat, is_quantized_offline
from tests.matrix import layout_rank
from tests.matrix.case import FamilyCase, load_cases, read_config
from tests.matrix.layouts import FULL_FAMILIES, LAYOUTS, Layout, _case, layouts_of, with_layers, write_checkpoint
from tests.matrix.pool import RankError, RankPool
from tests.matrix.report import Cell, summary

BUCKET_BYTES = 16 * 1024
"""So small that a tiny model makes many buckets and its embedding must be split."""


@dataclass(frozen=True)
class Format:
    """The format of pushed weights."""

    dtype: torch.dtype
    quantized: WeightFormat | None = None
    by_stage: bool = False
    bucket_bytes: int = BUCKET_BYTES


FORMATS = {
    "fp32": Format(torch.float32),
    "bf16, one stage after the other": Format(torch.bfloat16, by_stage=True),
    "bf16, one bucket a rank": Format(torch.bfloat16, bucket_bytes=1 << 30),
    # Blocks within the ranks' shards, blocks that some shards cross, and no blocks.
    "fp8 4x4": Format(torch.float32, BlockFp8((4, 4))),
    "fp8 16x8, powers of two": Format(torch.float32, BlockFp8((16, 8), ue8m0=True)),
    "fp8 rows, one stage after the other": Format(torch.float32, ChannelFp8(), by_stage=True),
}
FAST_FORMATS = ("bf16, one stage after the other", "fp8 16x8, powers of two")


def run_cells(
    cases: Sequence[FamilyCase],
    names: Sequence[str] | None = None,
    formats: Sequence[str] = tuple(FORMATS),
    *,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """One cell for each family and layout.

    Args:
        cases: families to run.
        names: names of layouts; None for all that the family supports.
        formats: some of :data:`FORMATS`.
        on_cell: called with each cell as it is done.
    """
    cells = []
    with RankPool() as pool:
        for case in cases:
            layouts = {
                name: layout
                for name, layout in layouts_of(case, tuple(LAYOUTS) if names is None else names).items()
                if _is_possible(case, layout)
            }
            with tempfile.TemporaryDirectory(prefix=f"shards-{case.name}-") as root:
                for name, layout in layouts.items():
                    cell = _run_cell(pool, case, name, layout, Path(root), tuple(formats))
                    on_cell(cell)
                    cells.append(cell)
    return cells


def _is_possible(case: FamilyCase, layout: Layout) -> bool:
    """Whether the case's layers and experts can be distributed so."""
    if layout.num_layers is not None and case.name not in FULL_FAMILIES:
        return False
    flags = dict(zip(layout.flags, layout.flags[1:], strict=False))
    num_experts = case.config.get("n_routed_experts") or case.config.get("num_experts") or 0
    return num_experts % int(str(flags.get("--expert-model-parallel-size", 1))) == 0


def _run_cell(
    pool: RankPool, case: FamilyCase, name: str, layout: Layout, root: Path, formats: tuple[str, ...]
) -> Cell:
    start = time.monotonic()
    deep = with_layers(case, layout.num_layers)
    folder = root / f"layers-{layout.num_layers or 'own'}"
    try:
        if not folder.exists():
            pool.run(write_checkpoint, 1, deep.name, deep.config, str(folder))
        ranks = pool.run(
            compare_on_rank, layout.world_size, deep.name, deep.config, str(folder), layout.flags, formats
        )
        problems, notes = ranks[0]
        measured, detail = float(len(problems)), "; ".join(problems[:3]) or "; ".join(notes)
    except RankError as error:
        measured, detail = math.nan, " ".join(str(error).split()[-60:])
    return Cell(case.name, name, measured, 0, detail, time.monotonic() - start, kind="layout")


# On the ranks


def compare_on_rank(
    name: str, config: dict[str, object], folder: str, flags: Sequence[object], formats: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Tensors that differ, of all formats; and a note on each format: how equal the ranks' shares are."""
    init_gloo_group()
    args = layout_rank.start(_case(name, config), Path(folder), flags)
    model = build_model(args, transforms=load_all(parts(args).transforms))
    load_hf_weights(args, model, folder)
    model_name = read_config(Path(folder))["model_type"]
    problems, notes = [], []
    for label in formats:
        form = FORMATS[label]
        whole = iter_hf_tensors(hf_form(args, model_name), model, dtype=form.dtype)
        expected = {hf_name: tensor.clone() for hf_name, tensor in whole}
        quantizer = None
        if form.quantized is not None:
            quantized = [
                n
                for n, t in expected.items()
                if t.dim() == 2 and is_quantized_offline(n, plain=find_weight_map(model_name).plain)
            ]
            quantizer = Quantizer(form.quantized, quantized)
            expected = {n: t for key, tensor in expected.items() for n, t in quantizer.quantize(key, tensor)}
        weights = SentWeights(
            form=hf_form(args, model_name),
            model=model,
            dtype=form.dtype,
            quantizer=quantizer,
            bucket_bytes=form.bucket_bytes,
        )
        source = ShardBuckets(weights, by_stage=form.by_stage)
        for _ in range(2):  # the second push finds everything prepared
            problems += [f"{label}: {text}" for text in differences(source, expected)]
        if form.by_stage:
            collected = CollectedBuckets(source, mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
            problems += [f"{label}, collected: {text}" for text in differences(collected, expected)]
            joined = [bucket.num_bytes for bucket in collected.manifest.buckets]
            limit = max(form.bucket_bytes, *(bucket.num_bytes for bucket in source.manifest.buckets))
            problems += [f"{label}: a bucket has {size} bytes" for size in joined if size > limit]
        sent = [sum(bucket.num_bytes for bucket in buckets) for buckets in source.plan.buckets]
        notes.append(f"{label}: {min(sent)}-{max(sent)} bytes a rank, {len(source.misfits)} gathered")
    return problems, notes


MAX_BUFFERS = 3
"""A rank's data in a push: its own shards, those joined with neighbors', and gathered tensors."""


def differences(source: BucketSource, expected: dict[str, Tensor]) -> list[str]:
    """Collective: the contents of all ranks' buckets against whole tensors.  Only rank 0 compares."""
    group = get_gloo_group()
    own, storages = [], set()
    for index, flat in source.iter_buckets():
        own.append((index, bytes(flat.tolist())))
        storages.add(flat.untyped_storage().data_ptr())
    gathered: list[list[tuple[int, bytes]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, own, group=group)
    manifests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(manifests, source.manifest.id, group=group)
    if dist.get_rank() != 0:
        return []
    problems = [f"rank {rank} has another manifest" for rank, other in enumerate(manifests) if other != manifests[0]]
    if len(storages) > MAX_BUFFERS:
        problems.append(f"{len(own)} buckets lie in {len(storages)} buffers; an engine keeps each mapped to the end")
    buckets: dict[int, bytes] = {}
    for rank, steps in enumerate(gathered):
        for index, data in steps:
            if index != NO_BUCKET and not _equal(source.manifest, index, buckets.setdefault(index, data), data):
                problems.append(f"bucket {index} of rank {rank} has other bytes")
    return [*problems, *_compare(source.manifest, buckets, expected)]


def _equal(manifest: Manifest, index: int, data: bytes, other: bytes) -> bool:
    """Whether two bodies of a bucket have the same pieces; the bytes in between do not matter."""
    for piece in manifest.buckets[index].slices:
        end = piece.offset + math.prod(piece.slice.sizes) * manifest.by_name[piece.name].torch_dtype.itemsize
        if data[piece.offset : end] != other[piece.offset : end]:
            return False
    return True


def _compare(manifest: Manifest, buckets: dict[int, bytes], expected: dict[str, Tensor]) -> Iterator[str]:
    listed = {entry.name for entry in manifest.tensors}
    if listed != set(expected):
        yield f"sent are {sorted(listed - set(expected))} too much, {sorted(set(expected) - listed)} too little"
        return
    made = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in expected.items()}
    times = {n: torch.zeros(t.shape, dtype=torch.int32) for n, t in expected.items()}
    for index, entry in enumerate(manifest.buckets):
        data = torch.frombuffer(bytearray(buckets[index]), dtype=torch.uint8)
        for piece in entry.slices:
            whole = made[piece.name]
            place, sizes = piece.slice.index, piece.slice.sizes
            part = piece.view(data, whole.dtype)
            whole.view(torch.uint8).view(*whole.shape, -1)[place].copy_(part.view(torch.uint8).view(*sizes, -1))
            times[piece.name][place] += 1
    for name, tensor in expected.items():
        if not bool((times[name] == 1).all()):
            yield f"{name}: an element is sent {int(times[name].min())} to {int(times[name].max())} times"
        elif made[name].dtype != tensor.dtype or not torch.equal(
            made[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ):
            yield f"{name} differs"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cells; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix.shard_push",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--layout", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--max-ranks", type=int, default=8, metavar="N", help="no layout with more")
    options = parser.parse_args(argv)
    names = options.layout or [name for name, layout in LAYOUTS.items() if layout.world_size <= options.max_ranks]
    try:
        cases = list(load_cases(options.family).values())
        cells = run_cells(cases, names, on_cell=lambda cell: print(cell.describe(), flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(cells))
    return int(not cells or not all(cell.passed for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
