"""Builds the keyword arguments of SGLang's ServerArgs from slime's arguments.  Pure: nothing is started or imported.

Precedence, lowest first: SGLang's defaults, ``--sglang-*`` flags, values that slime sets, the group's overrides.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.sglang_config import RENAMED_FIELDS, own_dtype, present_name, trainer_dtype
from slime.flags.security import Trust
from slime.utils.files import read_model_config

logger = logging.getLogger(__name__)

CPU_MEM_FRACTION = 0.5
"""SGLang does not start if its weights, plus memory that other processes allocate meanwhile (a loading trainer),
exceed this fraction."""
CPU_MAX_TOTAL_TOKENS = 65536
"""Default limit of the KV cache on a CPU, in tokens."""
NOT_FIELDS = frozenset(
    {
        "sglang_admin_api_key",
        "sglang_api_key",
        "sglang_config",
        "sglang_data_parallel_size",
        "sglang_enable_deepep_moe",
        "sglang_enable_ep_moe",
        "sglang_expert_parallel_size",
        "sglang_model_routers",
        "sglang_moe_data_parallel_size",
        "sglang_pipeline_parallel_size",
        "sglang_router_ip",
        "sglang_router_port",
        "sglang_router_request_timeout_secs",
        "sglang_server_concurrency",
    }
)
"""Attributes of args that are named like an engine's flags but are not passed to it; ``server_guard`` handles keys."""

