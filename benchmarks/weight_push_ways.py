"""Ways to push weights, compared in one run: how the trainer fills buckets, and how the engine loads them.

    python benchmarks/weight_push_ways.py --model tiny-moe                                   # on a CPU, seconds
    python benchmarks/weight_push_ways.py --model qwen3-30B-A3B --layers 1 --pushes 3        # on a CPU with 16 GB
    python benchmarks/weight_push_ways.py --model qwen3-4B --formats bf16 fp8                # one GPU of 80 GB
    python benchmarks/weight_push_ways.py --model qwen3-30B-A3B --layers 12 --formats bf16 fp8 --json runs.jsonl

One process holds both sides with random weights: the trainer's model (Megatron) and the engine's
(SGLang's own class), on one device.  The trainer fills flat buckets either from *gathered* tensors, one at a time, or
from its *shards*, with one table of copies per bucket.  The engine loads them either through the model's *own*
``load_weights``, as views of the bucket, or by the plan that was *traced* from it, whose copies are compared with the
bucket afterwards.  All four combinations must leave the same bytes in the engine's model.

Prints for each: seconds of the first push in this process (compiling kernels, building tables and plan), of a
first push after that (a new manifest), the median of later ones and its parts, and the peak memory of each side
beyond its model, including the bucket.  On a CPU that is the resident set, which is coarse.  Digests, which cost both
ways the same, and the transfer between two processes are excluded.  One trainer rank has nothing to gather
from other ranks, so the cost of collectives is not in this table.  Flags after ``--`` are those of ``train.py``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.weight_push_engine import COMMON, CONFIGS, FP8, RUN_FLAGS, TINY_FLAGS, TINY_MOE_FLAGS  # noqa: E402
from slime.backends.sglang_utils import cpu_shim  # noqa: E402
from slime.compose import parts  # noqa: E402
from slime.ray.parts import load_all  # noqa: E402
from slime.utils.net import get_free_port  # noqa: E402

if TYPE_CHECKING:
    from slime.ext.fast_push.carrier import BucketSource
    from slime.ext.fast_push.manifest import Manifest

BLOCK = (128, 128)
PAIRS = (("gathered", "own"), ("gathered", "traced"), ("shards", "own"), ("shards", "traced"))


class OwnLoader:
    """The model's own ``load_weights`` on views of each bucket; joins tensors that come in several pieces."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def begin(self, manifest: Manifest) -> None:
        """Expect the buckets of ``manifest``."""
        from slime.ext.fast_push.model_load import HeldTensors

        self.manifest, self.held = manifest, HeldTensors(manifest, {})

    def load(self, index: int, flat: Tensor) -> None:
        """Load the tensors that this bucket completes."""
        bucket = self.manifest.buckets[index]
        complete = self.held.add(bucket, flat, {piece.name for piece in bucket.slices})
        with torch.no_grad():
            self.model.load_weights(complete.tensors)  # type: ignore[operator]

    def finish(self) -> None:
        """Check that no tensor waits for a piece."""
        assert not self.held.incomplete, self.held.incomplete[:3]


class TracedLoader:
    """slime's load plan, with its comparison of every parameter."""

    def __init__(self, model: nn.Module) -> None:
        from slime.ext.fast_push.model_load import ModelLoad

        self._load = ModelLoad(model)
        self.begin, self.load = self._load.begin, self._load.load

    def finish(self) -> None:
        """Wait for the comparison."""
        self._load.finish()
        assert not self._load.problems, self._load.problems[:3]


Loader = OwnLoader | TracedLoader


# Memory and time


