"""Python seconds of a first push on both sides, against later pushes and against plainer ways.

    python benchmarks/first_push.py                            # the 37,491 tensors of Qwen3-30B-A3B, on a CPU
    python benchmarks/first_push.py --layers 4 --experts 8     # seconds

One process holds both sides, as in ``weight_push_ways.py``, in blockwise FP8: the trainer's model and SGLang's, with
the real number of layers and experts but widths of 128, so that bytes cost little.
Messages are those between a job's processes, without the server in between.  All seconds are processor time of this
thread, so that other work on the machine does not count.

Prints what a trainer's rank builds once; the steps of each push (including work on the bytes, which is all that the
third push has); and two parts beside their plain versions: a manifest written as JSON tensor by tensor, and a load
plan for which the loader runs on every tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_configs import qwen3_moe  # noqa: E402
from benchmarks.weight_push_engine import COMMON, FP8, RUN_FLAGS  # noqa: E402
from benchmarks.weight_push_ways import BLOCK, build, start_trainer  # noqa: E402
from slime.backends.sglang_utils import cpu_shim  # noqa: E402
from slime.ext.fast_push.manifest import BucketSlice, Manifest, TensorEntry  # noqa: E402
from slime.weights.tensor_slice import TensorSlice  # noqa: E402

WIDTH = 128


def parse_options() -> argparse.Namespace:
    """Return the options of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--bucket-mib", type=int, default=8, help="--update-weight-buffer-size, in MiB")
    parser.add_argument("--out", default=None, metavar="FILE", help="the seconds as JSON")
    return parser.parse_args()