OWN_DRAFTS = ("EAGLE", "NEXTN")
"""Speculative algorithms that draft with the checkpoint's own MTP layers, unless a draft model is given."""


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """Everything about one engine that is not a flag: rank, host, ports and GPUs."""

    rank: int
    """Index of the actor among all engine actors of the run."""
    worker_type: str = "regular"
    num_gpus_per_engine: int
    base_gpu_id: int
    """First GPU, as an index into the devices visible to the process."""
    host: str
    port: int
    nccl_port: int | None
    dist_init_addr: str | None
    disaggregation_bootstrap_port: int | None = None
    node_rank: int = 0
    """Index of this node among the engine's nodes."""

    def num_nodes(self, num_gpus_per_node: int) -> int:
        return max(1, self.num_gpus_per_engine // num_gpus_per_node)


def build_server_args(
    args: Namespace,
    place: EnginePlace,
    *,
    model_path: str,
    overrides: Mapping[str, Any],
    on_cpu: bool,
) -> dict[str, Any]:
    """Build the keyword arguments of ``ServerArgs``; :func:`keep_known` fits them to an installed version.

    Args:
        place: the engine's rank, ports and GPUs.
        overrides: ServerArgs fields of the engine's group, which take precedence over everything.  Custom weight
            loaders are added to our own.
    """
    decided = _decided(args, place, model_path, overrides)
    for attribute, value in vars(args).items():
        field_name = attribute.removeprefix("sglang_")
        if field_name == attribute or attribute in NOT_FIELDS or field_name in decided:
            continue
        if place.worker_type != "decode" or field_name != "enable_hierarchical_cache":  # not for decode engines
            decided[field_name] = value
    dtype = own_dtype(decided.get("dtype"), trainer_dtype(args)) or ("float32" if on_cpu else None)
    if dtype is not None:
        decided["dtype"] = dtype
    if on_cpu:
        decided |= _cpu_defaults(decided)
    loaders = [*(decided.get("custom_weight_loader") or ()), *(overrides.get("custom_weight_loader") or ())]
    decided |= overrides
    loaders += args.weight_loaders
    decided["custom_weight_loader"] = loaders
    is_open = decided.get("enable_multimodal") is None and not decided.get("skip_tokenizer_init")
    if is_open and lacks_processor(model_path):
        decided["enable_multimodal"] = False  # SGLang would not start
    if decided.get("speculative_algorithm") in OWN_DRAFTS and not decided.get("speculative_draft_model_path"):
        # SGLang does this for most families with MTP layers, but not for MiMo.
        decided["speculative_draft_model_path"] = model_path
    if decided["enable_memory_saver"] and decided.get("cuda_graph_backend_prefill", "") is None:
        # Prefill graphs keep pointers into memory that the memory saver releases.
        decided["cuda_graph_backend_prefill"] = "disabled"
    return decided


def _decided(args: Namespace, place: EnginePlace, model_path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    num_nodes = place.num_nodes(args.num_gpus_per_node)
    pp_size = overrides.get("pp_size", args.sglang_pp_size)
    decided: dict[str, Any] = {
        "model_path": model_path,
        "trust_remote_code": Trust.of(args).trust_remote_code,
        "random_seed": args.seed + place.rank * args.num_gpus_per_node,
        "enable_memory_saver": bool(args.offload_rollout),
        "host": place.host,
        "port": place.port,
        "nccl_port": place.nccl_port,
        "nnodes": num_nodes,
        "node_rank": place.node_rank,
        "dist_init_addr": place.dist_init_addr,
        "gpu_id_step": 1,
        "base_gpu_id": place.base_gpu_id,
        "tp_size": place.num_gpus_per_engine // pp_size,
        "dp_size": args.sglang_dp_size,
        "pp_size": pp_size,
        "ep_size": args.sglang_ep_size,
        "skip_server_warmup": True,
        "enable_draft_weights_cpu_backup": True,
        "enable_metrics": True,
        # Interpolates a vision tower's position embeddings like transformers and the trainer.
        "enable_precise_embedding_interpolation": True,
    }
    if place.worker_type == "prefill":
        decided |= {
            "disaggregation_mode": "prefill",
            "load_balance_method": "follow_bootstrap_room",
            "disaggregation_bootstrap_port": place.disaggregation_bootstrap_port,
        }
    elif place.worker_type == "decode":
        decided |= {"disaggregation_mode": "decode", "prefill_round_robin_balance": True}
    elif place.worker_type == "encoder":
        decided["encoder_only"] = True
    if args.use_rollout_routing_replay:
        decided["enable_return_routed_experts"] = True
    return decided | args.engine_settings


def lacks_processor(folder: str) -> bool:
    """Return True for a model with a vision tower but no image processor, such as an export of text training."""
    if not (Path(folder) / "config.json").is_file() or any(Path(folder).glob("*processor_config.json")):
        return False
    return bool(read_model_config(folder).get("vision_config"))


def _cpu_defaults(decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a CPU engine needs, and defaults for those that no flag has set."""
    defaults = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "mem_fraction_static": CPU_MEM_FRACTION,
        "max_total_tokens": CPU_MAX_TOTAL_TOKENS,
    }
    chosen = {name: value for name, value in defaults.items() if decided.get(name) is None}
    # The overlapped scheduler needs CUDA streams, and the memory saver CUDA's virtual memory.  A scheduler that polls
    # while idle would take a core from the trainer.
    return chosen | {
        "disable_overlap_schedule": True,
        "enable_memory_saver": False,
        "sleep_on_idle": True,
        "lora_backend": "torch_native",  # the other backends need Triton
    }


def keep_known(server_args: Mapping[str, Any], known_fields: Collection[str]) -> dict[str, Any]:
    """Return the values under the installed ServerArgs' names; drop and log values without a field."""
    # A name of an older version comes from a group's overrides, which take precedence over the flag with that meaning.
    renamed = {
        present_name(name, known_fields): value for name, value in server_args.items() if name in RENAMED_FIELDS
    }
    server_args = {name: value for name, value in server_args.items() if name not in RENAMED_FIELDS} | renamed
    dropped = sorted(set(server_args) - set(known_fields))
    if dropped:
        logger.info("Not supported by the installed SGLang, left out: %s", ", ".join(dropped))
    return {name: value for name, value in server_args.items() if name in known_fields}