class Meter:
    """Seconds and peak memory of one side's steps, beyond the memory before its first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Discard measured steps, but not the memory they hold."""
        self.seconds, self.peak_bytes = 0.0, 0
        self._held = getattr(self, "_held", 0)

    def step(self, work: Callable[[], Any]) -> Any:
        """Run a step and record it."""
        before = self._allocated()
        self._reset_peak()
        start = time.perf_counter()
        result = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.peak_bytes = max(self.peak_bytes, self._held + self._peak() - before)
        self._held += self._allocated() - before
        return result

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else _status_bytes("VmRSS")

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    """A size in the kernel's description of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


# The two models


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Options of the benchmark, and the flags for train.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=sorted(CONFIGS))
    parser.add_argument("--layers", type=int, help="only so many layers of it")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--device", default=None, choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument("--bucket-mib", type=int, default=512, help="--update-weight-buffer-size, in MiB")
    parser.add_argument("--pushes", type=int, default=5, help="later pushes of each pair")
    parser.add_argument("--host", action="store_true", help="fill from pinned host copies, as a trainer that sleeps")
    parser.add_argument("--json", default=None, metavar="OUT", help="append the run to this file as one line")
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.model.startswith("tiny") and "fp8" in options.formats:
        options.formats = ["bf16"]  # too narrow for blocks of 128
    options.layers = options.layers or int(CONFIGS[options.model]["num_hidden_layers"])
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options, extra


def write_folder(folder: Path, options: argparse.Namespace) -> None:
    """A model folder without weights."""
    from safetensors.torch import save_file

    config = COMMON | CONFIGS[options.model] | {"num_hidden_layers": options.layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")  # never read: the weights are random


def trainer_args(folder: str, options: argparse.Namespace, extra: list[str]) -> Namespace:
    """Complete args of a colocated trainer of one rank."""
    from benchmarks.model_shapes import model_flags
    from slime.compose import parse_args

    tiny = {"tiny": TINY_FLAGS, "tiny-moe": [*TINY_FLAGS, *TINY_MOE_FLAGS]}
    flags = [*(tiny[options.model] if options.model in tiny else model_flags(options.model))]
    flags += ["--num-layers", str(options.layers), "--bf16", "--colocate"]
    if "--num-experts" in flags:
        flags += ["--moe-layer-freq", f"[1]*{options.layers}"]
    flags += ["--hf-checkpoint", folder, "--ref-load", folder, "--load", folder]
    flags += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1", "--rollout-num-gpus", "1"]
    return parse_args(argv=[*flags, *RUN_FLAGS, "--rollout-batch-size", "1", *extra])


def start_trainer(args: Namespace) -> None:
    """Join a process group of one rank, and make Megatron's parallel groups."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    worker = MegatronTrainRayActor()
    worker.set_rendezvous(1, 0, "127.0.0.1", get_free_port(29512))
    worker.join_process_group(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
    initialize.init(args)


def build(args: Namespace) -> nn.Module:
    """The trainer's model without gradients, with small random numbers instead of costly initial values."""
    from slime.backends.megatron_utils.model_provider import get_model_provider

    args.perform_initialization = False
    model = get_model_provider(args, transforms=[make(args) for make in load_all(parts(args).transforms)])()
    if torch.cuda.is_available():
        model.cuda()  # the provider leaves some modules, such as routers, on the host
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05)
    return model


# A push


def push(source: BucketSource, loader: Loader, trainer: Meter, engine: Meter) -> float:
    """Fill every bucket and load it; return the seconds of both sides together."""
    before = trainer.seconds + engine.seconds
    engine.step(lambda: loader.begin(source.manifest))
    buckets: Iterator[tuple[int, Tensor]] = iter(source.iter_buckets())
    while (bucket := trainer.step(lambda: next(buckets, None))) is not None:
        engine.step(functools.partial(loader.load, *bucket))
        del bucket  # a source frees its buffer inside its last step
    engine.step(loader.finish)
    return trainer.seconds + engine.seconds - before


def measure(
    make_source: Callable[[], BucketSource], make_loader: Callable[[], Loader], device: torch.device, pushes: int
) -> dict[str, float]:
    """Numbers of one pair of ways: seconds, GiB."""
    from slime.backends.megatron_utils.memory import clear_memory

    result: dict[str, float] = {}
    for key in ("cold_first_s", "first_s"):
        clear_memory()  # pairs must not inherit from each other
        trainer, engine = Meter(device), Meter(device)
        source, loader = trainer.step(make_source), engine.step(make_loader)
        result[key] = trainer.seconds + engine.seconds + push(source, loader, trainer, engine)
        result[key.replace("_s", "_trainer_s")] = trainer.seconds
        result[key.replace("_s", "_engine_s")] = engine.seconds
        if key == "cold_first_s":
            source = loader = None  # type: ignore[assignment]
    result["first_trainer_gib"], result["first_engine_gib"] = trainer.peak_bytes / 2**30, engine.peak_bytes / 2**30
    # The second push of a traced plan still builds tables, so it is not steady state.
    result["second_s"] = push(source, loader, trainer, engine)
    later = []
    for _ in range(pushes):
        trainer.reset()
        engine.reset()
        seconds = push(source, loader, trainer, engine)
        later.append((seconds, trainer.seconds, engine.seconds, trainer.peak_bytes, engine.peak_bytes))
    *seconds_of, trainer_bytes, engine_bytes = zip(*later, strict=True)
    for name, values in zip(("later_s", "later_trainer_s", "later_engine_s"), seconds_of, strict=True):
        result[name] = statistics.median(values)
    result["later_trainer_gib"], result["later_engine_gib"] = max(trainer_bytes) / 2**30, max(engine_bytes) / 2**30
    result["num_buckets"], result["num_tensors"] = len(source.manifest.buckets), len(source.manifest.tensors)
    result["gib"] = sum(bucket.num_bytes for bucket in source.manifest.buckets) / 2**30
    return result


def digest_of(model: nn.Module) -> str:
    """One word for the bytes of all parameters."""
    from slime.weights.digest import digest_bytes

    total = 0
    for parameter in model.parameters():
        total = (total * 3 + digest_bytes(parameter.data.contiguous().view(-1).view(torch.uint8))) % 2**64
    return f"{total:016x}"


