"""Peak memory of the real training step against the plan's prediction, for a list of configurations.

    python benchmarks/plan_memory.py                        every case that fits the GPUs of this machine
    python benchmarks/plan_memory.py --case 0.6B 1.7B-recompute --json measured.json
    python benchmarks/plan_memory.py --plan-only            only the plan's numbers; needs no GPU

Each case runs in separate processes (one per GPU): random weights of the true shape, packed micro-batches, three
optimizer steps, of which the last two are measured.  Beside it the table shows what ``slime.ext.plan`` predicts.
The exit code is 1 if a peak differs from the plan by more than ``--bound``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GIB = 2**30
NUM_STEPS = 3
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOAD = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    """A file of scripts/models."""
    tokens: int
    """Tokens of a packed micro-batch on one GPU."""
    flags: str = ""
    num_gpus: int = 1


CASES = {
    "0.6B": Case("qwen3-0.6B", 16384),
    "0.6B-recompute": Case("qwen3-0.6B", 32768, FULL),
    "0.6B-offload": Case("qwen3-0.6B", 16384, OFFLOAD),
    "0.6B-norms": Case("qwen3-0.6B", 16384, "--recompute-granularity selective --recompute-modules layernorm"),
    "1.7B": Case("qwen3-1.7B", 8192),
    "1.7B-recompute": Case("qwen3-1.7B", 32768, FULL),
    "1.7B-offload": Case("qwen3-1.7B", 16384, f"{OFFLOAD} {FULL}"),
    "1.7B-half-offload": Case("qwen3-1.7B", 8192, f"{OFFLOAD} --optimizer-offload-fraction 0.5"),
    "4B-offload": Case("qwen3-4B", 16384, f"{OFFLOAD} {FULL}"),
    "4B-block": Case("qwen3-4B", 4096, f"{OFFLOAD} --recompute-granularity full --recompute-method block "
                     "--recompute-num-layers 18"),
    "4B-24-layers": Case("qwen3-4B", 8192, f"--num-layers 24 {FULL}"),
    "9B-12-layers": Case("glm4-9B", 4608, f"--num-layers 12 {FULL}"),
    "30B-A3B-3-layers": Case("qwen3-30B-A3B", 8192, "--num-layers 3 --moe-layer-freq [1]*3"),
    "30B-A3B-3-layers-recompute": Case("qwen3-30B-A3B", 16384, f"--num-layers 3 --moe-layer-freq [1]*3 {FULL}"),
    "moonlight-4-layers": Case("moonlight", 8192, "--num-layers 4 --moe-layer-freq [0]+[1]*3"),
    "0.6B-tp2": Case("qwen3-0.6B", 16384, TP2, num_gpus=2),
    "4B-tp2": Case("qwen3-4B", 8192, TP2, num_gpus=2),
    "4B-tp2-recompute": Case("qwen3-4B", 16384, f"{TP2} {FULL}", num_gpus=2),
    "4B-dp2": Case("qwen3-4B", 16384, FULL, num_gpus=2),
    "4B-cp2": Case("qwen3-4B", 8192, f"--context-parallel-size 2 {FULL}", num_gpus=2),
    "4B-pp2": Case("qwen3-4B", 8192, "--pipeline-model-parallel-size 2", num_gpus=2),
    "9B-tp2": Case("glm4-9B", 9216, f"{TP2} {FULL}", num_gpus=2),
}  # fmt: skip
"""9B-tp2 needs GPUs of more than 80 GB."""


def trainer_words(case: Case, folder: str) -> list[str]:
    """The flags of the trainer."""
    from benchmarks.model_shapes import model_flags
    from benchmarks.train_mfu import TRAINER_FLAGS

    return [
        *model_flags(case.model), "--hf-checkpoint", folder, "--ref-load", folder, "--load", folder, *TRAINER_FLAGS,
        "--bf16", "--max-tokens-per-gpu", str(case.tokens), "--rollout-batch-size", str(case.num_gpus),
        "--global-batch-size", str(case.num_gpus),
        "--actor-num-gpus-per-node", str(case.num_gpus), *case.flags.split(),
    ]  # fmt: skip


def write_folder(folder: Path) -> None:
    """A HF folder that does not describe the model, because the flags do."""
    import torch
    from safetensors.torch import save_file

    from slime.backends.megatron_utils.models import IS_PARTIAL

    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], IS_PARTIAL: True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")  # never read: the weights are random


def planned(case: Case, num_microbatches: int) -> list[dict[str, float]]:
    """The plan's prediction for every pipeline stage, in GiB."""
    from slime.backends.megatron_utils.flags.model_dims import model_dims
    from slime.ext.plan.command import complete_run
    from slime.ext.plan.layout import ParallelSizes, PipelineSplit, stage_chunks
    from slime.ext.plan.parameters import chunk_parameters
    from slime.ext.plan.trainer_memory import TrainerSettings, rank_memory

    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        run = complete_run(trainer_words(case, folder), Path(folder))
    assert run.args is not None and not run.problems, run.problems
    dims, sizes = model_dims(run.args, run.hf_config), ParallelSizes.from_args(run.args)
    settings = TrainerSettings.from_args(run.args, sizes, tokens=case.tokens, num_microbatches=num_microbatches)
    stages = []
    for number, chunks in enumerate(stage_chunks(PipelineSplit.from_args(run.args))):
        count = chunk_parameters(chunks, dims, sizes)
        memory = rank_memory(chunks, number, count, dims, sizes, settings)
        parts = {
            name: getattr(memory, name) / GIB for name in ("static", "activations", "head", "work", "peak", "outside")
        }
        stages.append(parts)
    return stages


