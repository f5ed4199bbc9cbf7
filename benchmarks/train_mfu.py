"""Tokens per second, model FLOPs utilisation and memory of the real training step, for the shape of a real model.

    python benchmarks/train_mfu.py --model qwen3-1.7B --microbatches 4
    torchrun --nproc-per-node 2 benchmarks/train_mfu.py --model qwen3-4B -- --tensor-model-parallel-size 2
    python benchmarks/train_mfu.py --model moonlight --layers 6
    python benchmarks/train_mfu.py --model qwen3-30B-A3B --layers 12 --reference
    python benchmarks/train_mfu.py --model qwen3-4B -- --lora-rank 32

The weights are random, everything else is what a job runs: packed micro-batches, forward, backward, the policy loss
over the vocabulary and the optimizer step, and before it the log-prob pass of the old policy and, with
``--reference``, of a reference model whose weights wait on the host.  Models are those of published_configs.py; their
flags are derived, as for a job without them.  Flags behind ``--`` are the trainer's.

Model FLOPs are those of the matrices that a token passes (of experts, the active ones) and of causal attention, three
forward passes for a step; recomputed work is not counted.  The peak is 989 TFLOP/s a GPU, dense bf16 of an H100.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.published_configs import PUBLISHED, WITHOUT_A_FILE  # noqa: E402

PEAK_FLOPS = 989e12
NUM_WARM_UP = 2
TRAINER_FLAGS = """
--debug-train-only --num-rollout 1000 --n-samples-per-prompt 1 --disable-rewards-normalization
--disable-rollout-global-dataset
--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --use-dynamic-batch-size
--attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --log-probs-chunk-size 4096
""".split()


def write_hf_config(folder: Path, model: str, layers: int | None) -> None:
    """Write a HF folder without weights: the config of ``model``, with its first ``layers`` layers."""
    config = PUBLISHED.get(model) or WITHOUT_A_FILE[model]
    whole = config["num_hidden_layers"]
    if layers is not None:
        config = {
            key: value[:layers] if isinstance(value, list) and len(value) == whole else value
            for key, value in config.items()
        } | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")  # never read: the weights are random


def sequence_lengths(num_tokens: int, longest: int, seed: int) -> list[int]:
    """Log-normal lengths that fill ``num_tokens`` exactly."""
    generator = random.Random(seed)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, longest, 16 + int(generator.lognormvariate(7.5, 1.0))))
        if num_tokens - sum(lengths) < 16:
            lengths[-1] += num_tokens - sum(lengths)
    return lengths


def make_rank_data(args: Namespace, options: argparse.Namespace, dp_size: int, dp_rank: int, seed: int) -> Any:
    """Return the rollout side's data for this rank: ``options.microbatches`` full packs of random tokens."""
    from slime.train_data.columns import TrainBatch
    from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
    from slime.train_data.split import split_by_rank

    cp_size = args.context_parallel_size
    packs = [
        sequence_lengths(options.tokens * cp_size, options.longest * cp_size, seed * 1000 + index)
        for index in range(options.microbatches * dp_size)
    ]
    lengths = [length for pack in packs for length in pack]
    generator = torch.Generator().manual_seed(seed)
    data: dict[str, Any] = {
        "tokens": [torch.randint(0, args.vocab_size, (n,), generator=generator).tolist() for n in lengths],
        "response_lengths": [max(1, n * 3 // 4) for n in lengths],
        "rewards": [float(index % 2) * 2 - 1 for index in range(len(lengths))],
        "truncated": [0] * len(lengths),
        "rollout_ids": list(range(len(lengths))),
        "sample_indices": list(range(len(lengths))),
    }
    data["loss_masks"] = [[1] * n for n in data["response_lengths"]]
    data["rollout_log_probs"] = [[-1.0] * n for n in data["response_lengths"]]
    data["raw_reward"] = list(data["rewards"])
    config = ScheduleConfig(
        dp_size=dp_size, cp_size=cp_size, use_dynamic_batch_size=True, max_tokens_per_gpu=options.tokens,
        micro_batch_size=1,
    )  # fmt: skip
    schedule = build_dp_schedule(config, lengths, global_batch_size=len(lengths), rollout_indices=data["rollout_ids"])
    return split_by_rank(TrainBatch.from_dict(data), schedule)[dp_rank], lengths


def print_profile(profile: Any, wall_s: float, top: int) -> None:
    """GPU time by kernel, and what of the wall time had no kernel running."""
    from torch.autograd import DeviceType

    events = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
    rows = sorted(
        ((event.key, event.self_device_time_total / 1e6, event.count) for event in events), key=lambda row: -row[1]
    )
    busy = sum(row[1] for row in rows)
    print(f"\nkernels: {busy * 1e3:.0f} ms of {wall_s * 1e3:.0f} ms of wall time (with the profiler on)")
    for name, seconds, count in rows[:top]:
        print(f"  {seconds * 1e3:8.1f} ms {seconds / busy:6.1%} {count:6d} x  {name[:110]}")


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Options of the benchmark, and the flags for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6B", choices=sorted([*PUBLISHED, *WITHOUT_A_FILE]), metavar="NAME",
                        help="of published_configs.py: a file of scripts/models, without .sh")  # fmt: skip
    parser.add_argument("--layers", type=int, default=None, metavar="N", help="only its first N layers")
    parser.add_argument("--reference", action="store_true", help="run the reference's log-prob pass, too")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of one packed micro-batch on one GPU")
    parser.add_argument("--longest", type=int, default=16384, help="longest sequence")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches of one optimizer step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, behind two that warm up")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N longest kernels of one step")
    parser.add_argument("--name", default="", help="printed in front of the result")
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    return parser.parse_args(own), extra


