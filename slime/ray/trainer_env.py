"""The environment a trainer rank is born with.  Some of it (LD_PRELOAD, thread counts) cannot be set later."""

from __future__ import annotations

import os
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import torch

from slime.backends.sglang_utils import cpu_shim
from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES, cluster_has_accelerators
from slime.utils import env
from slime.utils.errors import ConfigError

PRELOAD_LIBRARY = "torch_memory_saver_hook_mode_preload{}.abi3.so"
"""One for each major version of CUDA (``_cu12``, ``_cu13``); older releases have a single one, without a suffix."""


def trainer_environment(args: Namespace, world_size: int) -> dict[str, str]:
    """Environment of a trainer rank; ``--train-env-vars`` has the last word.

    Args:
        args: the run's arguments.
        world_size: number of ranks, which share the cores of a CPU machine.
    """
    variables = {
        **COMMON_ACTOR_ENV,
        **NOSET_VISIBLE_DEVICES,
        # SGLang runs NCCL without cuMem; both ends of a weight broadcast must agree.
        "NCCL_CUMEM_ENABLE": env.get_str("NCCL_CUMEM_ENABLE", "0") or "0",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": env.get_str("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1") or "1",
        # One order of kernels per device queue: Megatron's overlap of communication relies on it.
        "CUDA_DEVICE_MAX_CONNECTIONS": env.get_str("CUDA_DEVICE_MAX_CONNECTIONS", "1") or "1",
    }
    if not cluster_has_accelerators():
        # Ray gives a worker one thread; ranks on CPUs share the cores of the machine evenly.
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world_size))
        if not args.debug_train_only:
            # The trainer speaks SGLang's wire format, so it imports SGLang, which needs the shim here.
            variables["PYTHONPATH"] = cpu_shim.child_environment()["PYTHONPATH"]
    elif args.offload_train:
        variables |= {
            "LD_PRELOAD": str(_preload_library()),
            "TMS_INIT_ENABLE": "1",
            "TMS_INIT_ENABLE_CPU_BACKUP": "1",
        }
    return variables | {name: str(value) for name, value in args.train_env_vars.items()}


def _preload_library() -> Path:
    spec = find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "--offload-train (also set by --colocate) needs the package torch_memory_saver on a CUDA machine; install "
            "the gpu extra, or pass --no-offload-train"
        )
    site = Path(spec.origin).parent.parent
    cuda = (torch.version.cuda or "").partition(".")[0]
    names = [PRELOAD_LIBRARY.format(suffix) for suffix in ([f"_cu{cuda}", ""] if cuda else ["_cu13", "_cu12", ""])]
    for name in names:
        if (site / name).exists():
            return site / name
    raise ConfigError(
        f"torch_memory_saver in {site} has none of the libraries {', '.join(names)}, and torch was built for CUDA "
        f"{torch.version.cuda}; install a torch_memory_saver of that CUDA (the gpu extra), or pass --no-offload-train"
    )