def run_format(
    kind: str, args: Namespace, trained: nn.Module, engine: nn.Module, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run all pairs for one format of the engine."""
    from slime.backends.megatron_utils.megatron_to_hf import hf_form
    from slime.backends.megatron_utils.memory import clear_memory
    from slime.backends.megatron_utils.models import find_weight_map
    from slime.backends.megatron_utils.update_weight.transport import SentWeights
    from slime.ext.fast_push.gathered_buckets import GatheredBuckets, hf_headers
    from slime.ext.fast_push.shard_buckets import ShardBuckets
    from slime.weights.quantize import Quantizer
    from slime.weights.quantize.formats import BlockFp8, is_quantized_offline

    name = str(CONFIGS[options.model]["model_type"])
    device = torch.device(options.device)
    host = None
    if options.host:
        host = {f"0.{n}": p.detach().to("cpu").pin_memory() for n, p in trained.named_parameters()}
    weights = SentWeights(
        form=hf_form(args, name),
        model=[trained],
        get_host_weights=lambda: host,
        dtype=torch.bfloat16,
        bucket_bytes=options.bucket_mib << 20,
    )
    if kind == "fp8":
        (headers,) = hf_headers(weights)
        plain = find_weight_map(name).plain
        names = [n for n, shape, _ in headers if is_quantized_offline(n, shape, plain)]
        weights = replace(weights, quantizer=Quantizer(BlockFp8(BLOCK), names))
    sources: dict[str, Callable[[], BucketSource]] = {
        "gathered": lambda: GatheredBuckets(weights, across_stages=True),
        "shards": lambda: ShardBuckets(weights),
    }
    loaders: dict[str, Callable[[], Loader]] = {
        "own": lambda: OwnLoader(engine),
        "traced": lambda: TracedLoader(engine),
    }
    rows: list[dict[str, Any]] = []
    for source, loader in PAIRS:
        where = {"model": options.model, "layers": options.layers, "format": kind}
        row: dict[str, Any] = {**where, "source": source, "loader": loader}
        for parameter in engine.parameters():
            parameter.data.zero_()  # one pair must not see another's results
        try:
            row |= measure(sources[source], loaders[loader], device, options.pushes)
            row["digest"] = digest_of(engine)
        except Exception as error:  # the other pairs must still be measured
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        print(json.dumps(row), flush=True)
        clear_memory()  # pairs must not inherit from each other
    digests = {row["digest"] for row in rows if "digest" in row}
    if len(digests) > 1:
        print(f"{options.model} {kind}: the pairs leave different bytes in the engine: {digests}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table; ratios are relative to gathered buckets through the model's own loader."""
    lines = [
        "| engine | buckets from | loader | first push, s | first, compiled, s | later, s | trainer + engine, s |"
        " later x | trainer GiB | engine GiB |",
        "|" + " --- |" * 3 + " ---: |" * 7,
    ]
    base: dict[str, Any] = {}
    for row in rows:
        if "later_s" not in row:
            lines.append(f"| {row['format']} | {row['source']} | {row['loader']} | failed |")
            continue
        if (row["source"], row["loader"]) == PAIRS[0]:
            base[row["format"]] = row
        ratio = base[row["format"]]["later_s"] / row["later_s"] if row["format"] in base else float("nan")
        lines.append(
            f"| {row['format']} | {row['source']} | {row['loader']} | {row['cold_first_s']:.3f} | {row['first_s']:.3f}"
            f" | {row['later_s']:.4f} | {row['later_trainer_s']:.4f} + {row['later_engine_s']:.4f} | {ratio:.1f}"
            f" | {max(row['later_trainer_gib'], row['first_trainer_gib']):.2f}"
            f" | {max(row['later_engine_gib'], row['first_engine_gib']):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the JSON."""
    options, extra = parse_options()
    if options.device == "cpu":
        cpu_shim.install()
    from tests.loaded_model.rank import LoadedRank

    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), options)
        args = trainer_args(folder, options, extra)
        start_trainer(args)
        trained = build(args)
        rows: list[dict[str, Any]] = []
        rank = None
        for kind in options.formats:
            quantization = FP8 if kind == "fp8" else None
            if rank is None:
                rank = LoadedRank(folder, store=f"{folder}/store", quantization=quantization, device=options.device)
            else:
                rank.swap(folder, "bfloat16", quantization)
            rows += run_format(kind, args, trained, rank.model, options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sizes = ", ".join(
        f"{row['format']} {row['gib']:.2f} GiB in {row['num_tensors']} tensors and {row['num_buckets']} buckets"
        for row in rows
        if (row["source"], row["loader"]) == PAIRS[0] and "gib" in row
    )
    print(f"\n{options.model}, {options.layers} layers, {sizes}; {where}, torch {torch.__version__}\n\n{table(rows)}")
    if options.json:
        record = {"benchmark": "weight_push_ways", "date": datetime.date.today().isoformat(), "device": where}
        record |= {"torch": torch.__version__, "command": sys.argv, "rows": rows}
        with open(options.json, "a") as file:
            file.write(json.dumps(record) + "\n")
    os._exit(1 if any("error" in row for row in rows) else 0)  # two libraries own the process groups


if __name__ == "__main__":
    main()
