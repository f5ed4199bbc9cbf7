"""Creates Megatron's parallel groups and random states for one rank, from the flags.

``slime.backends.train_worker`` (or the main function of a tool) creates the default process group before.
"""

from __future__ import annotations

import logging
import random
from argparse import Namespace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import config as megatron_config
from megatron.core import mpu, tensor_parallel

from slime.backends.megatron_utils import cpu_platform
from slime.backends.megatron_utils.training_names import share_args
from slime.utils.errors import ConfigError
from slime.utils.misc import call_hook

logger = logging.getLogger(__name__)


def init(args: Namespace) -> None:
    """Create the parallel groups, seed every generator, share the flags with plug-ins, and call the user's init hook.

    Raises:
        ConfigError: there is no default process group, or parallel groups of other sizes exist.
    """
    cpu_platform.check()
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised; call init_process_group before initialize.init.")
    initialize_parallel_state(args)
    set_random_seed(args.seed, data_parallel_random_init=args.data_parallel_random_init)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    if args.enable_experimental:
        megatron_config.set_experimental_flag(True)
    share_args(args)
    if path := args.custom_megatron_init_path:
        call_hook("--custom-megatron-init-path", path, args)


def initialize_parallel_state(args: Namespace) -> None:
    """Create Megatron's groups over the default group, in the order tensor, context, expert, data, pipeline.

    Existing groups are kept if their tensor, pipeline and context sizes match the flags.

    Raises:
        ConfigError: these sizes differ from the flags.
    """
    sizes = {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
    }
    if mpu.is_initialized():
        existing = {
            "tensor": mpu.get_tensor_model_parallel_world_size(),
            "pipeline": mpu.get_pipeline_model_parallel_world_size(),
            "context": mpu.get_context_parallel_world_size(),
        }
        if existing != sizes:
            raise ConfigError(f"Parallel groups exist with sizes {existing}; the flags ask for {sizes}.")
        return
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )
    logger.info(
        "Parallel groups: tensor %d, context %d, pipeline %d, data %d, expert %d.",
        sizes["tensor"],
        sizes["context"],
        sizes["pipeline"],
        mpu.get_data_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
    )


def set_random_seed(seed: int, *, data_parallel_random_init: bool) -> None:
    """Seed Python, numpy, torch and Megatron's tensor-parallel generators.

    Pipeline stages use seeds 100 apart, so that their layers do not start equal.  Data-parallel ranks share a seed
    unless ``data_parallel_random_init`` is set; then their seeds are 10 apart.
    """
    seed = seed + 100 * mpu.get_pipeline_model_parallel_rank()
    if data_parallel_random_init:
        seed = seed + 10 * mpu.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