def run_rank(case: Case, options: argparse.Namespace) -> None:
    """One rank: three steps, then a JSON line with its peaks."""
    rank = int(os.environ.get("RANK", 0))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import torch.distributed as dist

    from benchmarks.train_mfu import make_rank_data
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.compose import parse_args

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        args: Namespace = parse_args(argv=trainer_words(case, folder))
    worker = MegatronTrainRayActor()
    worker.set_rendezvous(case.num_gpus, rank, "127.0.0.1", int(os.environ["MASTER_PORT"]))
    worker.join_process_group(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
    initialize.init(args)

    from megatron.core import mpu

    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import setup_model_and_optimizer
    from slime.backends.megatron_utils.train_step import OptimizerSteps
    from slime.compose import parts
    from slime.ray.parts import load_all

    model, optimizer, scheduler = setup_model_and_optimizer(args, transforms=load_all(parts(args).transforms))
    assert optimizer is not None and scheduler is not None
    load = argparse.Namespace(tokens=case.tokens, longest=case.tokens, microbatches=options.microbatches)
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    log_prob_peak = 0
    for step in range(NUM_STEPS):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()  # the optimizer's states exist from the first step on
        rank_data, lengths = make_rank_data(args, load, dp_size, dp_rank, seed=step)
        data = prepare_rollout_data(rank_data)
        iterators = get_data_iterator(data, len(model))
        data.update(forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"]))
        if step:
            log_prob_peak = max(log_prob_peak, torch.cuda.max_memory_allocated())
        if "log_probs" in data:
            pairs = zip(data["log_probs"], data["rewards"], strict=True)
            data["advantages"] = data["returns"] = [torch.full_like(x, reward) for x, reward in pairs]
        data["global_batch_sizes"] = [len(lengths)]
        steps = OptimizerSteps(args, model, optimizer, scheduler)
        steps.take(step, data, iterators, loss_type=args.loss_type, on_step=lambda *_: None)
        torch.cuda.synchronize()
    del data, iterators
    free, total = torch.cuda.mem_get_info()
    result = {
        "rank": rank,
        "stage": mpu.get_pipeline_model_parallel_rank(),
        "peak_allocated": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved": torch.cuda.max_memory_reserved() / GIB,
        "static": torch.cuda.memory_allocated() / GIB,
        "log_probs": log_prob_peak / GIB,
        "outside": (total - free - torch.cuda.memory_reserved()) / GIB,
        "gpu": torch.cuda.get_device_name(),
        "seconds": time.perf_counter() - start,
    }
    print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]] | str:
    """Run a case on its ranks; on failure, return the last line of output."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", name, "--microbatches", str(options.microbatches)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(rank), "MASTER_PORT": str(port)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(CASES[name].num_gpus)
    ]  # fmt: skip
    results, failure = [], ""
    for process in ranks:
        try:
            output, _ = process.communicate(timeout=options.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        found = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
        results += found
        if not found:
            errors = [line for line in output.splitlines() if "Error" in line]
            failure = (errors or output.splitlines() or ["no output"])[-1]
    return failure or results


def report(name: str, plan: list[dict[str, float]], results: list[dict[str, Any]] | str) -> dict[str, Any]:
    """Print the lines of a case; return them as a record."""
    record: dict[str, Any] = {"case": name, **vars(CASES[name]), "plan": plan, "measured": results}
    if isinstance(results, str):
        print(f"| {name} | {max(stage['peak'] for stage in plan):.2f} | failed: {results[:120]} | | | | |", flush=True)
        return record
    for result in sorted(results, key=lambda result: result["rank"])[:: CASES[name].num_gpus if len(plan) == 1 else 1]:
        stage = plan[result["stage"]]
        error = stage["peak"] / result["peak_allocated"] - 1
        label = name if len(plan) == 1 else f"{name}, stage {result['stage']}"
        print(
            f"| {label} | {stage['peak']:.2f} | {result['peak_allocated']:.2f} | {error:+.1%} "
            f"| {stage['static']:.2f} / {result['static']:.2f} | {result['peak_reserved']:.2f} "
            f"| {stage['outside']:.2f} / {result['outside']:.2f} | {result['seconds']:.0f} |",
            flush=True,
        )
        record["error"] = max(record.get("error", 0.0), abs(error))
    return record


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), help="default: all that this machine has GPUs for")
    parser.add_argument("--microbatches", type=int, default=2, help="of a step and rank")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    parser.add_argument("--bound", type=float, default=0.10, help="largest relative difference of a peak")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a case")
    parser.add_argument("--plan-only", action="store_true", help="print the plan's numbers; needs no GPU")
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.rank_of:
        run_rank(CASES[options.rank_of], options)
        return
    import torch

    num_gpus = torch.cuda.device_count()
    names = options.case or [name for name, case in CASES.items() if options.plan_only or case.num_gpus <= num_gpus]
    print("| case | plan, GiB | peak allocated | off by | static: plan / measured | reserved | outside torch | s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    records = []
    for name in names:
        plan = planned(CASES[name], options.microbatches)
        if options.plan_only:
            for number, stage in enumerate(plan):
                label = name if len(plan) == 1 else f"{name}, stage {number}"
                print(
                    f"| {label} | {stage['peak']:.2f} | | | {stage['static']:.2f} / | | {stage['outside']:.2f} / | |"
                )
            continue
        records.append(report(name, plan, measure(name, options)))
        if options.json:
            Path(options.json).write_text(json.dumps(records, indent=1))
    if any("error" not in record or record["error"] > options.bound for record in records):
        sys.exit(1)


if __name__ == "__main__":
    main()
