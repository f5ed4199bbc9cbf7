"""Seconds from "push" to "every engine serves the new weights", with the real sender and real SGLang engines.

    python benchmarks/weight_push_engine.py --model qwen3-4B
    python benchmarks/weight_push_engine.py --model qwen3-30B-A3B --fp8 --num-gpus 4 -- \\
        --expert-model-parallel-size 4 --sglang-ep-size 4
    python benchmarks/weight_push_engine.py --model tiny --pushes 2                    # on a CPU
    python benchmarks/weight_push_engine.py --model glm4-9B -- --lora-rank 32 --lora-push adapter

Trainer ranks and one engine share the GPUs ``0 .. num-gpus - 1``, as with ``--colocate``; with ``--disaggregated`` the
engine has the GPUs after the trainer's.  Shapes are the model's, weights are random on both sides, and neither
side reads a checkpoint.  Every push is a job's: pause, flush, buckets, digests compared, commit, continue.
Flags after ``--`` are those of ``train.py``.  Prints the median push, its phases, bytes, rate, and timeline,
beside the time of a plain copy of the bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.model_shapes import MODELS, model_flags, outputs  # noqa: E402
from benchmarks.published_configs import PUBLISHED, qwen3, qwen3_moe  # noqa: E402
from slime.backends.sglang_utils import cpu_shim  # noqa: E402
from slime.compose import parts  # noqa: E402
from slime.ext.fast_push.loaders import RECEIVER  # noqa: E402
from slime.ray.parts import load_all  # noqa: E402
from slime.ray.train_actor import kernel_environment  # noqa: E402
from slime.utils.net import get_free_port  # noqa: E402
from slime.weights.push.engine import EngineProxy  # noqa: E402

SMALL = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "glm4": "Glm4ForCausalLM"}
CONFIGS: dict[str, dict[str, Any]] = {
    name: config | {"architectures": [ARCHITECTURES[config["model_type"]]]}
    for name, config in {
        "tiny": qwen3(2, 128, 256, 4, tied=False) | SMALL,
        "tiny-moe": qwen3_moe(2, 128, 256, 4, expert=64) | SMALL | SMALL_EXPERTS,
        **{name: PUBLISHED[name] for name in ("qwen3-4B", "glm4-9B", "qwen3-30B-A3B")},
    }.items()
}
"""The entries of each model's config.json that decide its shapes."""
COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NORMS = ("input_layernorm.", "post_attention_layernorm.", "post_self_attn_layernorm.", "post_mlp_layernorm.")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TINY_FLAGS = """
--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 32 --vocab-size 512 --swiglu --qk-layernorm --normalization RMSNorm
--norm-epsilon 1e-6 --rotary-base 1000000 --disable-bias-linear --untie-embeddings-and-output-weights
--use-rotary-position-embeddings
""".split()
TINY_MOE_FLAGS = """
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq [1,1] --moe-grouped-gemm
--moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
""".split()
RUN_FLAGS = """
--num-rollout 1 --n-samples-per-prompt 1 --disable-rewards-normalization --disable-rollout-global-dataset
--num-steps-per-rollout 1 --attention-dropout 0 --hidden-dropout 0 --finetune
--sglang-skip-tokenizer-init --sglang-max-total-tokens 16384 --sglang-cuda-graph-backend-decode disabled
--sglang-cuda-graph-backend-prefill disabled --no-job-secret
""".split()

