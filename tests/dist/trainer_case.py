"""A tiny trainer on several real ranks: HF model, complete args, train data split for each rank."""

from __future__ import annotations

import random
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

from slime.utils.net import find_available_port
from tests.matrix.pool import RankPool

LENGTHS = ((3, 9), (2, 1), (7, 20), (5, 5), (1, 13), (4, 2), (6, 31), (3, 3), (3, 8))
"""Prompt and response tokens of the samples: ragged, down to a response of one token."""


def write_model(folder: Path, family: str = "qwen3", **overrides: Any) -> None:
    """A random model whose sizes are divisible by two tensor ranks."""
    from tests.unit.backends.megatron_utils.megatron_case import write_hf_model

    write_hf_model(folder, family, **overrides)
    (folder / "tokenizer.json").write_text("{}")  # the flags' check requires one; nothing here tokenizes


def make_args(hf_folder: Path, *flags: object) -> Namespace:
    """Complete args of a run that only trains."""
    from tests.unit.backends.megatron_utils.megatron_case import hf_flags

    from slime.compose import parse_args

    argv = [
        *hf_flags(hf_folder),
        *("--debug-train-only", "--num-rollout", 4, "--rollout-batch-size", 4, "--n-samples-per-prompt", 2),
        *("--global-batch-size", 8, "--ref-load", hf_folder, "--load", hf_folder, "--lr", 1e-3),
        *(
            "--lr-decay-style",
            "constant",
            "--weight-decay",
            0.1,
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            40,
        ),
        *("--data-pad-size-multiplier", 4, "--attention-dropout", 0, "--hidden-dropout", 0),
        "--disable-rollout-global-dataset",
        *(() if "--bf16" in flags else ("--fp32",)),
        *flags,
    ]
    return parse_args(argv=[str(word) for word in argv])


def make_train_data(vocab_size: int = 131, seed: int = 0) -> dict[str, Any]:
    """Train data with masks that have holes, one fully masked sample, and a rollout of two samples."""
    generator = random.Random(seed)
    data: dict[str, Any] = {name: [] for name in ("tokens", "response_lengths", "rewards", "loss_masks", "truncated")}
    data["rollout_log_probs"] = []
    for prompt, response in LENGTHS:
        data["tokens"].append([generator.randrange(vocab_size) for _ in range(prompt + response)])
        data["response_lengths"].append(response)
        data["loss_masks"].append([int(generator.random() < 0.8) for _ in range(response)])
        data["rollout_log_probs"].append([-generator.random() * 5 for _ in range(response)])
        data["rewards"].append(generator.uniform(-1, 1))
        data["truncated"].append(0)
    data["loss_masks"][1] = [0]
    data["raw_reward"] = list(data["rewards"])
    data["rollout_ids"] = [0, 1, 2, 3, 4, 5, 6, 7, 7]
    data["sample_indices"] = list(range(len(LENGTHS)))
    return data


def cut(args: Namespace, train_data: dict[str, Any], parallel: dict[str, int]) -> list[Any]:
    """One ``RankBatch`` per data-parallel rank."""
    from slime.train_data.columns import TrainBatch
    from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
    from slime.train_data.split import split_by_rank

    config = ScheduleConfig(
        dp_size=parallel["dp_size"],
        cp_size=parallel["cp_size"],
        vpp_size=parallel.get("vpp_size", 1),
        microbatch_group_size_per_vp_stage=parallel.get("microbatch_group_size_per_vp_stage", 1),
        use_dynamic_batch_size=args.use_dynamic_batch_size,
        max_tokens_per_gpu=args.max_tokens_per_gpu,
        micro_batch_size=args.micro_batch_size,
    )
    schedule = build_dp_schedule(
        config,
        [len(tokens) for tokens in train_data["tokens"]],
        global_batch_size=args.global_batch_size,
        rollout_indices=train_data["rollout_ids"],
    )
    return split_by_rank(TrainBatch.from_dict(train_data), schedule)


def new_updater(worker: Any) -> Any:
    """A new updater of the worker's weights, as after a start; its flags may have changed."""
    from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
    from slime.compose import parts

    transport = parts(worker.args).transport
    return WeightUpdater(
        worker.args,
        worker.model,
        worker._sleep.host_weights,
        hf_config=worker._hf_config,
        first_version=max(worker._start_rollout_id, worker.args.update_weight_start_version),
        make_transport=transport and transport.load(),
    )


def start_worker(
    args: Namespace,
    rank: int,
    world_size: int,
    port: int,
    *,
    role: str = "actor",
    kind: Any = None,
    state_copy: Any = None,
    **options: Any,
) -> Any:
    """A trainer; in a process that had one before, a new one in the same default group and in new parallel groups."""
    import torch.distributed as dist
    from megatron.core import mpu

    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.compose import parts
    from slime.observability.timer import Timer
    from slime.ray.parts import load_all

    class Worker(kind or MegatronTrainRayActor):
        def join_process_group(self, cuda_backend: str, timeout: timedelta) -> None:
            if not dist.is_initialized():
                super().join_process_group(cuda_backend, timeout)

    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    if Timer().is_running("train_wait"):
        Timer().end("train_wait")
    worker = Worker()
    worker.set_rendezvous(world_size, rank, "127.0.0.1", port)
    if state_copy is not None:
        worker.state_copy = state_copy
    chosen = parts(args)
    transport = chosen.transport and chosen.transport.load()
    if role == "actor":
        options |= {"transforms": load_all(chosen.transforms), "guides": load_all(chosen.guides), "transport": transport}
    worker.init(args, role, **options)
    return worker


def run_workers(function: Any, world_size: int, *arguments: Any, timeout_s: float = 250) -> list[Any]:
    """Run ``function(rank, world_size, port, *arguments)`` in new processes; return the results in rank order."""
    port = find_available_port(21000)
    with RankPool() as pool:
        return pool.run(function, world_size, port, *arguments, timeout_s=timeout_s, joins_world=False)
