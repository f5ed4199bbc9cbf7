"""The job that schedules run: its flags, its grader and its filter."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.rollout.base_types import first_index
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample
from tests.simulator.faults import Setup

HERE = __name__
JUDGE = "judge"


def is_dull(group: int) -> bool:
    """Whether the schedules' filter drops a group."""
    return group % 5 == 3


async def reward(args: Namespace, sample: Any, **_: Any) -> Any:
    await asyncio.sleep(0.02)
    if isinstance(sample, list):
        return [await reward(args, one) for one in sample]
    if JUDGE in args.sglang_model_routers:
        asked = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": 4}}
        await post(get_model_url(args, JUDGE), asked, max_retries=600)
    return float(sum(sample.tokens) % 5)


def drops_some(args: Namespace, group: list[Sample], **_: Any) -> bool:
    return not is_dull(first_index(group) // args.n_samples_per_prompt)


@functools.cache
def _parsed_flags(batch: int) -> bytes:
    from slime.compose import flag_groups
    from slime.flags.parse import get_slime_extra_args_provider
    from slime.flags.parser import Parser

    words = ["--prompt-data", "x", "--rollout-batch-size", str(batch)]
    return pickle.dumps(get_slime_extra_args_provider(groups=flag_groups())(Parser()).parse_args(words))


@functools.lru_cache(maxsize=256)
def base_args(setup: Setup) -> Namespace:
    from slime.compose import flag_groups
    from slime.flags.group import derive_all

    args: Namespace = pickle.loads(_parsed_flags(setup.batch))
    known: dict[str, Any] = {
        "bf16": True, "fp16": False, "params_dtype": None, "seed": 1, "save": "x", "load": None, "ckpt_step": None,
        "finetune": False, "no_load_optim": False, "no_load_rng": False, "no_save_optim": False,
        "no_save_rng": False, "async_save": setup.async_save, "exit_on_missing_checkpoint": False,
        "micro_batch_size": 1,
        "global_batch_size": setup.batch * setup.samples_per_prompt,
        "save_interval": setup.save_interval, "num_experts": None, "lr": 1e-6, "wandb_key": None,
        "sglang_server_concurrency": 64, "sglang_router_ip": None, "sglang_router_port": None,
        "sglang_pp_size": 1, "sglang_dp_size": 1, "sglang_ep_size": 1, "sglang_dtype": "bfloat16",
        "sglang_router_request_timeout_secs": 600, "sglang_config": None, "prefill_num_servers": None,
        "sglang_enable_deterministic_inference": True,
        "world_size": setup.trainer_ranks, "data_parallel_size": setup.trainer_ranks, "num_layers": 2,
        "seq_length": 4096, "hf_checkpoint": "hf", "critic_args": None, "int4_qat": False,
    }  # fmt: skip
    for name, value in known.items():
        setattr(args, name, value)
    given = {
        "actor_num_nodes": 1, "actor_num_gpus_per_node": setup.trainer_ranks,
        "rollout_num_gpus": setup.engines + setup.judge, "rollout_num_gpus_per_engine": 1, "num_gpus_per_node": 8,
        "n_samples_per_prompt": setup.samples_per_prompt,
        "over_sampling_batch_size": setup.batch + setup.over_sampling, "num_rollout": setup.num_rollout,
        "use_fault_tolerance": setup.fault_tolerance, "partial_rollout": setup.partial,
        "custom_rm_path": f"{HERE}.reward", "rollout_max_response_len": 64,
        "rollout_function_path": setup.rollout_function, "colocate": setup.colocate,
        "dynamic_sampling_filter_path": f"{HERE}.drops_some" if setup.is_filtered else None,
        "update_weights_interval": setup.update_interval, "keep_last": setup.keep_last,
        "trainer_recovery": setup.recovery, "preemption_grace_s": setup.grace_s, "verify_checkpoint": False,
        "rollout_health_check_interval": 5.0, "rollout_health_check_timeout": 5.0,
        "engine_start_timeout_s": 60.0, "weight_update_timeout_s": 60.0, "train_timeout_s": 300.0,
        "rollout_timeout_s": 900.0, "loop_stall_timeout_s": 300.0, "rollout_stall_timeout_s": 60.0,
        "distributed_timeout_minutes": 2, "trainer_hang_timeout_s": 60.0, "rollout_ledger_timeout_s": 20.0,
        "update_weight_transport": "disk" if setup.disk else None,
        "update_weight_disk_dir": "x" if setup.disk else None,
        "prefill_num_servers": int(setup.prefill) or None,
        "no_record": True, "record": False,
        "advantage_estimator": "grpo", "dump_details": None, "input_key": "prompt", "label_key": "label",
    }  # fmt: skip
    for name, value in given.items():
        setattr(args, name, value)
    derive_all(args, flag_groups())
    args.job_secret = None
    # Values that depend on the schedule's folder are derived for each command.
    args.start_rollout_id, args.load = None, None
    args.finetune = args.no_load_optim = args.no_load_rng = False
    return args


def write_layout(path: Path, setup: Setup) -> None:
    """Write the ``--sglang-config`` of a job with a judge."""
    kinds = ["prefill", *["decode"] * (setup.engines - 1)] if setup.prefill else ["regular"] * setup.engines
    groups = [{"worker_type": kind, "num_gpus": kinds.count(kind)} for kind in dict.fromkeys(kinds)]
    judge = {"name": JUDGE, "model_path": JUDGE, "server_groups": [{"worker_type": "regular", "num_gpus": 1}]}
    path.write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": groups}, judge]}))
