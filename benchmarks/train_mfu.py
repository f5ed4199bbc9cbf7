"""Tokens per second, model FLOPs utilisation and memory of the real training step, for the shape of a real model.

    python benchmarks/train_mfu.py --model qwen3-1.7B --microbatches 4
    torchrun --nproc-per-node 2 benchmarks/train_mfu.py --model qwen3-4B -- --tensor-model-parallel-size 2

The weights are random, everything else is what a job runs: packed micro-batches, forward, backward, the policy loss
over the vocabulary and the optimizer step.  Flags behind ``--`` are the trainer's.

Model FLOPs are 6 N D (N: parameters, a tied vocabulary matrix counted once, an untied input embedding not at all)
plus those of causal attention; recomputed work is not counted.  The peak is 989 TFLOP/s a GPU, dense bf16 of an H100.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PEAK_FLOPS = 989e12
NUM_WARM_UP = 2
TRAINER_FLAGS = """
--debug-train-only --num-rollout 1000 --n-samples-per-prompt 1 --disable-rewards-normalization
--disable-rollout-global-dataset
--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --use-dynamic-batch-size
--attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --log-probs-chunk-size 4096
""".split()


def model_flags(name: str) -> list[str]:
    """The words of MODEL_ARGS in ``scripts/models/{name}.sh``."""
    script = f'source "{ROOT}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def write_hf_config(folder: Path, flags: list[str]) -> None:
    """A HF folder without weights, as the check of the model flags wants it."""
    value = dict(zip(flags, flags[1:]))
    config = {
        "model_type": "qwen3" if "--qk-layernorm" in flags else "llama",
        "architectures": ["Qwen3ForCausalLM" if "--qk-layernorm" in flags else "LlamaForCausalLM"],
        "hidden_size": int(value["--hidden-size"]),
        "num_hidden_layers": int(value["--num-layers"]),
        "num_attention_heads": int(value["--num-attention-heads"]),
        "num_key_value_heads": int(value["--num-query-groups"]),
        "intermediate_size": int(value["--ffn-hidden-size"]),
        "vocab_size": int(value["--vocab-size"]),
        "rms_norm_eps": float(value.get("--norm-epsilon", 1e-5)),
        "rope_theta": float(value["--rotary-base"]),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in flags,
    }
    if "--kv-channels" in value:
        config["head_dim"] = int(value["--kv-channels"])
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


def model_flops(args: Namespace, num_parameters: int, lengths: list[int]) -> tuple[float, float]:
    """FLOPs of the matrices and of causal attention, forward and backward, over all sequences."""
    attention = sum(2 * n * n * args.num_attention_heads * args.kv_channels for n in lengths) * args.num_layers
    return 6.0 * num_parameters * sum(lengths), 3.0 * attention


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
    parser.add_argument("--model", default="qwen3-0.6B", help="a file of scripts/models, without .sh")
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


def trainer_args(options: argparse.Namespace, extra: list[str], world_size: int) -> Namespace:
    """Complete args of a trainer of ``world_size`` ranks: the model's flags, ours, then ``extra``."""
    from slime.arguments import parse_args

    flags = model_flags(options.model)
    with tempfile.TemporaryDirectory() as folder:
        write_hf_config(Path(folder), [*flags, *extra])
        argv = [*flags, "--hf-checkpoint", folder, "--ref-load", folder, "--load", folder, *TRAINER_FLAGS]
        argv += ["--max-tokens-per-gpu", str(options.tokens)]
        # Every rank must have a sample; how many there are is decided by the data made below.
        argv += ["--rollout-batch-size", str(world_size), "--global-batch-size", str(world_size)]
        argv += ["--actor-num-gpus-per-node", str(world_size), *extra]
        return parse_args(argv=argv)


def start_trainer(options: argparse.Namespace, extra: list[str]) -> Namespace:
    """Join the process group and make the parallel groups of the flags; gives complete args."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args = trainer_args(options, extra, world_size)
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
    args = start_trainer(options, extra)

    from megatron.core import mpu

    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import setup_model_and_optimizer
    from slime.backends.megatron_utils.train_step import train_rollout

    model, optimizer, scheduler = setup_model_and_optimizer(args)
    assert optimizer is not None and scheduler is not None
    num_parameters = count_parameters(args, model)
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    forward_s, train_s, all_lengths = [], [], []
    num_steps = NUM_WARM_UP + options.steps
    for step in range(num_steps + bool(options.profile)):
        rank_data, lengths = make_rank_data(args, options, dp_size, dp_rank, seed=step)
        data = prepare_rollout_data(rank_data)
        iterators = get_data_iterator(data, len(model))
        synchronize()
        start = time.perf_counter()
        data.update(forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"]))
        synchronize()
        middle = time.perf_counter()
        if "log_probs" in data:
            pairs = zip(data["log_probs"], data["rewards"], strict=True)
            data["advantages"] = data["returns"] = [torch.full_like(x, reward) for x, reward in pairs]
        with profiled(options.profile if step == num_steps else 0):
            train_rollout(
                args, step, model, optimizer, scheduler, iterators, data["num_microbatches"], [len(lengths)],
                loss_type=args.loss_type, on_step=lambda *_: None,
            )  # fmt: skip
            synchronize()
        if NUM_WARM_UP <= step < num_steps:
            forward_s.append(middle - start)
            train_s.append(time.perf_counter() - middle)
            all_lengths.append(lengths)
        elif torch.cuda.is_available() and step < NUM_WARM_UP:
            torch.cuda.reset_peak_memory_stats()
    if dist.get_rank() == 0:
        report(args, options, num_parameters, forward_s, train_s, all_lengths)
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


def count_parameters(args: Namespace, model: Any) -> int:
    """Parameters of the whole model that take part in matrix products."""
    from slime.backends.megatron_utils.update_weight.sources.gather import iter_full_tensors

    total = 0
    for name, tensor in iter_full_tensors(model, dtype=None):
        is_lookup = name.startswith("embedding.") and args.untie_embeddings_and_output_weights
        total += 0 if is_lookup else tensor.numel()
    return total


def report(
    args: Namespace, options: Any, num_parameters: int, forward_s: list[float], train_s: list[float],
    all_lengths: list[list[int]],
) -> None:  # fmt: skip
    """One line of numbers: those of the median step."""
    world_size = dist.get_world_size()
    middle = sorted(range(len(train_s)), key=lambda i: train_s[i])[len(train_s) // 2]
    lengths, seconds = all_lengths[middle], train_s[middle]
    num_tokens = sum(lengths)
    matrices, attention = model_flops(args, num_parameters, lengths)
    rate = (matrices + attention) / seconds / world_size
    line = (
        f"{options.name or options.model}: N {num_parameters / 1e9:.3f} B, {num_tokens} tokens in {len(lengths)} "
        f"sequences, {options.microbatches} micro-batches: step {seconds:.3f} s, "
        f"{num_tokens / seconds / world_size:,.0f} tok/s/GPU, {rate / 1e12:.0f} TFLOP/s = MFU {rate / PEAK_FLOPS:.1%} "
        f"(attention {attention / (matrices + attention):.1%} of the FLOPs); log-prob pass {forward_s[middle]:.3f} s"
    )
    if torch.cuda.is_available():
        line += f"; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    print(line, flush=True)


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