def trainer_args(options: argparse.Namespace, extra: list[str], world_size: int, folder: str) -> Namespace:
    """Complete args of ``world_size`` ranks: flags of the model, written to ``folder``, ours, then ``extra``."""
    from slime.arguments import parse_args

    write_hf_config(Path(folder), options.model, options.layers)
    argv = ["--hf-checkpoint", folder, "--ref-load", folder, "--load", folder, "--finetune", *TRAINER_FLAGS]
    argv += ["--max-tokens-per-gpu", str(options.tokens)]
    # Every rank must have a sample; how many there are is decided by the data made below.
    argv += ["--rollout-batch-size", str(world_size), "--global-batch-size", str(world_size)]
    argv += ["--actor-num-gpus-per-node", str(world_size), *extra]
    return parse_args(argv=argv)


def start_trainer(options: argparse.Namespace, extra: list[str], folder: str) -> Namespace:
    """Join the process group and make the parallel groups of the flags; gives complete args."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args = trainer_args(options, extra, world_size, folder)
    worker = MegatronTrainRayActor()
    worker.set_rendezvous(
        world_size, rank, os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 29512))
    )
    worker.join_process_group(args)
    initialize.init(args)
    return args


def main() -> None:
    options, extra = parse_options()
    if "LOCAL_RANK" in os.environ:
        # A trainer sees one GPU, as Ray gives it to a job; to be said before CUDA is looked at.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    with tempfile.TemporaryDirectory() as folder:
        run(options, extra, folder)


def run(options: argparse.Namespace, extra: list[str], folder: str) -> None:
    """Train the steps, with the model's config.json in ``folder``, and print the numbers of the median one."""
    args = start_trainer(options, extra, folder)

    from megatron.core import mpu

    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import setup_model_and_optimizer
    from slime.backends.megatron_utils.policies import ModelSwitch
    from slime.backends.megatron_utils.train_step import train_rollout

    model, optimizer, scheduler = setup_model_and_optimizer(args)
    assert optimizer is not None and scheduler is not None
    weights = ModelSwitch(model)
    if options.reference:
        weights.backup("ref")
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    steps: list[Step] = []
    num_steps = NUM_WARM_UP + options.steps
    for number in range(num_steps + bool(options.profile)):
        rank_data, lengths = make_rank_data(args, options, dp_size, dp_rank, seed=number)
        data = prepare_rollout_data(rank_data)
        iterators = get_data_iterator(data, len(model))
        step = Step(lengths)
        if options.reference:
            with step.timed("reference"):
                weights.backup("actor")
                weights.switch_to("ref")
                forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"], "ref_")
                weights.switch_to("actor")
        with step.timed("log-probs"):
            data.update(forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"]))
        if "log_probs" in data:
            pairs = zip(data["log_probs"], data["rewards"], strict=True)
            data["advantages"] = data["returns"] = [torch.full_like(x, reward) for x, reward in pairs]
        with profiled(options.profile if number == num_steps else 0), step.timed("step"):
            train_rollout(
                args, number, model, optimizer, scheduler, iterators, data["num_microbatches"], [len(lengths)],
                loss_type=args.loss_type, on_step=lambda *_: None,
            )  # fmt: skip
        if NUM_WARM_UP <= number < num_steps:
            steps.append(step)
        elif torch.cuda.is_available() and number < NUM_WARM_UP:
            torch.cuda.reset_peak_memory_stats()
    if dist.get_rank() == 0:
        report(args, options, steps)
    dist.destroy_process_group()


@contextlib.contextmanager
def profiled(top: int) -> Iterator[None]:
    """Print the ``top`` longest kernels of what runs inside; with 0, nothing."""
    if not top or dist.get_rank() != 0:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        yield
        elapsed_s = time.perf_counter() - start
    print_profile(trace, elapsed_s, top)


@dataclass
class Step:
    """One optimizer step with its log-prob passes."""

    lengths: list[int]
    """Tokens of each sequence, on all ranks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By pass."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Take the time of what runs inside, kernels included."""
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] = time.perf_counter() - start


def report(args: Namespace, options: Any, steps: list[Step]) -> None:
    """Print a line of numbers, those of the median step, and a line with the share of each pass."""
    from slime.backends.megatron_utils.flags.model_dims import model_dims

    step = sorted(steps, key=lambda step: step.seconds["step"])[len(steps) // 2]
    dims, num_tokens, seconds = model_dims(args), sum(step.lengths), step.seconds["step"]
    flops = 3 * sum(map(dims.forward_flops, step.lengths))
    rate = flops / seconds / dist.get_world_size()
    line = (
        f"{options.name or options.model}: {flops / 6 / num_tokens / 1e9:.3f} B multiply-adds a token, "
        f"{num_tokens} tokens in {len(step.lengths)} sequences, {options.microbatches} micro-batches: "
        f"step {seconds:.3f} s, {num_tokens / seconds / dist.get_world_size():,.0f} tok/s/GPU, "
        f"{rate / 1e12:.0f} TFLOP/s = MFU {rate / PEAK_FLOPS:.1%}"
    )
    if torch.cuda.is_available():
        line += f"; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    whole = sum(step.seconds.values())
    print(line, "; ".join(f"{k} {v:.3f} s ({v / whole:.0%})" for k, v in step.seconds.items()), sep="\n", flush=True)


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