TURN_TIMEOUT = timedelta(minutes=30)
BETWEEN_S = 0.2
"""Seconds between two pushes, where a job has a rollout: an engine's work after a push has ended by then."""


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Options of the benchmark, and the flags for train.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=sorted(CONFIGS))
    parser.add_argument("--layers", type=int, default=None, help="only so many layers of it")
    parser.add_argument("--fp8", action="store_true", help="the engine serves blockwise FP8")
    parser.add_argument("--num-gpus", type=int, default=1, help="trainer ranks")
    parser.add_argument("--engine-gpus", type=int, default=None, help="GPUs of the engine; default: --num-gpus")
    parser.add_argument("--first-gpu", type=int, default=0, help="of those that the run takes")
    parser.add_argument("--disaggregated", action="store_true", help="the engine has GPUs of its own")
    parser.add_argument("--pushes", type=int, default=5, help="measured pushes, behind one that warms up")
    parser.add_argument("--check", action="store_true", help="compare all weights in one more push (by value: slow)")
    parser.add_argument("--turn", default=None, metavar="FILE", help="push while this file is locked: runs take turns")
    parser.add_argument("--out", default=None, metavar="FILE", help="the numbers as JSON")
    parser.add_argument("--work-dir", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--url", default=None, help=argparse.SUPPRESS)
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.engine_gpus = options.engine_gpus or options.num_gpus
    return options, extra


def write_folder(folder: Path, options: argparse.Namespace) -> None:
    """A model folder without weights."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    config = COMMON | CONFIGS[options.model] | {"torch_dtype": dtype}
    if options.layers:
        config["num_hidden_layers"] = options.layers
    if options.fp8:
        config["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = ["unused"]
    if options.fp8:
        # The names in such a checkpoint tell the sender what to quantize.
        dimensions = MODELS[options.model.lower()]
        found = outputs(dimensions, lambda *shape: torch.empty(*shape, device="meta"))
        norms = dict(zip((f"norm_{index}." for index in range(4)), NORMS, strict=True))
        for output in found:
            for plain, name in norms.items():
                object.__setattr__(output, "name", output.name.replace(plain, name))
        names = [output.name for output in found] + [f"{o.name}_scale_inv" for o in found if o.is_quantized]
    # Values are never read, because the weights are random.  Dtypes are: a push keeps the folder's fp32 tensors in
    # fp32.
    of = {name: torch.float32 if name.endswith("_scale_inv") else getattr(torch, dtype) for name in names}
    save_file({name: torch.zeros(1, dtype=of[name]) for name in names}, folder / "model.safetensors")


def run_args(folder: str, options: argparse.Namespace, extra: list[str]) -> Namespace:
    """Complete args of the job that this run represents."""
    from slime.compose import parse_args

    tiny = {"tiny": TINY_FLAGS, "tiny-moe": [*TINY_FLAGS, *TINY_MOE_FLAGS]}
    flags = list(tiny[options.model] if options.model in tiny else model_flags(options.model))
    if options.layers:
        flags += ["--num-layers", options.layers]
        if "num_experts" in CONFIGS[options.model]:
            flags += ["--moe-layer-freq", f"[1]*{options.layers}"]
    place = [] if options.disaggregated else ["--colocate"]
    argv = [
        *(*flags, *RUN_FLAGS, *place, "--hf-checkpoint", folder, "--ref-load", folder, "--load", folder),
        *("--bf16" if torch.cuda.is_available() else "--fp32",),
        *("--actor-num-gpus-per-node", options.num_gpus, "--rollout-num-gpus-per-engine", options.engine_gpus),
        # Nothing is generated; a step must have a sample for each rank.
        *("--rollout-num-gpus", options.engine_gpus, "--rollout-batch-size", options.num_gpus, *extra),
    ]
    args = parse_args(argv=[str(word) for word in argv])
    args.sglang_load_format = "dummy"  # not as a flag: adapter pushes refuse it
    return args


# The engine


def start_engine(folder: str, options: argparse.Namespace, extra: list[str]) -> Any:
    """An engine that serves random weights."""
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    args = run_args(folder, options, extra)
    first = options.num_gpus if options.disaggregated else 0
    engine = SGLangEngine(args, rank=0, base_gpu_id=options.first_gpu + first, num_gpus_per_engine=options.engine_gpus)
    port = get_free_port(26000 + os.getpid() % 500 * 8, consecutive=3)  # several runs may start at once
    engine.init(host="127.0.0.1", port=port, nccl_port=port + 1, dist_init_addr=f"127.0.0.1:{port + 2}")
    return engine


class ThreadPending:
    """An engine's answer, awaited in a thread."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self, timeout_s: float) -> Any:
        return self.future.result(timeout_s)


class ThreadProxy(EngineProxy):
    """An engine object of this process."""

    index = 0
    loaders = (RECEIVER,)

    def __init__(self, engine: Any, *, num_gpus: int, gpu_offset: int, is_colocated: bool) -> None:
        self.engine, self.num_gpus, self.gpu_offset, self.is_colocated = engine, num_gpus, gpu_offset, is_colocated
        self.pool = ThreadPoolExecutor(4)

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> ThreadPending:
        """Call the method on a thread."""
        return ThreadPending(self.pool.submit(getattr(self.engine, method), *arguments, **keywords))

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> ThreadPending:
        """Call the function on a thread."""
        return ThreadPending(self.pool.submit(function, self.engine, *arguments))


# The trainer


def trainer(options: argparse.Namespace, extra: list[str]) -> None:
    """One rank: the model with random weights, and the pushes."""
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401, I001
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.backends.megatron_utils.model import build_model
    from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args = run_args(options.work_dir, options, extra)
    worker = MegatronTrainRayActor()
    worker.set_rendezvous(
        world_size,
        rank,
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        local_rank=options.first_gpu + rank,
    )
    worker.join_process_group(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
    initialize.init(args)
    model = build_model(args, transforms=load_all(parts(args).transforms), wrap_with_ddp=False)
    hf_config = json.loads((Path(options.work_dir) / "config.json").read_text())
    engine = SGLangEngine(args, rank=0, num_gpus_per_engine=options.engine_gpus)
    engine.connect(options.url, tp_size=options.engine_gpus)
    offset = options.num_gpus if options.disaggregated else 0
    proxy = ThreadProxy(
        engine, num_gpus=options.engine_gpus, gpu_offset=offset, is_colocated=not options.disaggregated
    )
    transport = parts(args).transport
    make_transport = transport and transport.load()
    updater = WeightUpdater(args, model, lambda: None, hf_config=hf_config, make_transport=make_transport)
    updater.connect([proxy], num_new_engines=1)
    if options.turn:
        wait_for_turn(options.turn, rank)
    reports, seconds = [], []
    rate = copy_rate(next(model[0].parameters()).device)
    for push in range(options.pushes + 1):
        perturb(model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a job has read the step's numbers before it pushes
        time.sleep(BETWEEN_S)
        dist.barrier()
        started = time.perf_counter()
        report = updater.push()
        if push:
            reports.append(report)
            seconds.append(time.perf_counter() - started)
        if rank == 0:
            print(f"push {push}: {time.perf_counter() - started:.3f} s {asdict(report)}", flush=True)
    if rank == 0:
        print_result(options, extra, engine, seconds, reports)
        print_timeline(reports[seconds.index(sorted(seconds)[len(seconds) // 2])], rate, options.num_gpus)
    if options.check:
        args.check_weight_update_equal = True
        updater.push()
        if rank == 0:
            print("one more push, with every weight compared: equal", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads with open connections must not delay the end


def wait_for_turn(file: str, rank: int) -> None:
    """Return on all ranks when rank 0 holds the lock of ``file``, which it keeps until it ends.

    Ranks wait on the host: an NCCL barrier would spin on the GPUs of the run whose turn it is.
    """
    on_host = dist.new_group(backend="gloo", timeout=TURN_TIMEOUT)
    if rank == 0:
        print("waits for its turn", flush=True)
        fcntl.flock(os.open(file, os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)
    dist.barrier(group=on_host)


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads, and writes."""
    source = torch.zeros((1 << 30) if device.type == "cuda" else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return source.numel() / min(seconds)


def print_timeline(report: Any, rate: float, num_ranks: int) -> None:
    """Print the steps of a push on the trainer's first rank, the work of the engine's devices, and the minimum."""
    width = 60
    scale = width / report.elapsed_s
    print("\n   begin      end  step, of the median push (ms)")
    for step, begin_s, end_s in report.spans:
        if step == "fill" and end_s - begin_s < 1e-5:
            continue  # the end of the walk
        first, last = int(begin_s * scale), min(max(int(end_s * scale), int(begin_s * scale) + 1), width)
        bar = " " * first + "#" * (last - first)
        print(f"{begin_s * 1e3:8.1f} {end_s * 1e3:8.1f}  {step:12} |{bar:{width}}|")
    parts = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in report.engine_seconds.items())
    print(f"the engine's slowest device, ms: {parts}")
    own = report.num_bytes / num_ranks
    print(
        f"floor: {2 * own / rate * 1e3:.1f} ms to copy {own / 2**30:.2f} GiB a GPU into buckets and out of them at "
        f"{rate / 1e9:.0f} GB/s, as a copy runs here; the push took {report.elapsed_s * 1e3:.1f} ms",
        flush=True,
    )


def perturb(model: Any) -> None:
    """Change every weight slightly, so that no push could be served from an older one."""
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.mul_(1.01)  # with adapters, B stays zero; the time does not depend on it


def print_result(
    options: argparse.Namespace, extra: list[str], engine: Any, seconds: list[float], reports: list[Any]
) -> None:
    """Print one line, and write the JSON of ``--out``."""
    median = statistics.median(seconds)
    report = reports[seconds.index(sorted(seconds)[len(seconds) // 2])]
    where = f"{options.num_gpus} GPUs" + (f" + {options.engine_gpus} for the engine" if options.disaggregated else "")
    kind = "FP8" if options.fp8 else "bf16" if torch.cuda.is_available() else "fp32"
    print(
        f"\n{options.model} {kind} on {where} [{' '.join(extra)}]: median push {median:.3f} s "
        f"(min {min(seconds):.3f}, max {max(seconds):.3f}), {report.num_bytes / 2**30:.2f} GiB in "
        f"{report.num_buckets} buckets, {report.num_tensors} tensors, {report.num_bytes / median / 1e9:.1f} GB/s; "
        f"engine serves version {engine.get_weight_version()}",
        flush=True,
    )
    split = {step: statistics.median(one.seconds[step] for one in reports) for step in report.seconds}
    print("median seconds by step: " + ", ".join(f"{step} {value:.4f}" for step, value in split.items()), flush=True)
    if options.out:
        numbers = {
            "options": vars(options),
            "flags": extra,
            "seconds": seconds,
            "reports": [asdict(r) for r in reports],
        }
        Path(options.out).write_text(json.dumps(numbers, indent=2))


def main() -> None:
    options, extra = parse_options()
    if not torch.cuda.is_available():
        cpu_shim.install()
    if options.url is not None:
        trainer(options, extra)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), options)
        started = time.perf_counter()
        engine = start_engine(folder, options, extra)
        print(f"engine up after {time.perf_counter() - started:.0f} s at {engine.get_url()}", flush=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, __file__, *sys.argv[1:]]
        at = command.index("--") if "--" in command else len(command)
        command[at:at] = ["--work-dir", folder, "--url", engine.get_url()]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(options.num_gpus), "LOCAL_RANK": str(rank)}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                # As in a job's trainers: ranks share the cores, and NCCL refuses ranks whose settings differ.
                | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.num_gpus))}
                | kernel_environment(),
            )
            for rank in range(options.num_gpus)
        ]
        try:
            codes = [process.wait(timeout=1800) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
            engine.shutdown()
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
