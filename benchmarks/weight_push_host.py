"""The host's part of a push of tens of thousands of tensors, beside the way of before, in one run.

    python benchmarks/weight_push_host.py                       # the 37,491 tensors of Qwen3-30B-A3B in FP8, on a CPU
    python benchmarks/weight_push_host.py --layers 4

One rank of four of an engine with expert parallelism: real manifest, plan, tables and digests, over as many weights,
with rows and columns divided by 32; seconds of the processor.  Printed, each beside what it replaces:

    begin        the manifest's name, against writing, reading and hashing the list of all tensors in every push
    plan         the trace from disk, against tracing the loader
    first push   a sample through the model's own loader, against all tensors
    later push   digests and placing of this rank's share, against digesting every byte
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.model_shapes import MODELS, outputs  # noqa: E402
from slime.backends.sglang_utils.bucket_shares import BucketShare, EngineShares, deal  # noqa: E402
from slime.backends.sglang_utils.load_plan import trace_load  # noqa: E402
from slime.backends.sglang_utils.model_load import ModelLoad  # noqa: E402
from slime.backends.sglang_utils.stored_plans import StoredPlans  # noqa: E402
from slime.weights.buckets import plan_buckets  # noqa: E402
from slime.weights.kernels.tables import DigestTable  # noqa: E402
from slime.weights.manifest import Manifest  # noqa: E402

NUM_RANKS, SHRINK, BLOCK = 4, 32, 128 // 32
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight(?:_scale_inv)?)$")


class EngineRank(nn.Module):
    """Stacked experts of one rank, everything else whole, with a loader that handles one tensor after the other."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], rank: int) -> None:
        super().__init__()
        self.rank, self.held = rank, nn.ParameterDict()
        counts: dict[str, int] = {}
        for name in shapes:
            if match := EXPERT.match(name):
                counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
        self.per_rank = max(counts.values(), default=NUM_RANKS) // NUM_RANKS
        for name, (shape, dtype) in shapes.items():
            if (match := EXPERT.match(name)) is None:
                self._add(name, shape, dtype)
            elif match[2] == "0" and match[3] != "up":
                rows = shape[0] * (2 if match[3] == "gate" else 1)
                self._add(self._stack(match), (self.per_rank, rows, *shape[1:]), dtype)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.held[name.replace(".", "/")] = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

    @staticmethod
    def _stack(match: re.Match[str]) -> str:
        return f"{match[1]}.{'w2' if match[3] == 'down' else 'w13'}_{match[4]}"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """What SGLang's loaders do for each tensor: find its parameter, cut out the rank's part, copy."""
        held = dict(self.held.items())
        for name, tensor in weights:
            match = EXPERT.match(name)
            if match is None:
                held[name.replace(".", "/")].data.copy_(tensor)
                continue
            local = int(match[2]) - self.rank * self.per_rank
            if 0 <= local < self.per_rank:
                target = held[self._stack(match).replace(".", "/")].data[local]
                if match[3] != "down":
                    half = target.size(0) // 2
                    target = target.narrow(0, half * (match[3] == "up"), half)
                target.copy_(tensor)


def seconds_of(run: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """The fastest of some runs, and its result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = time.process_time()
        result = run()
        best = min(best, time.process_time() - started)
    return best, result


def shapes_of(layers: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of the HF tensors, FP8 with scales, divided."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for output in outputs(MODELS["qwen3-30b-a3b"], lambda *shape: torch.empty(*shape, device="meta"), layers):
        rows, columns = max(output.rows // SHRINK, 1), max(output.source.size(1) // SHRINK, 1)
        if not output.is_quantized:
            found[output.name] = ((rows, columns), torch.bfloat16)
            continue
        found[output.name] = ((rows, columns), torch.float8_e4m3fn)
        found[f"{output.name}_scale_inv"] = ((-(-rows // BLOCK), -(-columns // BLOCK)), torch.float32)
    return found


def push_into(load: ModelLoad, manifest: Manifest, flats: list[Tensor]) -> None:
    """Begin, all buckets, finish."""
    load.begin(manifest)
    for index, flat in enumerate(flats):
        load.load(index, flat)
    load.finish()
    if load.problems:
        raise SystemExit(f"the push went wrong: {load.problems[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=None, help="only so many layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = shapes_of(options.layers)
    named = [[(name, shape, dtype)] for name, (shape, dtype) in shapes.items()]
    tensors, buckets = plan_buckets(named, 8 << 20)
    manifest = Manifest(tuple(tensors), tuple(buckets))
    flats = [torch.randint(0, 100, (bucket.num_bytes,), dtype=torch.uint8) for bucket in buckets]
    size = sum(bucket.num_bytes for bucket in buckets)
    print(f"{len(tensors):,} tensors, {size / 2**20:.0f} MiB in {len(buckets)} buckets; torch {torch.__version__}\n")

    def listed() -> str:
        text = manifest.to_json()  # the trainer
        json.loads(text)  # the engine's actor
        return hashlib.sha256(text.encode()).hexdigest()

    def line(what: str, now: float, before: float) -> None:
        print(f"{what:12} {now * 1e3:9.2f} ms   before {before * 1e3:9.2f} ms   {before / now:9.1f} times", flush=True)

    before, _ = seconds_of(listed, 3)
    text = manifest.to_json()
    known = Manifest.from_json(text)
    line("begin", max(seconds_of(lambda: known.id == manifest.id, 9)[0], 1e-6), before)

    with tempfile.TemporaryDirectory() as folder:
        plans = StoredPlans(Path(folder), "benchmark")
        model = EngineRank(shapes, 0)
        traced, _ = seconds_of(lambda: trace_load(model, manifest.tensors))
        load = ModelLoad(model, plans)
        first, _ = seconds_of(lambda: push_into(load, manifest, flats))
        next_model = EngineRank(shapes, 0)
        found, _ = seconds_of(lambda: plans.find(next_model, manifest))
        line("plan", found, traced)
        load = ModelLoad(next_model, plans)
        line("first push", seconds_of(lambda: push_into(load, manifest, flats))[0], first)

    push_into(load, manifest, flats)
    by_rank = [load.taken()]
    for rank in range(1, NUM_RANKS):
        other = ModelLoad(EngineRank(shapes, rank))
        other.begin(manifest)
        by_rank.append(other.taken())
    shares = deal(by_rank)
    device = torch.device("cpu")
    all_segments = [manifest.segments(index) for index in range(len(buckets))]
    whole = [DigestTable([b for b, _ in listed], [n for _, n in listed], device) for listed in all_segments]
    own = [BucketShare(shares[0][index], all_segments[index], device) for index in range(len(buckets))]

    def later(digest: Callable[[int, Tensor], Tensor]) -> dict[int, bytes]:
        found = {}
        load.begin(manifest)
        for index, flat in enumerate(flats):
            found[index] = digest(index, flat).numpy().tobytes()
            load.load(index, flat)
        load.finish()
        return found

    before, _ = seconds_of(lambda: later(lambda index, flat: whole[index].run(flat)), 3)
    now, digests = seconds_of(lambda: later(lambda index, flat: own[index].digest(flat)), 3)
    line("later push", now, before)
    read = sum(all_segments[index][n][1] for index in range(len(buckets)) for n in shares[0][index])
    engine = EngineShares(manifest)
    engine.deal(by_rank)
    merged, _ = seconds_of(lambda: engine.merge([digests, {}, {}, {}]), 3)
    print(f"\nbytes that a rank reads: {read / size:.1%}; digests of one rank merged in {merged * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
