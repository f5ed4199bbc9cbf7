"""Tokens per second, model FLOPs utilization and memory of the real training step, for the shape of a real model.

    python benchmarks/train_mfu.py --model qwen3-1.7B --microbatches 4
    torchrun --nproc-per-node 2 benchmarks/train_mfu.py --model qwen3-4B -- --tensor-model-parallel-size 2
    python benchmarks/train_mfu.py --model moonlight --layers 6
    python benchmarks/train_mfu.py --model qwen3-30B-A3B --layers 12 --reference
    python benchmarks/train_mfu.py --model qwen3-4B -- --lora-rank 32
    python benchmarks/train_mfu.py --model qwen3-vl-8B --images-per-sample 1 4 -- --train-vision-tower

The weights are random; everything else is what a job runs: packed micro-batches, forward, backward, the policy loss
over the vocabulary and the optimizer step, preceded by the log-prob pass of the old policy and, with
``--reference``, of a reference model whose weights are kept on the host.  Models are those of published_configs.py;
their flags are derived as in a job.  Flags after ``--`` are the trainer's.

Model FLOPs count the matrices that a token passes (of experts, the active ones) and causal attention, three
forward passes per step; recomputed work is not counted.  With images, the tower's FLOPs are added, one
forward pass for a frozen tower; the text part is the step minus the tower's own time.  The last warm-up step counts
how often the host waits for the GPU.  The peak is 989 TFLOP/s per GPU, dense bf16 of an H100.
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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.published_configs import PUBLISHED, WITHOUT_A_FILE  # noqa: E402
from benchmarks.step_numbers import Step, numbers, report, write_rows  # noqa: E402
from benchmarks.tower_in_step import HostWaits, SampleImages, TowerClock  # noqa: E402

NUM_WARM_UP = 2
TRAINER_FLAGS = """
--debug-train-only --num-rollout 1000 --n-samples-per-prompt 1 --disable-rewards-normalization
--disable-rollout-global-dataset
--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --use-dynamic-batch-size
--attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --log-probs-chunk-size 4096
""".split()


def first_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the config with its first ``layers`` layers; a vision tower stays complete."""
    if text := config.get("text_config"):
        vision = dict(config["vision_config"])
        if features := vision.get("deepstack_visual_indexes"):
            vision["deepstack_visual_indexes"] = features[:layers]  # each layer uses one
        return config | {"text_config": first_layers(text, layers), "vision_config": vision}
    whole = config["num_hidden_layers"]
    return {
        key: value[:layers] if isinstance(value, list) and len(value) == whole else value
        for key, value in config.items()
    } | {"num_hidden_layers": layers}


def write_hf_config(folder: Path, model: str, layers: int | None) -> None:
    """Write a HF folder without weights: the config of ``model``, with its first ``layers`` layers."""
    config = PUBLISHED.get(model) or WITHOUT_A_FILE[model]
    if layers is not None:
        config = first_layers(config, layers)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")  # never read: the weights are random


def sequence_lengths(num_tokens: int, longest: int, seed: int, shortest: int = 16) -> list[int]:
    """Log-normal lengths above ``shortest`` that fill ``num_tokens`` exactly."""
    generator = random.Random(seed)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, longest, shortest + int(generator.lognormvariate(7.5, 1.0))))
        if num_tokens - sum(lengths) < shortest:
            lengths[-1] += num_tokens - sum(lengths)
    return lengths