def write_folder(folder: Path, options: argparse.Namespace) -> None:
    """Write the folder of the narrow model, without weights."""
    narrow = qwen3_moe(options.layers, WIDTH, WIDTH, 8, expert=WIDTH)
    own = {"vocab_size": 512, "num_experts": options.experts, "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(COMMON | narrow | own | {"torch_dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")  # never read


def trainer_args(folder: str, options: argparse.Namespace) -> Namespace:
    """Return complete flags of a colocated trainer of one rank, for the model in ``folder``."""
    from slime.compose import parse_args

    flags = ["--num-layers", options.layers, "--hidden-size", WIDTH, "--ffn-hidden-size", WIDTH]
    flags += ["--num-attention-heads", 8, "--group-query-attention", "--num-query-groups", 4, "--kv-channels", 128]
    flags += ["--vocab-size", 512, "--swiglu", "--qk-layernorm", "--normalization", "RMSNorm", "--norm-epsilon", 1e-6]
    flags += ["--rotary-base", 1000000, "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    flags += ["--num-experts", options.experts, "--moe-router-topk", 8, "--moe-ffn-hidden-size", WIDTH]
    flags += ["--moe-layer-freq", f"[1]*{options.layers}", "--moe-grouped-gemm", "--moe-router-dtype", "fp32"]
    flags += ["--moe-router-score-function", "softmax", "--moe-token-dispatcher-type", "alltoall"]
    flags += ["--use-rotary-position-embeddings", "--bf16", "--colocate", *RUN_FLAGS, "--rollout-batch-size", 1]
    flags += ["--actor-num-gpus-per-node", 1, "--rollout-num-gpus-per-engine", 1, "--rollout-num-gpus", 1]
    flags += ["--hf-checkpoint", folder, "--ref-load", folder, "--load", folder]
    return parse_args(argv=[str(word) for word in flags])


class Meter:
    """Seconds of named pieces of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a piece of work, add its seconds to those of its name, and return its result."""
        started = time.thread_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - started
        return result


def sent_weights(args: Namespace, model: torch.nn.Module, options: argparse.Namespace) -> Any:
    """Return the tensors that a push in blockwise FP8 sends."""
    from slime.backends.megatron_utils.megatron_to_hf import hf_form
    from slime.backends.megatron_utils.models import find_weight_map
    from slime.backends.megatron_utils.update_weight.transport import SentWeights
    from slime.ext.fast_push.gathered_buckets import hf_headers
    from slime.weights.quantize import Quantizer
    from slime.weights.quantize.formats import BlockFp8, is_quantized_offline

    weights = SentWeights(
        form=hf_form(args, "qwen3_moe"), model=[model], dtype=torch.bfloat16, bucket_bytes=options.bucket_mib << 20
    )
    (headers,) = hf_headers(weights)
    plain = find_weight_map("qwen3_moe").plain
    names = [name for name, shape, _ in headers if is_quantized_offline(name, shape, plain)]
    return replace(weights, quantizer=Quantizer(BlockFp8(BLOCK), names))


def make_source(weights: Any, meter: Meter) -> Any:
    """Build what a trainer's rank builds once, and return the buckets."""
    from slime.ext.fast_push.acknowledgements import DigestedBuckets
    from slime.ext.fast_push.shard_buckets import ShardBuckets, ShardSlices

    meter.add("slices of its parameters (in the next row again)", lambda: ShardSlices(weights))
    shards = meter.add("slices, told to all ranks, in buckets", lambda: ShardBuckets(weights))
    source = DigestedBuckets(shards)
    shards.record_digests = source.record
    meter.add("name of the manifest", lambda: source.manifest.id)
    return source


def engine_of(rank: Any) -> Any:
    """Return the actor of an engine whose only rank is in this process."""
    from slime.backends.sglang_utils.weight_verbs import WeightVerbs

    class Engine(WeightVerbs):
        def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
            return rank.answer(method, path, payload)

    engine = Engine()
    engine.args, engine.rank, engine.node_rank = Namespace(weight_update_timeout_s=600.0), 0, 0
    return engine


def push(source: Any, engine: Any, push_id: str) -> dict[str, float]:
    """Push once, as one trainer's rank does; return the seconds by step."""
    from slime.ext.fast_push import engine_verbs as verbs
    from slime.weights.push.wire import handle_of

    meter, manifest = Meter(), source.manifest

    def begin() -> None:
        if verbs.begin_weight_update(engine, manifest.id, push_id) is None:
            verbs.begin_weight_update(engine, manifest.id, push_id, manifest.to_json())

    meter.add("begin", begin)
    buckets: Iterator[tuple[int, Tensor]] = source.iter_buckets()
    handle = ""
    while (bucket := meter.add("fill", lambda: next(buckets, None))) is not None:
        index, flat = bucket
        handle = handle or handle_of(flat.as_strided((flat.untyped_storage().nbytes(),), (1,), 0))
        handles = {index: [handle]}
        meter.add("place", lambda handles=handles: verbs.receive_weight_buckets(engine, push_id, handles))
    answer = meter.add("acknowledge", lambda: verbs.acknowledge_weight_update(engine, push_id))
    assert not answer["problems"], answer["problems"][:3]
    verbs.commit_weight_update(engine, push_id, "1")
    return meter.seconds


def plain_manifest(manifest: Any) -> None:
    """Write and read a manifest as JSON tensor by tensor, without checking its content."""
    tensors = [[tensor.name, tensor.shape, tensor.dtype] for tensor in manifest.tensors]
    buckets = [
        [bucket.num_bytes, [[part.name, part.offset, part.slice.offsets, part.slice.sizes] for part in bucket.slices]]
        for bucket in manifest.buckets
    ]
    content = json.loads(json.dumps({"tensors": tensors, "buckets": buckets}, separators=(",", ":")))
    entries = tuple(TensorEntry(name, tuple(shape), dtype) for name, shape, dtype in content["tensors"])
    parts = tuple(
        tuple(BucketSlice(name, offset, TensorSlice(tuple(first), tuple(sizes))) for name, offset, first, sizes in own)
        for _, own in content["buckets"]
    )
    assert len(entries) == sum(map(len, parts))


def print_pieces(manifest: Any, model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Print the seconds of parts of a push's beginning, the plain way and ours."""
    from slime.ext.fast_push.alike_layers import trace_by_layers
    from slime.ext.fast_push.load_trace import trace_load

    meter = Meter()
    meter.add("manifest, plain", lambda: plain_manifest(manifest))
    again = meter.add("manifest", lambda: Manifest.from_json(manifest.to_json()))
    whole = meter.add("load plan, plain", lambda: trace_load(model, manifest.tensors))
    trace = meter.add("load plan", lambda: trace_by_layers(model, manifest.tensors))
    assert again == manifest
    assert {(w.name, w.copy) for w in whole.writes} == {(w.name, w.copy) for w in trace.writes}
    pairs = {name: (meter.seconds[f"{name}, plain"], meter.seconds[name]) for name in ("manifest", "load plan")}
    print(f"\n{'piece':12} {'plain':>8} {'ours':>8}    x")
    for name, (plain, ours) in pairs.items():
        print(f"{name:12} {plain:8.3f} {ours:8.3f} {plain / ours:4.1f}")
    return pairs


def main() -> None:
    """Measure, print, and write the JSON."""
    options = parse_options()
    cpu_shim.install()
    from slime.backends.megatron_utils import memory
    from tests.loaded_model.rank import LoadedRank

    once, pushes = Meter(), {}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), options)
        args = trainer_args(folder, options)
        start_trainer(args)
        model = build(args)
        memory.freeze_long_lived_objects()  # as after a job's connection to its engines
        source = make_source(sent_weights(args, model, options), once)
        rank = LoadedRank(folder, store=f"{folder}/store", quantization=FP8)
        engine = engine_of(rank)
        for name in ("first", "second", "third"):
            pushes[name] = push(source, engine, name)
    manifest = source.manifest
    print(f"\n{len(manifest.tensors):,} tensors in {len(manifest.buckets)} buckets; seconds of processor time\n")
    for name, seconds in once.seconds.items():
        print(f"{seconds:8.3f}  {name}")
    print(f"\n{'push':22}" + "".join(f"{step:>13}" for step in pushes["first"]))
    for name, steps in pushes.items():
        print(f"{name:22}" + "".join(f"{seconds:13.3f}" for seconds in steps.values()))
    pieces = print_pieces(manifest, rank.model)
    if options.out:
        Path(options.out).write_text(json.dumps({"once": once.seconds, "pushes": pushes, "pieces": pieces}, indent=1))
    sys.stdout.flush()
    os._exit(0)  # two libraries own the process groups


if __name__ == "__main__":
    main()