def make_rank_data(
    args: Namespace, options: argparse.Namespace, dp_size: int, dp_rank: int, seed: int,
    images: SampleImages | None = None, shortest: int = 16,
) -> Any:  # fmt: skip
    """Return the rollout side's data for this rank: ``options.microbatches`` full packs of random tokens.

    Args:
        args: the trainer's flags.
        options: the benchmark's options.
        dp_size: ranks that share the work.
        dp_rank: this rank.
        seed: seed of lengths, tokens and pixels.
        images: images before each sample's text.
        shortest: minimum tokens of a sample, including its images.
    """
    from slime.train_data.columns import TrainBatch
    from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
    from slime.train_data.split import split_by_rank

    cp_size = args.context_parallel_size
    packs = [
        sequence_lengths(options.tokens * cp_size, options.longest * cp_size, seed * 1000 + index, shortest)
        for index in range(options.microbatches * dp_size)
    ]
    lengths = [length for pack in packs for length in pack]
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, args.vocab_size, (n,), generator=generator) for n in lengths]
    num_image_tokens = images.num_tokens if images is not None else 0
    data: dict[str, Any] = {
        "tokens": [(x if images is None else images.replace_start(x)).tolist() for x in tokens],
        "response_lengths": [max(1, (n - num_image_tokens) * 3 // 4) for n in lengths],
        "rewards": [float(index % 2) * 2 - 1 for index in range(len(lengths))],
        "truncated": [0] * len(lengths),
        "rollout_ids": list(range(len(lengths))),
        "sample_indices": list(range(len(lengths))),
    }
    data["loss_masks"] = [[1] * n for n in data["response_lengths"]]
    data["rollout_log_probs"] = [[-1.0] * n for n in data["response_lengths"]]
    data["raw_reward"] = list(data["rewards"])
    if images is not None:
        data["multimodal_train_inputs"] = [images.train_inputs(generator) for _ in lengths]
    config = ScheduleConfig(
        dp_size=dp_size, cp_size=cp_size, use_dynamic_batch_size=True, max_tokens_per_gpu=options.tokens,
        micro_batch_size=1,
    )  # fmt: skip
    schedule = build_dp_schedule(config, lengths, global_batch_size=len(lengths), rollout_indices=data["rollout_ids"])
    return split_by_rank(TrainBatch.from_dict(data), schedule)[dp_rank], lengths


def print_profile(profile: Any, wall_s: float, top: int) -> None:
    """Print GPU time by kernel, and the wall time without a running kernel."""
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
    parser.add_argument(
        "--layers", type=int, default=None, metavar="N", help="only its first N layers; a tower stays whole"
    )
    parser.add_argument("--reference", action="store_true", help="run the reference's log-prob pass, too")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of one packed micro-batch on one GPU")
    parser.add_argument("--longest", type=int, default=16384, help="longest sequence")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches of one optimizer step")
    parser.add_argument("--images-per-sample", type=int, nargs="+", default=[], metavar="N",
                        help="images in front of each sample's text; several numbers are measured one after the "
                        "other, with samples of the same lengths (a model with a vision tower)")  # fmt: skip
    parser.add_argument("--image-size", default="1024x1024", metavar="HxW", help="their pixels")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of the numbers, written anew after each step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, behind two that warm up")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N longest kernels of one step")
    parser.add_argument("--name", default="", help="printed in front of the result")
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    return parser.parse_args(own), extra


def trainer_args(options: argparse.Namespace, extra: list[str], world_size: int, folder: str) -> Namespace:
    """Complete args of ``world_size`` ranks: the model's flags, written to ``folder``, ours, then ``extra``."""
    from slime.compose import parse_args

    write_hf_config(Path(folder), options.model, options.layers)
    argv = ["--hf-checkpoint", folder, "--ref-load", folder, "--load", folder, "--finetune", *TRAINER_FLAGS]
    argv += ["--max-tokens-per-gpu", str(options.tokens)]
    # Every rank must have a sample; the data made below decide how many there are.
    argv += ["--rollout-batch-size", str(world_size), "--global-batch-size", str(world_size)]
    argv += ["--actor-num-gpus-per-node", str(world_size), *extra]
    return parse_args(argv=argv)


def start_trainer(options: argparse.Namespace, extra: list[str], folder: str) -> Namespace:
    """Join the process group and create the parallel groups; return complete args."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.utils.net import get_free_port

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args = trainer_args(options, extra, world_size, folder)
    worker = MegatronTrainRayActor()
    port = int(os.environ.get("MASTER_PORT") or get_free_port(29512))
    worker.set_rendezvous(world_size, rank, os.environ.get("MASTER_ADDR", "127.0.0.1"), port)
    worker.join_process_group(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
    initialize.init(args)
    return args


def main() -> None:
    options, extra = parse_options()
    if "LOCAL_RANK" in os.environ:
        # A trainer sees one GPU, as in a Ray job; set before CUDA is initialized.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    with tempfile.TemporaryDirectory() as folder:
        run(options, extra, folder)


def run(options: argparse.Namespace, extra: list[str], folder: str) -> None:
    """Train the steps, with the model's config.json in ``folder``, and print the numbers of the median one."""
    start = time.perf_counter()
    args = start_trainer(options, extra, folder)

    from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
    from slime.backends.megatron_utils.flags.model_dims import model_dims
    from slime.backends.megatron_utils.model import setup_model_and_optimizer
    from slime.backends.megatron_utils.policies import ModelSwitch
    from slime.compose import parts
    from slime.ray.parts import load_all

    config = read_hf_config(folder)
    dims = model_dims(args, config)
    if options.images_per_sample and dims.tower is None:
        raise SystemExit(f"--images-per-sample is given; {options.model} has no vision tower. Choose another --model.")
    pixels = tuple(map(int, options.image_size.split("x")))
    cases = [SampleImages.of(dims.tower, config, count, pixels) for count in options.images_per_sample]
    model, optimizer, scheduler = setup_model_and_optimizer(args, transforms=load_all(parts(args).transforms))
    trained = Trained(args, model, optimizer, scheduler, ModelSwitch(model), tower_clock(model))
    if options.reference:
        trained.weights.backup("ref")
    say(f"model made: {time.perf_counter() - start:.1f} s")
    shortest = 16 + max((images.num_tokens for images in cases), default=0)
    if shortest > min(options.tokens, options.longest):
        raise SystemExit(f"--tokens or --longest is below {shortest}, which a sample with its images has at least.")
    rows: list[dict[str, Any]] = []
    for images in cases or [None]:
        steps: list[Step] = []
        waits = HostWaits()
        num_steps = NUM_WARM_UP + options.steps
        for number in range(num_steps + bool(options.profile)):
            is_profiled = number == num_steps
            step = run_step(
                trained, options, number, images, shortest,
                profiled(options.profile if is_profiled else 0),
                waits.counted() if number == NUM_WARM_UP - 1 else contextlib.nullcontext(),
            )  # fmt: skip
            say(f"step {number}: " + ", ".join(f"{name} {value:.3f} s" for name, value in step.seconds.items()))
            if number < NUM_WARM_UP and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            elif not is_profiled and number >= NUM_WARM_UP:
                steps.append(step)
                row = {
                    **{"name": options.name or options.model, "microbatches": options.microbatches},
                    **numbers(dims, steps, images, waits),
                }
                write_rows(options.out, [*rows, row])
        if dist.get_rank() == 0:
            report(row)
        rows.append(row)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Trained:
    """The trained model and its companions."""

    args: Namespace
    model: list[Any]
    optimizer: Any
    scheduler: Any
    weights: Any
    clock: TowerClock | None


def tower_clock(model: list[Any]) -> TowerClock | None:
    """Return a clock of these chunks' vision tower; None if they have none."""
    named = [pair for chunk in model for pair in chunk.named_modules()]
    towers = [module for name, module in named if name.endswith("vision_model")]
    return TowerClock(towers[0]) if towers else None


def run_step(
    trained: Trained, options: argparse.Namespace, number: int, images: SampleImages | None, shortest: int,
    *around: contextlib.AbstractContextManager[None],
) -> Step:  # fmt: skip
    """Make the data of a step and train on it, with its log-prob passes before; ``around`` wraps the training."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
    from slime.backends.megatron_utils.train_step import OptimizerSteps

    args, model, weights = trained.args, trained.model, trained.weights
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    rank_data, lengths = make_rank_data(args, options, dp_size, dp_rank, number, images, shortest)
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
    if trained.clock is not None:
        trained.clock.take()  # that of the passes above
    with contextlib.ExitStack() as stack:
        for context in around:
            stack.enter_context(context)
        stack.enter_context(step.timed("step"))
        data["global_batch_sizes"] = [len(lengths)]
        steps = OptimizerSteps(args, model, trained.optimizer, trained.scheduler)
        steps.take(number, data, iterators, loss_type=args.loss_type, on_step=lambda *_: None)
    step.tower = trained.clock.take() if trained.clock is not None else {}
    return step


def say(line: str) -> None:
    """Print a progress line, on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


@contextlib.contextmanager
def profiled(top: int) -> Iterator[None]:
    """Print the ``top`` longest kernels of the enclosed code; with 0, nothing."""
    if not top or dist.get_rank() != 0:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        yield
        elapsed_s = time.perf_counter() - start
    print_profile(trace, elapsed_s, top)


if __name__ == "__main__":
    main()
